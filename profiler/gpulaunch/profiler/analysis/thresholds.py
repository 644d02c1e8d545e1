"""All thresholds of all rules, each with its reason. A rule's page in docs/findings.md lists those that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One threshold."""

    name: str
    value: float
    unit: str
    why: str

    def __str__(self) -> str:
        return f"{self.value * 100:g} %" if self.unit == "share" else f"{self.value:g} {self.unit}".strip()


# -- minimum data for a verdict

WINDOW_S: Final = Limit(
    name="a window",
    value=5.0,
    unit="s",
    why="CPU time is counted in ticks of 10 ms, and ranks are looked at once a second",
)
WINDOW_STEPS: Final = Limit(
    name="steps of a window", value=20, unit="steps", why="a mean over fewer steps moves by more than is looked for"
)
SLOW_WINDOW_S: Final = Limit(
    name="a window of slow steps", value=60.0, unit="s", why="who trains with long steps wants to hear something, too"
)
SLOW_WINDOW_STEPS: Final = Limit(
    name="steps of such a window", value=4, unit="steps", why="one step alone may be an epoch's first"
)
WARM_UP_STEPS: Final = Limit(
    name="warm-up",
    value=10,
    unit="steps",
    why="first steps compile, start workers, fill caches and pools; nothing can be said from them",
)
LONG_S: Final = Limit(
    name="the long window",
    value=600.0,
    unit="s",
    why="what comes now and then (saves, log lines that are sampled) is judged over this time, or half of it",
)
APPEARS: Final = Limit(
    name="appears after", value=2, unit="windows", why="one window may hold an epoch's end, or another job's burst"
)
GONE: Final = Limit(name="goes after", value=3, unit="windows", why="a finding near a limit must not come and go")

# -- minimum loss

LOST: Final = Limit(
    name="lost, by a model",
    value=0.10,
    unit="share",
    why="what a model predicts below a tenth of the step is within the spread of steps on a shared machine",
)
LOST_MEASURED: Final = Limit(
    name="lost, by a clock", value=0.05, unit="share", why="a loss that was timed as such needs no margin for a model"
)
SMALL_LOSS: Final = Limit(
    name="lost, small", value=0.02, unit="share", why="as easy to mend as it is certain, and it is there at every step"
)

# -- dataloader

BUSY: Final = Limit(
    name="busy workers",
    value=0.70,
    unit="share",
    why="workers that idle a third of the time are not what training waits for; two of three or more that work are",
)
CROWDED: Final = Limit(
    name="run queue",
    value=0.30,
    unit="share",
    why="workers that wait for a core this long would wait longer if there were more of them",
)
CROWDED_NODE: Final = Limit(
    name="CPU pressure",
    value=0.50,
    unit="share",
    why="half of the time somebody on the node had to wait for a core (PSI, cpu some): there is none to give away",
)
SURPLUS: Final = Limit(
    name="workers per core",
    value=2.0,
    unit="",
    why="up to two per core overlap reading and computing; beyond, they only wait for each other",
)
HANDOVER: Final = Limit(
    name="handing over",
    value=0.40,
    unit="share",
    why="two ranks on two cores spent a quarter of steps of 10 ms so, most of it waiting for a core",
)
WORKER_PAYS_S: Final = Limit(
    name="worth a worker",
    value=0.002,
    unit="s",
    why="to hand over a ready batch of one tensor took 1.3 to 2.3 ms (on two cores); making it here would be as fast",
)
STORAGE: Final = Limit(
    name="read from storage",
    value=0.50,
    unit="share",
    why="of the bytes read: else it is not the storage that is slow",
)

COMPUTES: Final = Limit(
    name="computing without workers",
    value=0.50,
    unit="share",
    why="of the wait; the rest may be storage or a network, which no cheaper transform would make faster",
)

# -- copies and syncs

EVERY_STEP: Final = Limit(
    name="at every step",
    value=0.50,
    unit="per step",
    why="at every other step or oftener; a log line every ten steps is none",
)
PINNED_GAIN: Final = Limit(
    name="pinned against pageable",
    value=0.25,
    unit="share",
    why="copies were 1.34 to 1.44 times as fast, on batches of 8 MiB (published by SPDL): a quarter less time",
)
PIPE_IDLE: Final = Limit(
    name="tensor cores idle",
    value=0.05,
    unit="share",
    why="what a few kernels of a library use although the program does not",
)
GEMM_BUSY: Final = Limit(
    name="SMs busy", value=0.50, unit="share", why="a GPU that idles half of the time is not held up by its arithmetic"
)

# -- memory

GROWN_BYTES: Final = Limit(
    name="growth", value=64 << 20, unit="bytes", why="allocators keep and give back less than this without any leak"
)
GROWN_POINTS: Final = Limit(
    name="points of a trend", value=6, unit="windows", why="fewer points show a direction by chance (1 in 32 for five)"
)
MOST_TO_FULL_S: Final = Limit(
    name="full within", value=7 * 86400.0, unit="s", why="what would fill the memory later than in a week hurts nobody"
)
FRAGMENTED: Final = Limit(
    name="unusable",
    value=0.25,
    unit="share",
    why="of the reserved memory in free parts of used blocks; splitting leaves some in every program",
)
SHM_FULL: Final = Limit(
    name="shared memory used", value=0.80, unit="share", why="one more round of batches may be the bus error"
)

# -- pace

STRAGGLES_S: Final = Limit(
    name="behind the others", value=0.001, unit="s", why="ranks that share a machine are scheduled this far apart"
)
SAVES: Final = Limit(
    name="saves", value=3, unit="saves", why="the distance between saves is not known before the second, nor steady"
)
LOGGED_ERROR: Final = Limit(
    name="error of that",
    value=0.20,
    unit="share",
    why="of the loss itself: samples are few, and a share of them is a guess",
)
LOGGED_SAMPLES: Final = Limit(
    name="samples in logging", value=4, unit="samples", why="one line may be met by chance, not again and again"
)
THREADS: Final = Limit(
    name="threads per core", value=1.5, unit="", why="up to here the threads of a loader and of torch pass each other"
)
THROTTLED: Final = Limit(
    name="throttled", value=0.10, unit="share", why="of the time; a short burst of heat is no loss that can be seen"
)
