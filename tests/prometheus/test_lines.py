"""Pages written line by line are those that the library writes, through whatever history; and they cost less."""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest as library_text
from prometheus_client.openmetrics.exposition import generate_latest as library_openmetrics

from gpulaunch.exporters.prometheus.families import CatalogueError, Families, Sink
from gpulaunch.exporters.prometheus.lines import Lines, page_of
from gpulaunch.exporters.prometheus.values import Facts, families, put_state
from gpulaunch.profiler.record import NodeState

FACTS = Facts(version="1.2.3", scrapes=7, render_s=0.5)


def written(lines: Lines, put: Callable[[Sink], object]) -> tuple[bytes, bytes]:
    """The next page, in both formats."""
    lines.begin()
    put(lines)
    known = lines.end()
    return page_of(known, openmetrics=False), page_of(known, openmetrics=True)


def library(put: Callable[[Sink], object]) -> tuple[bytes, bytes]:
    """The same by prometheus_client."""
    made = Families()
    put(made)
    return library_text(made), library_openmetrics(made)


def of(state: NodeState) -> Callable[[Sink], None]:
    return lambda sink: put_state(sink, state, FACTS)


def test_a_whole_node_is_written_as_the_library_writes_it(node: NodeState, empty_node: NodeState) -> None:
    lines = Lines()
    busy, idle = node.training
    other = dataclasses.replace(node, training=(dataclasses.replace(idle, rank=0), dataclasses.replace(busy, rank=1)))
    for state in (empty_node, node, node, other, empty_node):
        assert written(lines, of(state)) == library(of(state))


NUMBERS = st.floats().map(lambda value: value + 0.0) | st.integers(-(1 << 70), 1 << 70) | st.booleans()  # no -0.0
NAMES = st.text(alphabet='a"\\\n\r%{}\u00e9 ,=', max_size=5)
PAGES = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, 3), NUMBERS),
        st.dictionaries(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=3, max_size=3)),
        NAMES,
        st.sampled_from([(0.5, 1.0), (1.0, 25.0)]),
    ),
    max_size=5,
)


@given(PAGES)
def test_what_changes_comes_and_goes_is_as_the_library_has_it(pages: list) -> None:
    lines = Lines()
    for steps, durations, name, bounds in pages:

        def put(sink: Sink) -> None:
            sink.put("gpulaunch_run_info", 1, run="r", name=name, world_size="1", node_rank="0")  # noqa: B023
            for rank, value in steps.items():  # noqa: B023
                sink.put("gpulaunch_steps_total", value, rank=str(rank))
            for rank, counts in durations.items():  # noqa: B023
                total = sum(counts) / 3
                sink.put_histogram("gpulaunch_step_duration_seconds", bounds, counts, total, rank=str(rank))  # noqa: B023

        assert written(lines, put) == library(put)


@pytest.mark.parametrize(
    ("name", "labels", "complaint"),
    [
        ("gpulaunch_invented_total", {}, "not in the catalogue"),
        ("gpulaunch_steps_total", {}, "has the labels"),
        ("gpulaunch_steps_total", {"rank": "0", "pid": "1"}, "has the labels"),
        ("gpulaunch_shm_bytes", {"state": "stolen"}, "state='stolen' is not in the catalogue"),
    ],
)
def test_what_the_catalogue_does_not_know_is_refused_here_too(name: str, labels: dict, complaint: str) -> None:
    lines = Lines()
    lines.put("gpulaunch_steps_total", 1, rank="0")
    with pytest.raises(CatalogueError, match=complaint):
        lines.put(name, 1.0, **labels)
    with pytest.raises(CatalogueError, match="buckets"):
        lines.put_histogram("gpulaunch_step_duration_seconds", (1.0, 2.0), (1, 2), 3.0, rank="0")


def test_after_a_fault_in_the_middle_the_next_page_is_whole(node: NodeState) -> None:
    lines = Lines()

    def fault(sink: Sink) -> None:
        put_state(sink, node, FACTS)
        sink.put("gpulaunch_steps_total", "three", rank="0")  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="three"):
        written(lines, fault)
    assert written(lines, of(node)) == library(of(node))


def test_lines_of_ranks_that_are_gone_are_forgotten() -> None:
    lines = Lines()

    def steps(first: int) -> Callable[[Sink], None]:
        return lambda sink: [sink.put("gpulaunch_steps_total", 1, rank=str(first + n)) for n in range(10)] and None

    written(lines, steps(0))
    tracemalloc.start()
    for attempt in range(1000):
        written(lines, steps(10 * attempt))
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert held_bytes < 200 * 1000, "a kilobyte each, of fewer than 200 of the 10,000 lines"


def test_a_page_of_many_ranks_costs_a_fraction_of_the_library_s(node: NodeState) -> None:
    """CPU time of the next page, when every rank has made steps meanwhile; in OpenMetrics, as Prometheus asks."""

    def after(steps: int) -> NodeState:
        busy = dataclasses.replace(node.training[0], steps=steps, step_ns_total=steps * 9)
        ranks = (dataclasses.replace(busy, rank=rank) for rank in range(32))
        return dataclasses.replace(node, training=tuple(ranks))

    def cost_s(write: Callable[[NodeState], object]) -> float:
        write(after(0))
        costs: list[float] = []
        for again in range(1, 4):
            state = after(again)
            began_s = time.thread_time()
            write(state)
            costs.append(time.thread_time() - began_s)
        return min(costs)

    lines = Lines()
    ours = cost_s(lambda state: written(lines, of(state))[1])
    theirs = cost_s(lambda state: library_openmetrics(families(state, FACTS)))
    print(f"{1000 * ours:.1f} ms, the library {1000 * theirs:.1f} ms")
    assert ours < theirs / 3
