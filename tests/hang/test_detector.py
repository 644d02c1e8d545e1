"""The whole room on a real loop, over real processes and pages, with short limits."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.hang import detector
from gpulaunch.launcher.hang.detector import HangDetector
from gpulaunch.launcher.hang.stacks import Target
from gpulaunch.launcher.hang.values import Limits, Verdict
from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.profiler.channel import segment, segment_writer
from gpulaunch.profiler.channel.layout import REGION_BITS, Hook, Region, Word

LIMITS = Limits(
    floor_s=1.0, told_s=2.0, told_at_most_s=3.0, told_patiently_s=4.0, stopped_s=1.0, deadlock_s=1.0, held_s=2.0,
    sample_s=0.3, again_s=0.3, rest_s=0.5,
)  # fmt: skip
SHORT = replace(LIMITS, timeout_s=5.0, settle_s=1.25)
PATIENCE_S = 30.0
CALM_S = 7.0
"""More than every limit together, the timeout of SHORT included: what is not acted on by then is not for a reason."""

HOLDS_THE_GIL = "import ctypes\ndef in_c():\n    ctypes.PyDLL(None).sleep(600)\nREADY()\nin_c()\n"
OPENS_A_PIPE = "import os\nos.mkfifo('pipe')\ndef load():\n    return open('pipe')\nREADY()\nload()\n"
SLEEPS = "import time\ndef nap():\n    time.sleep(600)\nREADY()\nnap()\n"
VALIDATES = "import time\ndef validate():\n    time.sleep(600)\nREADY()\nvalidate()\n"
WORKS = "READY()\nx = 0\nwhile True:\n    x += 1\n"
COMPILES = (
    "import os, subprocess, sys\nREADY()\n"
    "child = 'import os, sys\\nwhile os.getppid() == int(sys.argv[1]): pass'\n"
    "subprocess.run([sys.executable, '-c', child, str(os.getpid())])\n"
)
WAITS = "import sys\nsys.path.insert(0, sys.argv[0])\nfrom distributed_c10d import all_reduce\nREADY()\nall_reduce()\n"


class Job:
    """Ranks with pages, a loop, a watch over them, and what it said."""

    def __init__(self, toys: Any, where: Path) -> None:
        self.toys = toys
        self.where = where
        self.loop = Loop()
        self.ranks: dict[int, Target] = {}
        self.writers: dict[int, segment_writer.SegmentWriter] = {}
        self.told: list[Verdict] = []
        self.over: list[tuple[tuple[int, ...], float]] = []
        self.verdicts: list[Verdict] = []
        self.idle = [False]
        """Whether none of the ranks works, as it was told from time to time."""
        self.watch: HangDetector | None = None
        self.others = set(linux.children_of(os.getpid()))
        """What tests before this one have started, and multiprocessing keeps for the next."""

    def rank(self, source: str, region: Region | None = Region.FORWARD) -> None:
        """One more rank; `region`: where its page says it is, None for a rank without a page."""
        rank = len(self.ranks)
        self.ranks[rank] = self.toys.start(source, rank=rank)
        if region is not None:
            path = str(self.where / f"rank-{rank}.bin")
            segment_writer.create(path, rank=rank, local_rank=rank, attempt=0)
            self.writers[rank] = segment_writer.SegmentWriter(path)
            self.writers[rank].words[Word.FIRST_STEP_END_NS] = 1
            self.move(rank, region)

    def move(self, rank: int, region: Region, ago_s: float = 0.0) -> None:
        """Its training thread passes an edge."""
        at_ns = time.monotonic_ns() - int(ago_s * 1e9)
        self.writers[rank].words[Word.LAST_EDGE] = at_ns << REGION_BITS | region

    def read(self, rank: int) -> segment.SegmentSnapshot | None:
        try:
            return segment.read(str(self.where / f"rank-{rank}.bin"))
        except OSError:
            return None

    def start(self, limits: Limits = LIMITS, *, whole: bool = True) -> HangDetector:
        self.watch = HangDetector(
            self.loop,
            limits,
            {rank: target.pid for rank, target in self.ranks.items()},
            self.read,
            lambda rank: self.ranks[rank].rank_dir,
            self.told.append,
            lambda ranks, after_s: self.over.append((tuple(ranks), after_s)),
            self.verdicts.append,
            path=str(self.where / "hang.json"),
            whole=whole,
            on_idle=self.idle.append,
            others_idle_s=lambda: math.inf if whole else None,
        )
        self.watch.start()
        return self.watch

    def turn(self, until: Callable[[], object], within_s: float = PATIENCE_S) -> bool:
        """Turn the loop until something holds; whether it came to that."""
        until_s = self.loop.now() + within_s
        while not until() and self.loop.now() < until_s:
            self.loop.turn(0.05)
        return bool(until())

    def verdict(self, limits: Limits = LIMITS) -> Verdict:
        self.start(limits)
        assert self.turn(lambda: self.verdicts), "no verdict"
        return self.verdicts[0]

    def evidence(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.where / "hang.json").read_text())
        return document

    def close(self) -> None:
        if self.watch is not None:
            self.watch.stop()
            self.turn(lambda: self.watch is not None and not self.watch.helper_pids())
            ours = {*self.others, *(target.pid for target in self.ranks.values())}
            self.turn(lambda: not set(linux.children_of(os.getpid())) - ours)
        for writer in self.writers.values():
            writer.close()
        self.loop.close()


@pytest.fixture
def job(toys: Any, tmp_path: Path) -> Iterator[Job]:
    job = Job(toys, tmp_path)
    yield job
    job.close()


@pytest.fixture
def all_reduce(tmp_path: Path) -> str:
    """A program that waits in what is named as torch's all_reduce is."""
    library = tmp_path / "site-packages" / "torch" / "distributed"
    library.mkdir(parents=True)
    (library / "distributed_c10d.py").write_text("import time\ndef all_reduce():\n    time.sleep(600)\n")
    return WAITS.replace("sys.argv[0]", repr(str(library)))


