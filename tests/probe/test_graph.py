"""The nodes of an autograd graph are counted a few times, and nothing of it is kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulaunch.profiler.channel import segment_writer
from gpulaunch.profiler.probe import facts, graph
from gpulaunch.profiler.probe.account import Account
from gpulaunch.profiler.probe.edges import tap_backward
from gpulaunch.profiler.probe.gradients import GradientUse
from gpulaunch.profiler.probe.graph import FIRST_STEP, LONG_NS, LONG_ROW_NS, MOST_NODES, PASSES, GraphNodes, graph_below
from gpulaunch.profiler.probe.state import Probe


class Tensor:
    """One of torch, whose node is read by its own property."""

    def __init__(self, node: Any) -> None:
        self._node = node

    @property
    def grad_fn(self) -> Any:
        return self._node


TORCH: Any = SimpleNamespace(
    _C=SimpleNamespace(DisableTorchFunction=nullcontext), Tensor=Tensor, nn=SimpleNamespace(Parameter=Tensor)
)


class Node:
    """A node of a graph, as torch's Python sees it."""

    def __init__(self, *after: Node | None) -> None:
        self.next_functions = tuple((each, 0) for each in after)


class WideNode(Node):
    """It must not be read to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.next_functions = self._nodes()  # type: ignore[assignment] # pyright: ignore[reportAttributeAccessIssue]

    def _nodes(self) -> Iterator[tuple[Node, int]]:
        for _ in range(10):
            yield Node(), 0
        raise AssertionError


def chain(length: int) -> Node:
    node = Node()
    for _ in range(length - 1):
        node = Node(node, None)
    return node


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    monkeypatch.setattr(facts, "rank_facts", facts.Facts())
    account = Account(lambda _steps, _record: None)
    account.totals[0] = FIRST_STEP
    return account


def graph_fact() -> Any:
    return facts.rank_facts.known.get("graph")


def test_each_node_counts_once_and_what_has_no_graph_does_not() -> None:
    shared = Node()
    edge = SimpleNamespace(node=Node(shared), output_nr=0)

    assert len(graph_below(TORCH, (Tensor(Node(shared, Node(shared), None)), edge, Tensor(None)))) == 4
    assert len(graph_below(TORCH, ())) == 0


def test_a_graph_without_end_is_counted_up_to_a_number() -> None:
    ring = Node()
    ring.next_functions = ((ring, 0),)

    assert len(graph_below(TORCH, (Tensor(ring),))) == 1
    assert len(graph_below(TORCH, (Tensor(chain(50)),), most=10)) == 10
    assert len(graph_below(TORCH, (Tensor(Node(*(Node() for _ in range(50)))),), most=10)) == 10
    assert len(graph_below(TORCH, (Tensor(WideNode()),), most=11)) == 11


def test_passes_are_counted_early_and_then_rarely(account: Account) -> None:
    nodes = GraphNodes(account, TORCH)
    account.totals[0] = FIRST_STEP - 1
    nodes.look()
    assert nodes.left == 0

    account.totals[0] = FIRST_STEP
    seconds = []
    for second in range(2000):
        nodes.look()
        if nodes.left:
            seconds.append(second)
        while nodes.left:
            nodes.count((Tensor(chain(9 + nodes.left)),))

    assert seconds[:3] == [0, 3, 12]
    assert len(seconds) < 9
    assert graph_fact() == {
        "nodes": round(9 + (PASSES + 1) / 2),
        "at_least": False,
        "repeated": 0.0,
        "decomposes": False,
        "tokens": 0,
        "scores_bytes": 0,
        "accumulates": False,
    }


def test_after_the_last_pass_the_next_one_shows_what_became_of_its_gradients(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[bool] = []
    monkeypatch.setattr(GradientUse, "is_pending", True)
    monkeypatch.setattr(GradientUse, "settle", lambda _: settled.append(True))
    nodes = GraphNodes(account, TORCH)
    nodes.look()
    for _ in range(PASSES):
        nodes.count((Tensor(chain(9)),))
    assert nodes.left == 1
    settled.clear()

    nodes.count((Tensor(chain(50)),))

    assert (nodes.left, settled) == (0, [True])
    assert graph_fact()["nodes"] == 9


def test_one_graph_that_is_too_large_is_enough(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "thread_time_ns", lambda: 0)  # on a machine that is in use it may take too long
    nodes = GraphNodes(account, TORCH)
    nodes.look()
    nodes.count((Tensor(chain(MOST_NODES + 5)),))

    assert nodes.left == 0
    assert graph_fact() == {"nodes": MOST_NODES, "at_least": True, "repeated": 0.0}


def test_what_is_in_one_of_the_passes_of_a_row_is_told(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are accumulated, the first pass of a step finds none. Where only one is read, it may be that."""
    contents = iter([False, True, False, False])
    monkeypatch.setattr(graph, "contents_of", lambda _: {"tokens": 0, "accumulates": next(contents)})
    monkeypatch.setattr(graph, "MANY_NODES", 9)
    nodes = GraphNodes(account, TORCH)
    nodes.look()
    while nodes.left:
        nodes.count((Tensor(chain(5)),))
    assert graph_fact()["accumulates"] is True

    contents = iter([False])
    for _ in range(100):
        nodes.look()
        if nodes.left:
            nodes.count((Tensor(chain(10)),))
            break
    assert graph_fact()["accumulates"] is None


