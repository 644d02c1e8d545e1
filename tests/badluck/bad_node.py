"""A node as the agent makes it, for the tests of bad luck: pages, toy ranks that write them, real sidecars, scrapes."""

from __future__ import annotations

import html
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gpulaunch.exporters.prometheus.render import Board
from gpulaunch.profiler.channel import clock, layout, segment_writer, workers
from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.quantities import Pauses
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.daemon.sidecar import Sidecar
from gpulaunch.profiler.record import Collector, NodeState

WAIT_S = 60.0
MS = 1_000_000
PYTHON = (sys.executable, "-P")
SIDECAR = (*PYTHON, "-m", "gpulaunch.launcher.cli.sidecar")
TOY = str(Path(__file__).parents[1] / "sidecar/toy_rank.py")
A_STEP = dict.fromkeys(layout.PHASES, 0)
A_STEP |= {"data_wait": MS, "forward": 2 * MS, "backward": 3 * MS, "optimizer": MS, "gc": MS, "other": 2 * MS}


def step(
    writer: SegmentWriter, count: int = 1, parts: Mapping[str, int] = A_STEP, *, end_ns: int | None = None
) -> None:
    """Make steps as the probe publishes them: of these parts, 32 samples each, the last one ending then."""
    step_ns = sum(parts.values())
    bucket = sum(step_ns > bound_ns for bound_ns in layout.STEP_BOUNDS_NS)
    first = Word.STEPS
    for _ in range(count):
        totals = list(writer.words[first : Word.PROBE_NS_TOTAL + 1])
        at_ns = time.monotonic_ns() if end_ns is None else end_ns
        for word, amount in ((Word.STEPS, 1), (Word.MICROSTEPS, 1), (Word.SAMPLES, 32), (Word.STEP_NS_TOTAL, step_ns)):
            totals[word - first] += amount
        for phase, part in enumerate(parts.values(), Word.DATA_WAIT_NS_TOTAL):
            totals[phase - first] += part
        totals[Word.LAST_STEP_MONOTONIC_NS - first] = at_ns
        totals[Word.STEP_SOURCE - first] = layout.StepSource.OPTIMIZER
        writer.end_step(totals, bucket, 1, (at_ns - step_ns, step_ns, *[*parts.values()][:-1], 32))


