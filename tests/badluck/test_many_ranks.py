"""256 ranks on one node: everything of all of them is told, and a refresh costs by the rank."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bad_node import PYTHON, WAIT_S, Node

from gpulaunch.exporters.prometheus.render import Board
from gpulaunch.profiler.daemon.sidecar import Sidecar
from gpulaunch.profiler.record import NodeState

MANY, FEW = 256, 16
CROWD = str(Path(__file__).with_name("crowd.py"))


@contextmanager
def crowd(node: Node, ranks: int) -> Iterator[None]:
    """So many ranks run."""
    node.prepare(ranks)
    argv = [*PYTHON, CROWD, str(node.directory), str(ranks)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        node.announce([int(pid) for pid in process.stdout.readline().split()])
        yield
        process.stdin.close()


def test_every_rank_is_told_whole(node: Node) -> None:
    with crowd(node, MANY):
        sidecar = node.start_sidecar(interval_s=0.2)
        until_s = time.monotonic() + 6 * WAIT_S
        # The dearest figure is asked of a few processes in each refresh; to make and
        # parse a megabyte takes seconds, in which there are fewer refreshes.
        while node.text().count('kind="pss"') < 2 * MANY:
            assert time.monotonic() < until_s, node.says()
            time.sleep(2.0)
        scrape = node.scrape()
        open_files = len(list(Path(f"/proc/{sidecar.pid}/fd").iterdir()))

    steps = {s.labels["rank"]: s.value for s in scrape.samples if s.name == "gpulaunch_steps_total"}
    assert steps == {str(rank): 5 + rank for rank in range(MANY)}
    assert not scrape.out_of_service - {"gpu", "device"}
    assert scrape.value("gpulaunch_collector_errors_total") == 0
    # Whatever is told of one rank is told of all: no table somewhere is full.
    told = {rank: Counter[str]() for rank in steps}
    for sample in scrape.samples:
        if sample.labels.get("rank"):
            told[sample.labels["rank"]][sample.name] += 1
    assert [rank for rank in told if told[rank] != told["0"]] == []
    rss_bytes = scrape.value("gpulaunch_sidecar_memory_bytes")
    assert rss_bytes is not None
    assert open_files < 2 * MANY + 32, "a page and a file of workers for each, and a few of its own"
    print(f"{len(scrape.text)} bytes of metrics, {rss_bytes / 2**20:.0f} MiB, {open_files} files")


def cpu_s(call: Callable[[], object], times: int = 15) -> float:
    """What a call costs this thread, when nothing else has the caches: the cheapest one of so many."""
    costs: list[float] = []
    for _ in range(times):
        began_s = time.thread_time()
        call()
        costs.append(time.thread_time() - began_s)
    return min(costs)


def compares_each_with_each(state: NodeState) -> None:
    """What must not be in a refresh."""
    for one in state.training:
        for other in state.training:
            dict(one.phase_ns) == dict(other.phase_ns)  # noqa: B015 - only its cost matters


@pytest.fixture
def costs(tmp_path: Path) -> Callable[[int], tuple[float, float, float]]:
    """What a refresh, a page of metrics and the thing above cost with so many ranks."""

    def measure(ranks: int) -> tuple[float, float, float]:
        (tmp_path / str(ranks)).mkdir()
        node = Node.__new__(Node)
        node.directory = tmp_path / str(ranks)
        with crowd(node, ranks):
            sidecar = Sidecar(node.directory, lambda _: None)
            state = sidecar.refresh()
            sidecar.refresh()
            refresh_s = cpu_s(sidecar.refresh)

            def render() -> None:
                fresh = Board(version="0")  # it renders a state once
                fresh.publish(state)
                fresh.metrics("")

            measured = refresh_s, cpu_s(render, 5), cpu_s(lambda: compares_each_with_each(state), 5)
            sidecar.close()
        return measured

    return measure


def test_the_price_grows_with_the_ranks_and_not_faster(costs: Callable[[int], tuple[float, float, float]]) -> None:
    few, many = costs(FEW), costs(MANY)
    refresh, render, planted = (more / less for more, less in zip(many, few, strict=True))
    print(*(f"{1000 * less:.2f} ms -> {1000 * more:.2f} ms" for less, more in zip(few, many, strict=True)), sep=", ")

    assert refresh < 2 * MANY / FEW
    assert render < 2 * MANY / FEW
    assert planted > 4 * MANY / FEW, "this would have been seen"
