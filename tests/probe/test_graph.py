"""The nodes of an autograd graph are counted a few times, and nothing of it is kept."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.account import Account
from gpulaunch.profiler.probe.graph import FIRST_STEP, MOST_NODES, PASSES, GraphNodes, nodes_below

TORCH: Any = SimpleNamespace(_C=SimpleNamespace(DisableTorchFunction=nullcontext))


class Node:
    """A node of a graph, as torch's Python sees it."""

    def __init__(self, *after: Node | None) -> None:
        self.next_functions = tuple((each, 0) for each in after)


def tensor(node: Node | None) -> Any:
    return SimpleNamespace(grad_fn=node)


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

    assert nodes_below((tensor(Node(shared, Node(shared), None)), edge, tensor(None))) == 4
    assert nodes_below(()) == 0


def test_a_graph_without_end_is_counted_up_to_a_number() -> None:
    ring = Node()
    ring.next_functions = ((ring, 0),)

    assert nodes_below((tensor(ring),)) == 1
    assert nodes_below((tensor(chain(50)),), most=10) == 10
    assert nodes_below((tensor(Node(*(Node() for _ in range(50)))),), most=10) == 10


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
            nodes.count((tensor(chain(9 + nodes.left)),))

    assert seconds[:3] == [0, 9, 42]
    assert len(seconds) < 8
    assert graph_fact() == {"nodes": round(9 + (PASSES + 1) / 2), "at_least": False}


def test_one_graph_that_is_too_large_is_enough(account: Account) -> None:
    nodes = GraphNodes(account, TORCH)
    nodes.look()
    nodes.count((tensor(chain(MOST_NODES + 5)),))

    assert nodes.left == 0
    assert graph_fact() == {"nodes": MOST_NODES, "at_least": True}


def test_nothing_of_a_graph_is_kept(account: Account) -> None:
    nodes = GraphNodes(account, TORCH)
    nodes.look()
    for broken in (False, True):
        root = chain(3)
        if broken:
            root.next_functions = ((object(), 0),)  # type: ignore[assignment] # pyright: ignore[reportAttributeAccessIssue]
        known = weakref.ref(root)
        nodes.count((tensor(root),))
        del root
        assert known() is None


def test_what_cannot_be_counted_is_out_of_service(account: Account) -> None:
    nodes = GraphNodes(account, TORCH)
    nodes.look()
    nodes.count((SimpleNamespace(grad_fn=object()),))

    assert nodes.left == 0
    with pytest.raises(RuntimeError, match="next_functions"):
        nodes.look()
    assert graph_fact() is None
