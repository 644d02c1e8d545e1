"""Finds gradients that nothing uses, in the graphs of backward passes that `graph` reads a few times in a run.

Three kinds. A parameter gets a gradient, but no optimizer has it, or only with a learning rate of 0, and its value does
not change: it belongs to a teacher or to a frozen part of a model, and backward went through it in vain. Or an
optimizer has it, but the gradient is cleared before that steps: the pass of a discriminator goes on through the
generator whose output it has got. And the gradient of an embedding is as large as its weight, though nearly all of its
rows are zero, because the batch has looked up only a few: the optimizer still updates every row.

Whether backward went through the operation of such a parameter in vain follows from the graph: it did if below the
operation there is nothing that is to be updated; otherwise only one of its two products was in vain, as the gradient of
its input is passed on. How long an operation takes is not known; the products of its parameters with the elements of
its output stand for it: a convolution computes with each weight at all places of a picture.

The fact "gradients" has the means of the passes that were read together:

    elements             of all parameters in the graph
    unused_elements      of those that nothing updates
    resting_elements     of those again that an optimizer has, with a learning rate of 0
    unused_share         of backward, that was in vain
    untouched_elements   of embeddings: in rows that no sample of the batch has looked up
    cleared_share        of backward, whose gradients were cleared before their optimizer stepped
    cleared_at           the line that calls such a backward pass; empty: there is none
    head_rows            for which the head of a model computes scores; 0: not known
    loss_rows            those of them that the loss is given
    loss_ignores         whether it ignores the target -100, and is the mean of the others
    head_share           of the model, that is its head

A program may update parameters without an optimizer, or an optimizer may have copies of them (DeepSpeed, Apex). So
nothing is told unless an optimizer has some of the parameters, and the others have had the same version since the
passes before, seconds ago. Nothing is told of FSDP, whose optimizers have other tensors than the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from gpulaunch.profiler.probe.graph_nodes import Graph, name_of, nodes_above
from gpulaunch.profiler.probe.scores import scores_of
from gpulaunch.profiler.probe.sites import asked_for, caller, place_of
from gpulaunch.profiler.probe.tensor_memory import some_values

FLAT: Final = "FlatParameter"
SHARDED: Final = (FLAT, "DTensor")
"""Parameters of FSDP."""
_MOST_PARAMETERS: Final = 20_000
"""Of optimizers: with more, it is not looked for."""
_MOST_OWNERS: Final = 4
"""With more optimizers in a pass, it is not looked for what each of them needs of it: each walks through the graph."""
_MOST_NODES: Final = 1024
"""Nor in a larger graph, of which `graph` reads one pass."""
_FEWEST_OF_MODEL: Final = 3
"""Parameters that lead to one node. Fewer are one layer, whose weight may be normalised before it is used: a spectral
norm has one, a weight norm two."""
_AT_REST: Final = -1
"""Instead of the version of a parameter whose learning rate is 0."""
EMBEDDING: Final = "EmbeddingBackward0"
_CONVOLUTION: Final = "ConvolutionBackward0"

optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
"""All that the program has created, as long as they exist."""
stepped: set[int] = set()
"""The `id` of each that has stepped since the last pass that was read; of no more than `MOST_STEPPED`."""
MOST_STEPPED: Final = 64


@dataclass(kw_only=True, slots=True)
class _OfOptimizer:
    """What is in a pass only for the parameters of one optimizer."""

    owner: frozenset[int]
    """Its `id`, and those of others that have them, too: one optimizer may wrap another."""
    parameter: weakref.ref[Any]
    """One of them."""
    elements: int
    at: str
    """The line that calls the pass."""
    is_cleared: bool | None = None
    """Whether its gradients were cleared before it stepped; None: not known yet."""


class GradientUse:
    """What becomes of the gradients of one rank; only its training thread calls it."""

    __slots__ = ("_computed", "_known", "_known_before", "_of_optimizers", "_parameter", "_passes", "_scores")

    def __init__(self, torch: Any) -> None:
        self._parameter: type[Any] = torch.nn.Parameter
        self._passes: list[tuple[int, int, int, float, float]] = []
        self._scores: list[tuple[int, int, bool, float]] = []
        self._computed = 0.0  # the elements of the operations of all passes
        self._of_optimizers: list[_OfOptimizer] = []
        self._known_before: dict[int, tuple[int, bytes]] = {}
        self._known: dict[int, tuple[int, bytes]] = {}

    def begin(self) -> None:
        """The passes that are read from here on are a row, seconds after the row before."""
        self._passes.clear()
        self._scores.clear()
        self._computed = 0.0
        self._of_optimizers.clear()
        stepped.clear()
        self._known_before, self._known = self._known, {}

    def add(self, graph: Graph) -> None:
        """Read a graph, the whole of it."""
        self.settle()
        updated, at_rest = _updated_by_optimizers()
        leaves = {node: each for node, below in graph.items() if not below and (each := _variable(node)) is not None}
        if not any(id(each) in updated for each in leaves.values()):
            return
        if any(type(each).__name__ in SHARDED for each in leaves.values()):
            return
        unused = {node for node, each in leaves.items() if id(each) not in updated and self._is_unused(each, at_rest)}
        above = nodes_above(graph)
        needed = _reaching((node for node in leaves if node not in unused), above)
        elements = unused_elements = resting = 0
        in_vain = untouched = 0.0
        sizes: dict[Any, int] = {}  # products of what backward computes with: an embedding only looks up
        for node, variable in leaves.items():
            if not isinstance(variable, self._parameter):
                continue  # an input that wants its gradient
            count = int(variable.numel())
            elements += count
            resting += count if node in unused and id(variable) in at_rest else 0
            operations = _operations(node, graph, above)
            if all(name_of(each) == EMBEDDING for each in operations):
                untouched += count * _untouched_share(operations) if node not in unused else 0.0
                unused_elements += count if node in unused else 0
                continue
            sizes[node] = products = _products(variable, operations)
            if node in unused:
                unused_elements += count
                in_vain += 0.5 * products if any(each in needed for each in operations) else products
        if scores := scores_of(graph, above):
            rest = sum(size for node, size in sizes.items() if node not in scores.weights)
            share = scores.products / (scores.products + rest)
            self._scores.append((scores.rows, scores.loss_rows, scores.ignores, share))
        computed = sum(sizes.values())
        self._passes.append((elements, unused_elements, resting, in_vain / computed if computed else 0.0, untouched))
        self._computed += computed
        of_owners: dict[frozenset[int], set[Any]] = {}
        for node, each in leaves.items():
            if owner := updated.get(id(each)):
                of_owners.setdefault(owner, set()).add(node)
        if 1 < len(of_owners) <= _MOST_OWNERS and len(graph) < _MOST_NODES:
            for owner, own in of_owners.items():
                needed = _reaching((node for node in leaves if node not in own), above)
                alone = _model_of_its_own(own, needed, graph, above)
                if counted := [node for node in alone if node in sizes]:
                    self._add_optimizer(owner, leaves[counted[0]], sum(sizes[node] for node in counted))

    @property
    def rests(self) -> bool:
        """Whether the last passes went through parameters with a learning rate of 0."""
        return any(resting for _, _, resting, *_ in self._passes)

    @property
    def is_pending(self) -> bool:
        """Whether it is not known yet what becomes of the gradients of some pass."""
        return any(each.is_cleared is None for each in self._of_optimizers)

    def settle(self) -> None:
        """Look at what has become of the gradients of passes before, when the next one starts; `add` does it, too."""
        for each in self._of_optimizers:
            _settle(each)
        stepped.clear()

    def fact(self) -> dict[str, float | str | bool] | None:
        """What the passes since `begin` have in common; None if nothing is known."""
        if not self._passes:
            return None
        elements, unused, resting, share, untouched = (
            sum(each) / len(self._passes) for each in zip(*self._passes, strict=True)
        )
        # One pass says nothing of those that belong to it in a step.
        cleared = [each for each in self._of_optimizers if each.is_cleared and len(self._passes) > 1]
        scores = self._scores if len(self._scores) == len(self._passes) else [(0, 0, False, 0.0)]
        head_rows, loss_rows, ignores, head_share = (sum(each) / len(scores) for each in zip(*scores, strict=True))
        return {
            "elements": round(elements),
            "unused_elements": round(unused),
            "resting_elements": round(resting),
            "unused_share": round(share, 3),
            "untouched_elements": round(untouched),
            "cleared_share": round(sum(each.elements for each in cleared) / (self._computed or 1.0), 3),
            "cleared_at": cleared[0].at if cleared else "",
            "head_rows": round(head_rows),
            "loss_rows": round(loss_rows),
            "loss_ignores": ignores == 1,
            "head_share": round(head_share, 3),
        }

    def _add_optimizer(self, owner: frozenset[int], parameter: Any, elements: int) -> None:
        """Note that a pass goes through a model only for the parameters of one optimizer."""
        frame = asked_for(caller())
        at = "" if frame is None else place_of(frame)
        of_one = _OfOptimizer(owner=owner, parameter=weakref.ref(parameter), elements=elements, at=at)
        self._of_optimizers.append(of_one)

    def _is_unused(self, variable: Any, at_rest: Set[int]) -> bool:
        """Whether a parameter that no optimizer updates is unchanged, and was none, since the row before."""
        if not isinstance(variable, self._parameter):
            return False
        # To add zero makes another version.
        version = _AT_REST if id(variable) in at_rest else int(variable._version)
        known = self._known[id(variable)] = version, some_bytes(variable)
        return self._known_before.get(id(variable)) == known


def some_bytes(parameter: Any) -> bytes:
    """A few of the values of a parameter on the CPU: `parameter.data.add_()` does not show in its version. Of another
    none, as a GPU would have to be waited for. No operation of torch's, which a mode of the program would see."""
    return some_values(parameter) if type(parameter).__name__ == "Parameter" else b""