# -- told, and acted on


def test_the_rank_in_its_dataset_is_told_with_its_line_then_acted_on_after_the_timeout(
    job: Job, all_reduce: str
) -> None:
    for _ in range(2):
        job.rank(all_reduce, Region.BACKWARD)
    job.rank(OPENS_A_PIPE, Region.LOADER)
    job.start(SHORT)

    assert job.turn(lambda: job.told)
    assert job.told[0].sentence == "rank 2 is in train.py:5 open(), ranks 0-1 wait for it in all_reduce"
    assert (job.told[0].acts, job.told[0].odd) == (False, (2,))
    assert (job.evidence()["state"], job.verdicts) == ("told", [])
    assert job.turn(lambda: job.verdicts)
    verdict = job.verdicts[0]
    assert (verdict.rule, verdict.odd, verdict.sentence) == ("timeout", (2,), job.told[0].sentence)
    assert verdict.quiet_s >= SHORT.timeout_s
    assert verdict.notes == ("stacks of all ranks: py-spy",)


def test_a_rank_that_moves_again_takes_back_what_was_told(job: Job) -> None:
    """And the next time it is told anew."""
    job.rank(SLEEPS, Region.LOADER)
    job.start()
    assert job.turn(lambda: job.told)

    job.move(0, Region.LOADER)

    assert job.turn(lambda: job.over)
    ((ranks, after_s),) = job.over
    assert ranks == (0,)
    assert LIMITS.told_s <= after_s <= 3 * LIMITS.told_s
    assert job.turn(lambda: len(job.told) > 1)
    assert job.verdicts == []


@pytest.mark.parametrize("moves", [True, False])
def test_a_rank_that_ends_takes_back_what_was_told_at_once(job: Job, moves: bool) -> None:
    """The job may be over before the next second."""
    job.rank(SLEEPS, Region.LOADER)
    watch = job.start()
    assert job.turn(lambda: job.told)

    if moves:
        job.move(0, Region.OTHER)
    watch.ended(0)

    ((ranks, after_s),) = job.over
    assert ranks == ((0,) if moves else ())
    assert (after_s > 0) is moves


