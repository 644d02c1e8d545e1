"""Finds in the source of a program forward passes that a step makes again, with the same result.

`(model(x).argmax(1) == y)` computes anew what the loss has been computed from: the same function of the same
arguments. So do `self.encode(x)[0]` and `self.encode(x)[1]`. Where a program wants two outputs of one batch (with
different dropout, before and after an update, or one without gradients as the target of the other), they differ, or
none of them is only compared with the targets.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from gpulaunch.profiler.record.line_calls import FORWARD_AGAIN, FORWARD_TWICE
from gpulaunch.profiler.samplers.loops import Function, calls_in, imported_names, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import nodes_of

_COMPARED: Final = frozenset({"eq", "argmax", "topk", "accuracy", "accuracy_score", "roc_auc_score", "f1_score"})
"""What is done with predictions that no loss is computed from."""
_METHODS: Final = re.compile(r"forward\w*|encode|decode|get_\w+_features|log_prob")
"""Those of another object than `self` that are forward passes of a model."""
_SWITCHES: Final = frozenset({"eval", "train"})
"""Methods after which the same call of a model gives something else."""
_HARMLESS: Final = frozenset(
    {
        *("log", "log_dict", "print", "info", "debug", "append", "extend", "add_scalar", "set_postfix"),
        *("backward", "manual_backward", "zero_grad", "get", "clip_grad_norm_", "synchronize"),
    }
)
"""Functions that are called for what they do, which is nothing to a model."""
_WITHOUT_MODELS: Final = frozenset(
    {
        *sys.stdlib_module_names,
        *("torch", "torchmetrics", "numpy", "lightning", "pytorch_lightning", "accelerate", "pandas", "sklearn"),
        *("scipy", "matplotlib", "tqdm", "PIL"),
    }
)
"""Packages that no module with dropout is from, other than those of the names below."""
_DROPS: Final = re.compile(r"drop|transformer|rrelu", re.IGNORECASE)
_RANDOM: Final = re.compile(r"rand|bernoulli|nois|sampl|gumbel|multinomial|augment", re.IGNORECASE)


@dataclass(frozen=True)
class _Pass:
    """A call that may be a forward pass."""

    call: ast.Call
    is_metric: bool
    """Its result is only compared with something."""
    has_gradients: bool
    is_stale: bool = False
    """The model may have changed since."""


def repeated_passes(tree: ast.Module) -> dict[int, str]:
    """Return the lines of calls whose result another one has, and what each is: one of `record.line_calls`.

    Args:
        tree: of a file.
    """
    functions = [node for node in nodes_of(tree) if isinstance(node, Function)]
    others = {*dir(builtins), *imported_names(tree), *(each.name for each in functions)}
    reader = _Reader(others)
    bodies = [tree.body, *(each.body for each in functions)]
    again = [each for body in bodies for each in reader.again(body, {}, is_metric=False, has_gradients=True)]
    is_certain = not _may_be_random(tree)
    told = {each.call: FORWARD_AGAIN if each.is_metric else FORWARD_TWICE for each in again}
    return {line: what for call, what in told.items() if is_certain or what == FORWARD_AGAIN for line in lines_of(call)}


class _Reader:
    """Reads blocks of statements."""

    def __init__(self, functions: Set[str]) -> None:
        """`functions`: names of what is no model."""
        self._functions = functions

    def again(
        self, body: Sequence[ast.stmt], passes: dict[str, _Pass], *, is_metric: bool, has_gradients: bool
    ) -> Iterator[_Pass]:
        """The calls of a block whose result another one has.

        Args:
            body: its statements.
            passes: calls before it by their text; those of the block are added.
            is_metric: the block is without gradients, and compares predictions.
            has_gradients: it is not.
        """
        for statement in body:
            if isinstance(statement, Function | ast.ClassDef):
                continue
            blocks = [block for name in ("body", "orelse", "finalbody") if (block := getattr(statement, name, None))]
            if not blocks:
                compares = is_metric or _compares(statement)
                yield from self._made_by(statement, passes, is_metric=compares, has_gradients=has_gradients)
            is_loop = isinstance(statement, ast.For | ast.While)
            if is_loop:
                _change(passes)
            without = _is_without_gradients(statement)
            for block in blocks:
                yield from self.again(
                    block,
                    passes if isinstance(statement, ast.With) else dict(passes),
                    is_metric=is_metric or (without and _compares(statement)),
                    has_gradients=has_gradients and not without,
                )
            if is_loop or _changes_a_model(statement):
                _change(passes)
            _forget(passes, statement)

    def _made_by(
        self, statement: ast.stmt, passes: dict[str, _Pass], *, is_metric: bool, has_gradients: bool
    ) -> Iterator[_Pass]:
        for call in calls_in(statement):
            if not call.args or not self._may_be_pass(call):
                continue
            this = _Pass(call, is_metric, has_gradients)
            before = passes.setdefault(ast.unparse(call), this)
            if before.is_metric != is_metric:
                yield this if is_metric else before
            elif before is not this and before.has_gradients and has_gradients and not (before.is_stale or is_metric):
                yield this

    def _may_be_pass(self, call: ast.Call) -> bool:
        match call.func:
            case ast.Name(id=name):
                return name not in self._functions
            case ast.Attribute(value=ast.Name(id="self")):
                return True
            case ast.Attribute(attr=name):
                return _METHODS.fullmatch(name) is not None
            case _:
                return False


def _change(passes: dict[str, _Pass]) -> None:
    passes.update({text: replace(each, is_stale=True) for text, each in passes.items()})


def _changes_a_model(statement: ast.stmt) -> bool:
    """Whether a statement is a call that may change a model."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and last_name(call) not in _HARMLESS


def _forget(passes: dict[str, _Pass], statement: ast.stmt) -> None:
    """Leave out the calls whose result may be another one after a statement."""
    nodes = list(nodes_of(statement))
    if any(isinstance(node, ast.Call) and last_name(node) in _SWITCHES for node in nodes):
        passes.clear()
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for text, each in list(passes.items()):
        if any(isinstance(node, ast.Name) and node.id in stored for node in nodes_of(each.call)):
            del passes[text]


def _is_without_gradients(statement: ast.stmt) -> bool:
    contexts = [each.context_expr for each in statement.items] if isinstance(statement, ast.With) else []
    return any(isinstance(each, ast.Call) and last_name(each) in ("no_grad", "inference_mode") for each in contexts)


def _compares(statement: ast.stmt) -> bool:
    """Whether a statement compares predictions with targets."""
    return any(last_name(call) in _COMPARED for call in calls_in(statement)) or any(
        isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) for node in nodes_of(statement)
    )


def _may_be_random(tree: ast.Module) -> bool:
    """Whether a module that a file makes may give two results for the same arguments."""
    if any(of.partition(".")[0] not in _WITHOUT_MODELS for of in imported_names(tree).values()):
        return True
    if any(isinstance(node, ast.ImportFrom) and node.level for node in nodes_of(tree)):
        return True
    if has_dropout(tree):
        return True
    classes = [node for node in nodes_of(tree) if isinstance(node, ast.ClassDef)]
    modules = [
        each for each in classes if any(isinstance(node, Function) and node.name == "forward" for node in each.body)
    ]
    return any(_RANDOM.search(name) for each in modules for name in _names(each))


def has_dropout(tree: ast.Module) -> bool:
    """Whether a file has names of modules with dropout."""
    return any(_DROPS.search(name) for name in _names(tree))


def _names(tree: ast.AST) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