def test_a_property_of_a_subclass_is_not_asked() -> None:
    class Mine(Tensor):
        @property
        def grad_fn(self) -> Any:
            raise AssertionError

    assert len(graph_below(TORCH, (Mine(chain(3)),))) == 3


def test_after_a_pass_that_took_long_none_is_counted(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of very many tensors is one node, whose others cannot be had one by one."""
    nodes = GraphNodes(account, TORCH)
    nodes.look()
    while nodes.left:
        nodes.count((Tensor(chain(5)),))
    monkeypatch.setattr(graph, "thread_time_ns", count(step=LONG_ROW_NS + 1).__next__)
    for _ in range(100):
        nodes.look()
        if nodes.left:
            nodes.count((Tensor(chain(7)),))
            assert nodes.left == 0
            break
    for _ in range(1000):
        nodes.look()
        assert nodes.left == 0

    contents = {"decomposes": False, "tokens": 0, "scores_bytes": 0, "accumulates": False}
    assert graph_fact() == {"nodes": 5, "at_least": False, "repeated": 0.0, **contents}


@pytest.mark.parametrize(("took_ns", "passes"), [(LONG_NS + 1, PASSES), (LONG_ROW_NS // 2, 3), (LONG_ROW_NS + 1, 1)])
def test_on_a_slow_host_one_row_is_counted(
    account: Account, monkeypatch: pytest.MonkeyPatch, took_ns: int, passes: int
) -> None:
    nodes = GraphNodes(account, TORCH)
    monkeypatch.setattr(graph, "thread_time_ns", count(step=took_ns).__next__)
    counted = 0
    for _ in range(1000):
        nodes.look()
        if nodes.left:
            nodes.count((Tensor(chain(7)),))
            counted += 1

    contents = {"decomposes": False, "tokens": 0, "scores_bytes": 0, "accumulates": None if passes == 1 else False}
    assert (counted, graph_fact()) == (passes, {"nodes": 7, "at_least": False, "repeated": 0.0, **contents})
    assert ("gradients" in facts.rank_facts.known) == (passes == PASSES), "only those of a whole row are told"


def test_nothing_of_a_graph_is_kept(account: Account) -> None:
    nodes = GraphNodes(account, TORCH)
    nodes.look()
    for broken in (False, True):
        root = chain(3)
        if broken:
            root.next_functions = ((object(), 0),)  # type: ignore[assignment] # pyright: ignore[reportAttributeAccessIssue]
        known = weakref.ref(root)
        nodes.count((Tensor(root),))
        del root
        assert known() is None


def test_what_cannot_be_counted_is_out_of_service(account: Account) -> None:
    nodes = GraphNodes(account, TORCH)
    nodes.look()
    nodes.count((Tensor(object()),))

    assert nodes.left == 0
    with pytest.raises(RuntimeError, match="next_functions"):
        nodes.look()
    assert graph_fact() is None


def test_a_pass_for_some_inputs_is_not_read(tmp_path: Path) -> None:
    """Of `backward(inputs=...)`, the engine leaves out what the graph has besides."""
    torch: Any = SimpleNamespace(compiler=SimpleNamespace(is_dynamo_compiling=lambda: False), Tensor=object)
    path = str(tmp_path / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    probe = Probe(segment_writer.SegmentWriter(path), torch)
    probe.mark_step()
    read: list[object] = []
    nodes: Any = SimpleNamespace(left=1, count=lambda outputs, **_: read.append(outputs), passed=lambda: None)
    backward = tap_backward(probe, torch, nodes, lambda *_, **_more: None)

    backward((1,), (None,), False, False, (), accumulate_grad=True)
    backward((2,), (None,), False, False, ("a parameter",), accumulate_grad=True)
    backward((3,), (None,), False, False, (), accumulate_grad=False)

    assert read == [(1,)]