def test_the_evidence_is_written_whole(job: Job) -> None:
    job.rank(OPENS_A_PIPE, Region.LOADER)

    verdict = job.verdict(SHORT)

    found = job.evidence()
    assert verdict.path == str(job.where / "hang.json")
    assert os.stat(verdict.path).st_mode & 0o777 == 0o600
    assert (found["version"], found["state"], found["sentence"], found["odd"]) == (2, "acted", verdict.sentence, [0])
    (rank,) = found["ranks"]
    assert (rank["rank"], rank["region"], rank["source"]) == (0, "loader", "py-spy")
    assert [frame["name"] for frame in rank["threads"][-1]["frames"]][:2] == ["load", "<module>"]
    assert len(rank["samples"]) >= 3


def test_ranks_that_wait_in_different_collectives_are_a_deadlock(job: Job, all_reduce: str) -> None:
    job.rank(all_reduce, Region.OTHER)
    job.rank(all_reduce.replace("READY()", "READY()\n"), Region.OTHER)

    verdict = job.verdict()

    assert verdict.rule == "deadlock"
    assert re.fullmatch(
        r"rank 0 waits in all_reduce \(train.py:\d\), rank 1 waits in all_reduce \(train.py:\d\)", verdict.sentence
    )
    assert job.told == [], "it is proven before it is time to tell"


def test_a_thread_of_the_programs_own_may_be_what_they_wait_for(job: Job, all_reduce: str) -> None:
    """It makes rollouts, say, and sends them when it is done."""
    thread = "import threading, time\ndef roll(): time.sleep(600)\nthreading.Thread(target=roll, daemon=True).start()\n"
    job.rank(all_reduce, Region.OTHER)
    job.rank(thread + all_reduce, Region.OTHER)
    job.start()

    assert not job.turn(lambda: job.verdicts, CALM_S)
    assert job.told, "told"


def test_ranks_that_wait_in_the_same_collective_are_told_and_left_alone(job: Job, all_reduce: str) -> None:
    for _ in range(2):
        job.rank(all_reduce, Region.OTHER)
    job.start()

    assert not job.turn(lambda: job.verdicts, CALM_S)
    assert job.told[0].sentence.startswith("ranks 0-1 wait in all_reduce (train.py:")


def test_a_rank_that_sleeps_with_the_gil_is_hung_in_a_validation_too(job: Job) -> None:
    job.rank(HOLDS_THE_GIL, Region.OTHER)

    assert job.verdict().sentence == (
        "rank 0 holds the GIL in train.py:4 `ctypes.PyDLL(None).sleep(600)` without using the CPU"
    )


@pytest.mark.parametrize("region", [Region.FORWARD, None])
def test_a_stopped_rank_is_hung_even_without_a_page(job: Job, region: Region | None) -> None:
    job.rank(SLEEPS, region)
    os.kill(job.ranks[0].pid, signal.SIGSTOP)

    verdict = job.verdict()

    assert (verdict.rule, verdict.odd) == ("stopped", (0,))
    assert linux.state_of(job.ranks[0].pid) == "T", "it is looked at as it is"
    assert verdict.groups[0].frames[0].name == "nap", "and its stack is known"


# -- not acted on


def test_a_validation_by_one_rank_while_the_others_wait_is_no_hang(job: Job, all_reduce: str) -> None:
    job.rank(VALIDATES, Region.OTHER)
    job.rank(all_reduce, Region.OTHER)
    job.start()

    assert not job.turn(lambda: job.verdicts, CALM_S)
    assert re.match(r"rank 0 is in train.py:\d sleep\(\), rank 1 waits for it in all_reduce", job.told[0].sentence)
    assert job.told[0].quiet_s >= LIMITS.told_patiently_s


@pytest.mark.parametrize("source", [WORKS, COMPILES])
def test_work_in_the_rank_or_below_it_is_told_and_left_alone_whatever_the_timeout(job: Job, source: str) -> None:
    job.rank(source, Region.FORWARD)
    job.start(SHORT)

    assert not job.turn(lambda: job.verdicts, CALM_S)
    assert job.told[0].due_in_s is None


def test_a_rank_without_a_page_is_left_alone(job: Job) -> None:
    job.rank(SLEEPS, None)
    watch = job.start()

    assert not job.turn(lambda: watch.helper_pids(), 4 * LIMITS.floor_s)