class Rank:
    """A toy rank: a process that writes its page through the probe's own writer, and does what it is told."""

    def __init__(self, path: Path, prefix: Sequence[str] = (), program: str = TOY) -> None:
        self.process = subprocess.Popen(
            [*prefix, *PYTHON, program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._heard()

    def _heard(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ok\n"

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        self._heard()

    def kill(self) -> None:
        with self.process:
            self.process.kill()


class Scrape:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of all samples of that name and those labels; None if there is none."""
        found = [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]
        return sum(found) if found else None

    @property
    def out_of_service(self) -> set[str]:
        """The collectors that do not deliver."""
        name = "gpulaunch_collector_available"
        return {each.labels["collector"] for each in self.samples if each.name == name and not each.value}

    @property
    def counters(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Everything that must never fall."""
        ends = ("_total", "_bucket", "_count", "_sum")
        return {(s.name, frozenset(s.labels.items())): s.value for s in self.samples if s.name.endswith(ends)}


class Node:
    """The agent's part of a node."""

    def __init__(self, directory: Path, listener: socket.socket) -> None:
        self.directory = directory
        self.listener = listener
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.ranks: list[Rank] = []
        self.sidecars: list[subprocess.Popen[bytes]] = []

    def page(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.bin"

    def workers(self, rank: int) -> Path:
        return self.directory / f"workers-{rank}.bin"

    def prepare(self, ranks: int, attempt: int = 0) -> None:
        """Make the files of an attempt."""
        for rank in range(ranks):
            segment_writer.create(str(self.page(rank)), rank=rank, local_rank=rank, attempt=attempt)
            workers.create(str(self.workers(rank)))

    def announce(self, pids: Sequence[int], attempt: int = 0) -> None:
        """Tell who runs, as the agent does."""
        places = [{"rank": rank, "local_rank": rank, "pid": pid} for rank, pid in enumerate(pids)]
        group = {"version": 1, "run_id": "0123456789abcdef", "name": "toy", "attempt": attempt, "ranks": places}
        run_dir = str(self.directory.parent)
        self.put("group.json", json.dumps({**group, "world_size": len(pids), "node_rank": 0, "run_dir": run_dir}))

    def put(self, name: str, content: str) -> None:
        draft = self.directory / f"{name}.draft"
        draft.write_text(content)
        draft.rename(self.directory / name)

    def attempt(self, number: int, ranks: int = 1, *, prefix: Sequence[str] = (), program: str = TOY) -> None:
        """Start toy ranks in the place of those before."""
        while self.ranks:
            self.ranks.pop().kill()
        self.prepare(ranks, number)
        self.ranks = [Rank(self.page(rank), prefix, program) for rank in range(ranks)]
        self.announce([rank.process.pid for rank in self.ranks], number)

    def start_sidecar(self, *prefix: str, interval_s: float = 0.02) -> subprocess.Popen[bytes]:
        """Start one, behind a command that becomes it."""
        own = ("--channel-dir", str(self.directory), "--listen-fd", str(self.listener.fileno()))
        more = ("--parent-pid", str(os.getpid()), "--interval", str(interval_s))
        sidecar = subprocess.Popen([*prefix, *SIDECAR, *own, *more], pass_fds=[self.listener.fileno()])
        self.sidecars.append(sidecar)
        return sidecar

    def text(self) -> str:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.read().decode()

    def scrape(self) -> Scrape:
        return Scrape(self.text())

    def says(self) -> str:
        """The page for people: how each collector does, and why."""
        with urllib.request.urlopen(f"{self.url}/collectors", timeout=WAIT_S) as response:
            return re.sub(r"<[^>]*>", " ", html.unescape(response.read().decode()))

    def wait_until(self, condition: Callable[[Scrape], object]) -> Scrape:
        """Scrape until it holds; a sidecar that has died meanwhile fails the test."""
        until_s = time.monotonic() + WAIT_S
        while not condition(scrape := self.scrape()):
            assert time.monotonic() < until_s, f"{self.says()}\n{scrape.text}"
            assert self.sidecars[-1].poll() is None, f"the sidecar has ended: {self.sidecars[-1].returncode}"
            time.sleep(0.01)
        return scrape

    def wait_for(self, expected: float | None, name: str, **labels: str) -> Scrape:
        return self.wait_until(lambda scrape: scrape.value(name, **labels) == expected)

    def wait_for_refreshes(self, count: int) -> Scrape:
        """Let the loop go round so often again."""
        name = "gpulaunch_sidecar_refreshes_total"
        before = self.scrape().value(name) or 0
        return self.wait_until(lambda scrape: (scrape.value(name) or 0) >= before + count)

    def close(self) -> None:
        for sidecar in self.sidecars:
            sidecar.kill()
            sidecar.wait()
        while self.ranks:
            self.ranks.pop().kill()


class Refreshes:
    """One rank and its sidecar, both in this process: refreshed by hand, over a clock that the test moves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        segment_writer.create(str(directory / "rank-0.bin"), rank=0, local_rank=0, attempt=0)
        workers.create(str(directory / "workers-0.bin"))
        self.writer = SegmentWriter(str(directory / "rank-0.bin"))
        place = {"rank": 0, "local_rank": 0, "pid": os.getpid()}
        group = {"version": 1, "run_id": "0" * 16, "name": "toy", "attempt": 0, "world_size": 1, "node_rank": 0}
        (directory / "group.json").write_text(json.dumps({**group, "ranks": [place], "run_dir": str(directory)}))
        self.now = clock.anchor()
        self.start()

    def start(self) -> None:
        """Start a sidecar, in the place of the one before if there is one: that is not asked to end."""
        self.board = Board(version="0")
        self.sidecar = Sidecar(self.directory, self.board.publish)

    def refresh(self, steps: int = 50) -> NodeState:
        """Make steps of 12 ms, one of them garbage collection, within two seconds of the clock; then look."""
        self.pass_s(2)
        step(self.writer, steps, dict.fromkeys(A_STEP, MS), end_ns=self.now.monotonic_ns)
        self.writer.words[Pauses.gc_collections] += steps
        self.writer.words[Pauses.gc_ns_total] += steps * MS
        return self.look()

    def look(self) -> NodeState:
        """Refresh the sidecar."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "anchor", lambda: self.now)
            return self.sidecar.refresh()

    def pass_s(self, seconds: float, *, wall_s: float | None = None) -> None:
        """Let time pass, on the wall clock perhaps another one."""
        wall_s = seconds if wall_s is None else wall_s
        self.now = clock.Anchor(
            monotonic_ns=self.now.monotonic_ns + round(seconds * 1e9),
            realtime_ns=self.now.realtime_ns + round(wall_s * 1e9),
        )

    def scrape(self) -> Scrape:
        return Scrape(self.board.metrics("application/openmetrics-text")[1].decode())

    def is_well(self, state: NodeState) -> None:
        """No collector has failed in a way that nobody has thought of, and there is a page to be scraped."""
        of_a_gpu = (Collector.GPU, Collector.DEVICE)
        failed = {each.value: how for each, how in state.collectors.items() if not how.available}
        assert not failed.keys() - {each.value for each in of_a_gpu}, failed
        assert self.scrape().samples

    def close(self) -> None:
        self.sidecar.close()
        self.writer.close()
