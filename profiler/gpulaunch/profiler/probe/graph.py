"""Reads the autograd graphs that backward passes go through, a few times in a run: their nodes, and their gradients.

How long backward takes is known of every step. With the number of its nodes it is known what it is made of: a few
operations that compute long, or many for which torch's own work - dispatch, a node, its memory - is most of the time.
And `gradients` sees in the graph which of them are computed for nothing, `repeats` what several passes go through.

Some passes in a row are read, as those of a step may differ: early, later, and then every ten minutes, because a model
may change. The fact "graph" has the mean of the last ones, and what is in any of them. A node took 2 to 3.5 us: a model
of 450 nodes 1.5 ms, and the largest graph that is counted 7 ms, once. Only a node of very many others takes longer, as
torch makes a tuple of all of them: a stack of 20,000 tensors took 9 to 15 ms. After such a pass none is read any more.
Nothing of a graph is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from time import thread_time_ns
from typing import Any, Final

from gpulaunch.profiler.probe.account import Account
from gpulaunch.profiler.probe.facts import set_fact
from gpulaunch.profiler.probe.gradients import EMBEDDING, GradientUse
from gpulaunch.profiler.probe.graph_nodes import name_of
from gpulaunch.profiler.probe.repeats import Repeats
from gpulaunch.profiler.probe.user_signals import raised_by_program

PASSES: Final = 4
"""Backward passes that are counted in a row."""
MOST_KEPT: Final = 24
"""As long as their graphs are kept for others, so many are."""
MANY_NODES: Final = 1024
"""One that has so many is the last of the row."""
MOST_NODES: Final = 4096
"""No more are counted."""
LONG_NS: Final = 10_000_000
"""Of the thread's own time: the row with a graph that takes so long is the last one of the run."""
LONG_ROW_NS: Final = 250_000_000
"""If its graphs take so long together, the rest of that row is not counted."""
_DECOMPOSES: Final = ("Linalg", "Cholesky", "TriangularSolve")
"""Operations of torch, by their names in a graph."""
_SOFTMAX: Final = "SoftmaxBackward0"
FIRST_STEP: Final = 20
"""The steps before that are not typical."""
_PAUSE_S: Final = 2
_LONGEST_PAUSE_S: Final = 600
_RESTING_PAUSE_S: Final = 8
"""No longer one while parameters have a learning rate of 0, which schedules change."""
_LONGER: Final = 4
"""Each pause is so many times as long as the one before."""