def test_a_probe_that_gave_up_is_no_page(job: Job) -> None:
    """Its edges have ended, and the training has not."""
    job.rank(SLEEPS, Region.FORWARD)
    job.writers[0].words[Word.HOOKS_UNAVAILABLE] = Hook.DATALOADER | Hook.BACKWARD | Hook.OPTIMIZER
    watch = job.start()

    assert not job.turn(lambda: watch.helper_pids(), 4 * LIMITS.floor_s)


# -- the helper


@pytest.mark.parametrize("again", ["works", "passes an edge"])
def test_other_nodes_are_told_soon_that_a_rank_is_idle_and_that_it_is_not_any_more(job: Job, again: str) -> None:
    """Looks at one that is quiet for long are a minute apart, where others need not know."""
    work = job.where / "work"
    job.rank(f"import os, time\nREADY()\nwhile not os.path.exists({str(work)!r}): time.sleep(0.1)\nwhile True: pass\n")
    job.rank(SLEEPS)
    for rank in job.ranks:
        job.move(rank, Region.OTHER, ago_s=200.0)
    job.start(replace(LIMITS, settle_s=6.0, rest_s=60.0), whole=False)

    assert job.turn(lambda: job.idle == [False, True])
    if again == "works":
        work.touch()
    else:
        job.move(0, Region.OTHER)
    assert job.turn(lambda: job.idle == [False, True, False], within_s=25.0)
    assert job.verdicts == []


def test_moving_again_ends_the_helper(job: Job) -> None:
    job.rank(WORKS, Region.FORWARD)
    watch = job.start()
    assert job.turn(lambda: watch.helper_pids())
    (helper,) = watch.helper_pids()

    def gone() -> bool:
        job.move(0, Region.FORWARD)
        return not watch.helper_pids() and not linux.state_of(helper)

    assert job.turn(gone)


def test_a_killed_helper_is_replaced(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "RETRY_AFTER_TROUBLE_S", 0.5)
    job.rank(WORKS, Region.FORWARD)
    watch = job.start()
    assert job.turn(lambda: watch.helper_pids())
    (helper,) = watch.helper_pids()

    os.kill(helper, signal.SIGKILL)

    assert job.turn(lambda: watch.trouble == "the helper ended")
    assert job.turn(lambda: watch.helper_pids() - {helper})
    assert job.verdicts == []


def test_without_any_helper_what_the_clock_tells_is_told_and_none_is_acted_on(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detector, "ENTRY", "raise SystemExit(1)")
    monkeypatch.setattr(detector, "RETRY_AFTER_TROUBLE_S", 0.5)
    job.rank(SLEEPS, Region.FORWARD)
    job.start(SHORT)

    assert not job.turn(lambda: job.verdicts, CALM_S)
    assert job.told[0].notes[0].startswith("no stacks: ")
    assert job.told[0].sentence == "rank 0 is in an unknown place"


def test_a_helper_that_hangs_is_given_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "ENTRY", "import time; time.sleep(600)")
    monkeypatch.setattr(detector, "ANSWER_TIMEOUT_S", 0.5)
    job.rank(SLEEPS, Region.FORWARD)
    watch = job.start()

    assert job.turn(lambda: "did not answer within" in watch.trouble)


def test_a_request_for_hundreds_of_ranks_fits(job: Job) -> None:
    """Each look would fail where it is larger than a pipe."""
    job.rank(SLEEPS, Region.FORWARD)
    watch = HangDetector(
        job.loop, LIMITS, {0: job.ranks[0].pid}, job.read, lambda _: "x" * 200_000, job.told.append,
        lambda ranks, after_s: None, job.verdicts.append, path=str(job.where / "hang.json"), whole=True,
    )  # fmt: skip
    job.watch = watch
    watch.start()

    assert job.turn(lambda: job.told)
    assert (watch.trouble, job.told[0].notes) == ("", ("stacks of all ranks: py-spy",))


def test_stopping_leaves_nothing(job: Job) -> None:
    job.rank(WORKS, Region.FORWARD)
    watch = job.start()
    assert job.turn(lambda: watch.helper_pids())
    (helper,) = watch.helper_pids()

    watch.stop()

    assert job.turn(lambda: not linux.state_of(helper))
    assert watch.helper_pids() == frozenset()
    assert not job.turn(lambda: watch.helper_pids(), 2.0)