def groups_of_optimizers() -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Each group of parameters of the living optimizers, with its optimizer; one that is half made has none."""
    for optimizer in list(optimizers):
        for group in getattr(optimizer, "param_groups", ()):
            yield optimizer, group


def _updated_by_optimizers() -> tuple[Mapping[int, frozenset[int]], Set[int]]:
    """The `id` of each parameter of the living optimizers, with those of its optimizers; and of those that they have
    only with a learning rate of 0. None of them if they have others than the graph, or too many."""
    found: dict[int, frozenset[int]] = {}
    at_rest: set[int] = set()
    owned = ((optimizer, group, each) for optimizer, group in groups_of_optimizers() for each in group["params"])
    for number, (optimizer, group, parameter) in enumerate(owned):
        if type(parameter).__name__ in SHARDED or number >= _MOST_PARAMETERS:
            return {}, set()
        if _is_at_rest(optimizer, group):
            at_rest.add(id(parameter))
        else:
            found[id(parameter)] = found.get(id(parameter), frozenset()) | {id(optimizer)}
    return found, at_rest


def _is_at_rest(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether a group's learning rate is 0, which for an optimizer of torch means that nothing changes, but for Rprop:
    there it is the first step only. A tensor may be on a GPU, which would have to be waited for."""
    rate, kind = group.get("lr"), type(optimizer)
    of_torch = kind.__module__.startswith("torch.optim") and kind.__name__ != "Rprop"
    return of_torch and isinstance(rate, int | float) and rate == 0


