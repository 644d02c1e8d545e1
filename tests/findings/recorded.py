"""A node with GPUs as its sources tell of it: the pages and facts of its ranks, /proc and /sys, NVIDIA's library.

All of it is in the formats in which ranks, kernel and driver write (the driver by the stand-in below the real binding),
and read by a whole sidecar. Only the clock is the test's: an hour takes seconds. Not a test module.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from libnvidia import Gpu, Library, binding

from gpulaunch.profiler.channel import clock as clocks
from gpulaunch.profiler.channel import segment_writer
from gpulaunch.profiler.channel.layout import COPIES, PHASES, SITE_KINDS, StepSource, Word
from gpulaunch.profiler.channel.quantities import COPY_WORDS
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.daemon import sidecar
from gpulaunch.profiler.record import Finding, Reading, StackState

MS: Final = 1_000_000
MIB: Final = 1 << 20
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
FIRST_PID: Final = 5_000_000  # more than Linux ever gives
STEPS_PER_S: Final = 10
HEALTHY_MS: Final = {
    "data_wait": 2.0,
    "h2d": 1.0,
    "forward": 30.0,
    "backward": 54.0,
    "optimizer": 8.0,
    "sync": 1.0,
    "other": 4.0,
}


class Rank:
    """A rank that trains well on the GPU of its number, ten steps a second."""

    def __init__(self, rank: int, channel: Path, root: Path, uuid: str) -> None:
        self.rank = rank
        self.pid = FIRST_PID + rank
        path = channel / f"rank-{rank}.bin"
        segment_writer.create(str(path), rank=rank, local_rank=rank, attempt=0)
        self.writer = SegmentWriter(str(path))
        self.ms: dict[str, float] = dict(HEALTHY_MS)
        self.facts: dict[str, Any] = {
            "version": 1,
            "torch_threads": 1,
            "device": {"type": "cuda", "index": rank, "uuid": uuid, "name": "a card", "capability": [9, 0]},
            "loaders": [{"site": "train.py:41 main", "split": "train", "num_workers": 0, "pin_memory": False}],
            "precision": {"parameters": "float32", "sharded": False, "autocast": False, "matmul": "high"},
            "dataparallel": None,
        }
        self._facts = channel / f"facts-{rank}.json"
        self._proc = root / "proc"
        self._rows: dict[tuple[str, str], int] = {}
        self.resident(anonymous_mib=2000, files_mib=500)
        self.may_run_on(("0-3", "4-7")[rank % 2])  # those beside its GPU

    def resident(self, *, anonymous_mib: int, files_mib: int) -> None:
        """What the kernel counts as the process's memory."""
        shared, pages = (mib * MIB // PAGE_BYTES for mib in (files_mib, files_mib + anonymous_mib))
        self._write("statm", f"{2 * pages} {pages} {shared} 5 0 {pages} 0\n")
        self._write("stat", f"{self.pid} (python) S 1 1 1 0 -1 0 0 0 0 0 100 5 0 0 20 0 9 0 100 1 {pages} 0\n")
        self._write(f"task/{self.pid}/children", "")

    def worker(self, *, anonymous_mib: int, files_mib: int) -> None:
        """A dataloader worker of it, by its proportional size."""
        pid = self.pid + 1000
        self._write(f"task/{self.pid}/children", f"{pid} ")
        self._write("stat", f"{pid} (pt_data_worker) S 1 1 1 0 -1 0 0 0 0 0 9 1 0 0 20 0 1 0 200 1 9 0\n", pid)
        self._write("statm", "999 500 400 5 0 9 0\n", pid)
        self._write(f"task/{pid}/children", "", pid)
        total, anonymous, files = (1024 * mib for mib in (anonymous_mib + files_mib, anonymous_mib, files_mib))
        sizes = f"Rss: {total} kB\nPss: {total} kB\nPss_Anon: {anonymous} kB\nPss_File: {files} kB\nPss_Shmem: 0 kB\n"
        self._write("smaps_rollup", f"55d0-7fff ---p 00000000 00:00 0 [rollup]\n{sizes}", pid)

    def may_run_on(self, cpus: str) -> None:
        self._write("status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\n")

    def _write(self, name: str, text: str, pid: int | None = None) -> None:
        file = self._proc / str(pid or self.pid) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def line(self, kind: str, text: str, **each_step: int) -> None:
        """A line of the program that does this at every step, until the next second."""
        row = self._rows.get((kind, text))
        if row is None:
            row = self._rows[kind, text] = self.writer.add_site(SITE_KINDS.index(kind), text)
        self.writer.site(row, count=STEPS_PER_S, **{name: STEPS_PER_S * value for name, value in each_step.items()})

    def copies(self, direction: str, memory: str, *, size_bytes: int, blocked_ns: int) -> None:
        at = Word.COPY_FIRST + COPY_WORDS * COPIES.index((direction, memory))
        for offset, each_step in enumerate((1, size_bytes, blocked_ns)):
            self.writer.words[at + offset] += STEPS_PER_S * each_step

    def train(self, at_ns: int) -> None:
        """A second of steps."""
        writer = self.writer
        parts = [round(self.ms.get(phase, 0.0) * MS) for phase in PHASES]
        for _ in range(STEPS_PER_S):
            was = list(writer.words[Word.STEPS : Word.PROBE_NS_TOTAL + 1])
            steps, microsteps, skipped, samples, step_ns, *phases = was[:17]
            totals = [steps + 1, microsteps + 1, skipped, samples + 32, step_ns + sum(parts)]
            totals += [total + part for total, part in zip(phases, parts, strict=True)]
            totals += [at_ns, StepSource.OPTIMIZER, was[-1] + 5000]
            writer.end_step(totals, 6, 1, (at_ns - sum(parts), sum(parts), *parts[:-1], 32))
        draft = self._facts.with_suffix(".new")
        draft.write_text(json.dumps(self.facts))
        draft.replace(self._facts)


class Recorded:
    """The node, and the sidecar that watches it."""

    def __init__(self, root: Path, monkeypatch: Any, *, ranks: int = 1) -> None:
        self.now_s = 1000.0
        self.gpus = [
            Gpu("GPU-0", slot="00000000:3B:00.0"),
            Gpu("GPU-1", slot="00000000:5E:00.0"),
        ]
        for name, text in {
            "dev/nvidiactl": "",
            "dev/shm/.keep": "",
            "proc/meminfo": "MemTotal: 32000000 kB\nMemAvailable: 20000000 kB\n",
            "sys/devices/system/node/node0/cpulist": "0-3\n",
            "sys/devices/system/node/node1/cpulist": "4-7\n",
            "sys/bus/pci/devices/0000:3b:00.0/numa_node": "0\n",
            "sys/bus/pci/devices/0000:5e:00.0/numa_node": "1\n",
        }.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        channel = root / "channel"
        channel.mkdir()
        self.ranks = [Rank(rank, channel, root, self.gpus[rank].uuid) for rank in range(ranks)]
        places = [{"rank": each.rank, "local_rank": each.rank, "pid": each.pid} for each in self.ranks]
        group = {"version": 1, "run_id": "0" * 16, "name": "toy", "attempt": 0, "world_size": ranks, "node_rank": 0}
        (channel / "group.json").write_text(json.dumps({**group, "ranks": places}))
        monkeypatch.setitem(sys.modules, "pynvml", binding(Library(*self.gpus)))
        monkeypatch.setattr(clocks, "anchor", self._anchor)
        monkeypatch.setattr(sidecar, "Stacks", _NoStacks)
        self._sidecar = sidecar.Sidecar(
            channel, lambda _: None, proc=root / "proc", root=root, clock=lambda: self.now_s
        )

    def _anchor(self) -> clocks.Anchor:
        now_ns = round(self.now_s * 1e9)
        return clocks.Anchor(monotonic_ns=now_ns, realtime_ns=now_ns + 10**18)

    def watch(self, seconds: int, each: Callable[[Recorded, int], None] | None = None) -> tuple[Finding, ...]:
        """Let the ranks train, second after second, and give what stands in the end; `each` is what a second brings."""
        found: tuple[Finding, ...] = ()
        for second in range(seconds):
            if each is not None:
                each(self, second)
            for rank in self.ranks:
                rank.train(round(self.now_s * 1e9))
            self.now_s += 1.0
            found = self._sidecar.refresh().findings
        return found

    def close(self) -> None:
        self._sidecar.close()
        for rank in self.ranks:
            rank.writer.close()


class _NoStacks:
    """There is no process behind these pids."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def read(self, now: float) -> Reading[StackState]:
        return Reading(values=StackState(source="none", samples={}, cpu_s=0.0))

    def close(self) -> None:
        pass
