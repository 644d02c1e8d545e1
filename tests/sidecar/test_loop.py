"""The sidecar's loop with a clock of the test's: its pace, its guards, its ledger."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.segment_writer import SegmentWriter, create
from gpulaunch.profiler.daemon import sidecar as daemon
from gpulaunch.profiler.daemon.sidecar import LEDGER_FILE, Sidecar
from gpulaunch.profiler.record import Collector, NodeState
from gpulaunch.profiler.samplers.host import HostSampler


class Pace:
    """A clock and a wait that moves it; refreshes take as long as the test says."""

    def __init__(self, refreshes_s: list[float]) -> None:
        self.now_s = 100.0
        self.refreshes_s = refreshes_s
        self.began_s: list[float] = []
        self.cpu_s = self.each_cpu_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def stopped(self, wait_s: float) -> bool:
        self.now_s += wait_s
        return not self.refreshes_s

    def publish(self, _: NodeState) -> None:
        self.began_s.append(self.now_s - 100.0)
        self.now_s += self.refreshes_s.pop(0)
        self.cpu_s += self.each_cpu_s


@pytest.mark.parametrize(
    ("refreshes_s", "began_s", "late"),
    [
        ([0.0, 0.0, 0.0], [0.0, 1.0, 2.0], 0),
        ([0.25, 0.5, 0.25], [0.0, 1.0, 2.0], 0),  # how long a refresh takes does not move the next
        ([1.5, 0.0, 0.0], [0.0, 1.5, 2.0], 0),  # a little late, then back on the beat
        ([4.25, 0.0, 0.0], [0.0, 4.25, 5.0], 1),  # what was missed is not made up for
    ],
)
def test_the_pace_is_steady(tmp_path: Path, refreshes_s: list[float], began_s: list[float], late: int) -> None:
    pace = Pace(refreshes_s)
    sidecar = Sidecar(tmp_path, pace.publish, clock=pace.clock, cpu=lambda: pace.cpu_s)
    sidecar.run(pace.stopped)
    assert pace.began_s == began_s
    pace.refreshes_s = [0.0]
    assert sidecar.refresh().sidecar.late_refreshes == late


@pytest.mark.parametrize(
    ("shares", "ranks", "began_s"),
    [
        (1, 0, [0.0, 1.0, 2.0]),
        (2, 0, [0.0, 2.0, 4.0]),  # a machine on which it costs more than its share is looked at less often
        (2, 8, [0.0, 2.0, 4.0]),
        (2, 16, [0.0, 1.0, 2.0]),  # a node of twice as many ranks has more cores, too
        (9_000, 8, [0.0, 5.0, 10.0]),  # but never so seldom that it is no news
    ],
)
def test_a_refresh_comes_as_often_as_its_price_allows(
    tmp_path: Path, shares: int, ranks: int, began_s: list[float]
) -> None:
    pace = Pace([0.0] * 3)
    pace.each_cpu_s = shares * daemon.SHARE_OF_A_CORE
    sidecar = Sidecar(tmp_path, pace.publish, clock=pace.clock, cpu=lambda: pace.cpu_s)
    if ranks:
        places = [{"rank": rank, "local_rank": rank, "pid": 1 << 30} for rank in range(ranks)]
        group = {"version": 1, "run_id": "r", "name": "n", "attempt": 0, "world_size": ranks, "node_rank": 0}
        (tmp_path / "group.json").write_text(json.dumps({**group, "ranks": places}))
    sidecar.run(pace.stopped)
    assert pace.began_s == began_s


def test_how_far_the_ranks_came_is_told_when_it_ends(tmp_path: Path) -> None:
    """A rank makes steps after the last refresh, and ends; then the sidecar is told to stop."""
    group = {"version": 1, "run_id": "r", "name": "n", "attempt": 0, "world_size": 1, "node_rank": 0}
    ranks = [{"rank": 0, "local_rank": 0, "pid": 1 << 30}]
    (tmp_path / "group.json").write_text(json.dumps({**group, "ranks": ranks}))
    path = str(tmp_path / "rank-0.bin")
    create(path, rank=0, local_rank=0, attempt=0)
    writer = SegmentWriter(path)
    seen: list[NodeState] = []

    def stopped(_: float) -> bool:
        words = writer.words
        words[Word.OPENING] = words[Word.STEPS] = words[Word.CLOSING] = 7 * len(seen)
        return bool(seen)

    Sidecar(tmp_path, seen.append).run(stopped)
    writer.close()

    assert [[rank.steps for rank in state.training] for state in seen] == [[0], [7]]
    assert seen[0].taken_monotonic_ns < seen[1].taken_monotonic_ns
    assert seen[0].host == seen[1].host, "nothing else is asked at the end"


@pytest.mark.parametrize("is_left", [True, False], ids=["as ever", "no run.json any more"])
def test_how_the_run_ended_is_told_when_it_ends(tmp_path: Path, is_left: bool) -> None:
    """The ranks hang after the last refresh; the agent ends them, and then the sidecar, before there is another."""
    group = {"version": 1, "run_id": "r", "name": "n", "attempt": 0, "world_size": 1, "node_rank": 0}
    ranks = [{"rank": 0, "local_rank": 0, "pid": 1 << 30}]
    (tmp_path / "group.json").write_text(json.dumps({**group, "ranks": ranks}))
    create(str(tmp_path / "rank-0.bin"), rank=0, local_rank=0, attempt=0)
    run_json = tmp_path / "run.json"
    told = {"version": 1, "restarts": {}, "hang_suspicions": 1, "preempted": 0}
    seen: list[NodeState] = []

    def stopped(_: float) -> bool:
        seconds = {"productive": 100.0, "teardown": 2.5 * len(seen)}
        run_json.write_text(json.dumps({**told, "goodput_seconds": seconds, "hangs": len(seen)}))
        if seen and not is_left:
            run_json.unlink()
        return bool(seen)

    Sidecar(tmp_path, seen.append).run(stopped)

    states = [(state.run.hangs, state.run.goodput_ns["teardown"]) for state in seen if state.run is not None]
    assert states == [(0, 0), (1, 2_500_000_000) if is_left else (0, 0)]


def no_gpus(directory: Path) -> Path:
    """The root of a node that has shared memory and no NVIDIA driver."""
    (directory / "root/dev/shm").mkdir(parents=True)
    (directory / "root/proc").mkdir()
    (directory / "root/proc/meminfo").write_bytes(Path("/proc/meminfo").read_bytes())
    return directory / "root"


def test_what_is_not_on_this_node_is_told_and_is_no_error(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path, lambda _: None, root=no_gpus(tmp_path))
    sidecar.refresh()
    gpu = sidecar.refresh().collectors[Collector.GPU]
    assert (gpu.available, gpu.reason, gpu.errors) == (False, "no NVIDIA driver on this node", 0)


def test_a_fault_in_one_collector_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[NodeState] = []
    sidecar = Sidecar(tmp_path, states.append, root=no_gpus(tmp_path))
    whole = sidecar.refresh()
    assert [collector for collector, state in whole.collectors.items() if not state.available] == [
        Collector.GPU,
        Collector.DEVICE,
    ]

    with monkeypatch.context() as patch:
        patch.setattr(HostSampler, "read", lambda self, now: 1 / 0)
        # The samplers are bound at construction, so the fault is in a new sidecar.
        broken = Sidecar(tmp_path, states.append).refresh()
    host = broken.collectors[Collector.HOST]
    assert (host.available, host.reason, host.errors) == (False, "ZeroDivisionError", 1)
    assert broken.host is None
    assert broken.collectors[Collector.RANKS].available
    assert states == [whole, broken]


def test_a_ledger_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    channel.mkdir()
    sidecar = Sidecar(channel, lambda _: None)
    sidecar.refresh()
    assert (channel / LEDGER_FILE).exists()
    (channel / LEDGER_FILE).unlink()
    channel.rmdir()
    ledger = sidecar.refresh().collectors[Collector.LEDGER]
    assert (ledger.available, ledger.reason) == (False, "No such file or directory")
    channel.mkdir()
    assert sidecar.refresh().collectors[Collector.LEDGER].available


def test_a_state_tells_when_it_was_taken_on_both_clocks(tmp_path: Path) -> None:
    before = time.monotonic_ns(), time.time_ns()
    state = Sidecar(tmp_path, lambda _: None).refresh()
    after = time.monotonic_ns(), time.time_ns()
    assert before[0] <= state.taken_monotonic_ns <= after[0]
    assert abs(state.taken_wall_ns - before[1]) <= after[1] - before[1] + 1_000_000


def test_its_cpu_time_goes_on_where_the_sidecar_before_it_ended(tmp_path: Path) -> None:
    first = Sidecar(tmp_path, lambda _: None).refresh().sidecar.cpu_s
    second = Sidecar(tmp_path, lambda _: None).refresh().sidecar.cpu_s
    assert second > first > 0