class GraphNodes:
    """The graphs of one rank's training thread; only that thread calls it."""

    __slots__ = (
        "_account",
        "_contents",
        "_counted",
        "_failed",
        "_is_known",
        "_is_long",
        "_is_over",
        "_keeps",
        "_pause_s",
        "_repeats",
        "_row_ns",
        "_seconds",
        "_torch",
        "_use",
        "left",
    )

    def __init__(self, account: Account, torch: Any) -> None:
        self._account = account
        self._torch = torch
        self._use = GradientUse(torch)
        self._repeats = Repeats()
        self._row_ns = 0
        self._keeps = False
        self._counted: list[int] = []
        self._contents: dict[str, Any] = {}
        self._pause_s = _PAUSE_S
        self._seconds = 0
        self._failed = ""
        self._is_known = False
        self._is_long = False
        self._is_over = False  # all of a row are read, but not what has become of the gradients of the last pass
        self.left = 0
        """Backward passes that are still to be counted: `count` must be called before each."""

    def look(self) -> None:
        """Decide whether the next passes are counted; called once a second.

        Raises:
            RuntimeError: a pass could not be counted; it is then out of service.
        """
        if self._failed:
            raise RuntimeError(self._failed)
        if self._is_long or self.left or self._account.totals[0] < FIRST_STEP:
            return
        self._seconds -= 1
        if self._use.rests:  # until a schedule says otherwise
            self._seconds = min(self._seconds, _RESTING_PAUSE_S)
        if self._seconds < 0:
            self._seconds = self._pause_s
            self._pause_s = min(_LONGEST_PAUSE_S, _LONGER * self._pause_s)
            self._counted.clear()
            self._row_ns = 0
            self._contents = {}
            self._use.begin()
            self._repeats.begin()
            self._keeps = False
            self.left = PASSES

    def count(self, outputs: Sequence[Any], *, keeps: bool = False) -> None:
        """Count the nodes of a graph.

        Args:
            outputs: what backward is called on: tensors, or edges of a graph.
            keeps: the graph is kept for another pass (`retain_graph=True`).
        """
        began_ns = thread_time_ns()
        try:
            with self._torch._C.DisableTorchFunction():
                if self._is_over:
                    self._use.settle()
                    self._is_over, self.left = False, 0
                    set_fact("gradients", self._use.fact())
                    return
                graph = graph_below(self._torch, outputs)
                nodes = len(graph)
                if nodes < MOST_NODES:
                    self._use.add(graph)
                    self._repeats.add(graph, keeps=keeps, step=self._account.optimized)
                    contents = contents_of(graph)
                    self._contents = {name: max(value, self._contents.get(name, 0)) for name, value in contents.items()}
            del graph
        except Exception as error:
            if raised_by_program(error):
                raise
            self._failed, self.left = repr(error), 0  # not the error itself: its traceback has the nodes
            return
        took_ns = thread_time_ns() - began_ns
        self._row_ns += took_ns
        self._is_long = self._is_long or took_ns > LONG_NS
        is_cut = self._is_long and self._row_ns > LONG_ROW_NS
        if is_cut and self._is_known:
            self.left = 0
            return
        self._counted.append(nodes)
        self._keeps = self._keeps or keeps
        if is_cut:
            self.left = 0
        elif keeps and len(self._counted) < MOST_KEPT:
            self.left = PASSES  # all of a step are read
        else:
            self.left = 0 if nodes >= MANY_NODES and not self._keeps else self.left - 1
        if not self.left:
            mean = round(sum(self._counted) / len(self._counted))
            at_least = max(self._counted) >= MOST_NODES
            told = {"nodes": mean, "at_least": at_least, "repeated": self._repeats.share, **self._contents}
            if len(self._counted) == 1 and told.get("accumulates") is False:
                told["accumulates"] = None  # the first of a step adds to nothing
            set_fact("graph", told)
            self._is_known = True
            if is_cut:
                return  # of the gradients of a row, only some were read
            set_fact("gradients", self._use.fact())
            if self._use.is_pending:
                self._is_over, self.left = True, 1

    def passed(self) -> None:
        """A pass that was counted is over."""
        try:
            with self._torch._C.DisableTorchFunction():
                self._repeats.passed()
        except Exception as error:
            if raised_by_program(error):
                raise
            self._failed, self.left = repr(error), 0


def contents_of(graph: Iterable[Any]) -> dict[str, Any]:
    """What is told of the operations of a graph:

    decomposes    it factorises matrices, or solves with them
    tokens        the longest sequence that an embedding has looked up for each sample; 0: none has
    scores_bytes  of the largest softmax over more than two dimensions, as of the scores of attention; 0: none
    accumulates   it adds to gradients of a pass before it
    """
    decomposes, tokens, scores_bytes, accumulates = False, 0, 0, False
    for node in graph:
        name = name_of(node)
        decomposes = decomposes or name.startswith(_DECOMPOSES)
        if name == EMBEDDING:
            shape = node._input_metadata[0].shape  # samples, tokens, and what is looked up
            tokens = max(tokens, int(shape[-2]) if len(shape) > 2 else 0)
        elif name == _SOFTMAX:
            output = node._input_metadata[0]
            if len(output.shape) > 2:
                scores_bytes = max(scores_bytes, prod(output.shape) * output.dtype.itemsize)
        accumulates = accumulates or (name.endswith("AccumulateGrad") and node.variable.grad is not None)
    return {"decomposes": decomposes, "tokens": tokens, "scores_bytes": scores_bytes, "accumulates": accumulates}


def graph_below(torch: Any, outputs: Sequence[Any], most: int = MOST_NODES) -> dict[Any, tuple[Any, ...]]:
    """Return the nodes of the graph of some tensors, those that accumulate gradients included, and below each of them
    the nodes that its gradients go to.

    Args:
        torch: the package.
        outputs: tensors, or edges of a graph (torch.autograd.graph.GradientEdge).
        most: no more nodes are returned; then what is below some of them is missing.
    """
    grad_fn = torch.Tensor.grad_fn.__get__  # a subclass may have a property of this name
    roots = (grad_fn(each) if isinstance(each, torch.Tensor) else each.node for each in outputs)
    found: dict[Any, tuple[Any, ...]] = {root: () for root in roots if root is not None}
    todo = list(found)
    while todo and len(found) < most:
        node = todo.pop()
        below: list[Any] = []
        for each, _ in node.next_functions:
            if each is None:
                continue
            below.append(each)
            if each not in found:
                found[each] = ()
                todo.append(each)
                if len(found) >= most:
                    break
        found[node] = tuple(below)
    return found