def _settle(noted: _OfOptimizer) -> None:
    """Decide what has become of the gradients of a pass, if its optimizer has stepped since, or they are cleared.

    They are not called cleared unless another optimizer has stepped: a GradScaler may leave out steps.
    """
    if noted.is_cleared is not None:
        return
    parameter = noted.parameter()
    if not noted.owner.isdisjoint(stepped) or len(stepped) >= MOST_STEPPED or parameter is None:
        noted.is_cleared = False
    elif parameter.grad is None and stepped:
        noted.is_cleared = True


def _variable(node: Any) -> Any:
    """The tensor whose gradient a node accumulates; None: it is no such node."""
    return getattr(node, "variable", None)


def _reaching(nodes: Any, above: Mapping[Any, Sequence[Any]]) -> set[Any]:
    """Some nodes, and all from which one of them can be reached."""
    found = set(nodes)
    todo = list(found)
    while todo:
        for each in above.get(todo.pop(), ()):
            if each not in found:
                found.add(each)
                todo.append(each)
    return found


def _model_of_its_own(
    own: Set[Any], needed: Set[Any], graph: Graph, above: Mapping[Any, Sequence[Any]]
) -> Sequence[Any]:
    """The parameters among `own` of a model that a pass goes through for them alone; empty: there is none.

    What leads to nothing else hangs together then, and has most of them: a generator below a discriminator. Of a
    discriminator above a generator only what prepares its weights leads to nothing else, each by itself.
    """
    found = _reaching(own, above) - needed
    while found:
        part, todo = set[Any](), [found.pop()]
        while todo:
            node = todo.pop()
            part.add(node)
            beside = [each for each in (*graph[node], *above.get(node, ())) if each in found]
            found.difference_update(beside)
            todo += beside
        of_part = [node for node in own if node in part and needed.isdisjoint(above[node])]
        if len(of_part) >= _FEWEST_OF_MODEL and 2 * len(of_part) > len(own):
            return of_part
    return ()


def _operations(leaf: Any, graph: Graph, above: Mapping[Any, Sequence[Any]]) -> Sequence[Any]:
    """The nodes that compute with a parameter: above it, beyond what only transposes or casts it."""
    node = leaf
    while len(over := above.get(node, ())) == 1 and len(graph[over[0]]) == 1 and name_of(over[0]) != EMBEDDING:
        node = over[0]
    return over


def _products(parameter: Any, operations: Sequence[Any]) -> int:
    """How many products operations make with a parameter: with each element, at all places of what they give."""
    found = 0
    for node in operations:
        shape: Sequence[int] = node._input_metadata[0].shape  # of the gradient of what it gives
        features = shape[1] if name_of(node) == _CONVOLUTION else shape[-1] if shape else 1
        found += prod(shape) if parameter.dim() < 2 else int(parameter.numel()) * prod(shape) // max(1, features)
    return int(found)


def _untouched_share(lookups: Sequence[Any]) -> float:
    """The share of an embedding's rows that were not looked up, at least; 0 if the gradient is sparse, or unknown."""
    looked_up = rows = 0
    for node in lookups:
        if getattr(node, "_saved_sparse", True):
            return 0.0
        # Not the saved indices: saved tensors may be packed, and to unpack them would run code of the program.
        looked_up += prod(node._input_metadata[0].shape[:-1])
        rows = int(node._saved_weight_sym_argsize_0)
    return max(0.0, 1.0 - looked_up / rows) if rows else 0.0
