"""Finds in the source of a program forward passes that a step makes again, only to compare its predictions, or to log
another loss.

`(model(x).argmax(1) == y)` beside `loss = criterion(model(x), y)`: the output that the loss is computed from would do.
Told is only a call with the same words as one before it or after it in the same sequence of statements, of the same
variables, between which nothing is known to change the model or the batch. Two passes for the loss are not told: with
dropout, or after an update, they differ, and the source seldom says that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import changed_by, statements_in
from gpulaunch.profiler.samplers.loops import Function, calls_in, imported_names, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import names_in, nodes_of, words_in
from gpulaunch.profiler.samplers.tensor_functions import VIEWS

_ACCURACY: Final = re.compile(r"\w*accuracy\w*", re.IGNORECASE)
_LOSS: Final = re.compile(r"\w*(?:loss|criterion|entropy|bce|mse|nll|backward)\w*", re.IGNORECASE)
_CHANGES: Final = re.compile(
    r"\w*(?:step|update|attack|restore|load|train|eval|swap|perturb|requires_grad|set_|ema|average)\w*|append|extend"
)
"""Functions after which the same call may give something else."""
_HARMLESS_CALLS: Final = frozenset({"backward", "manual_backward", "zero_grad", "log", "log_dict", "print", "info"})
"""Functions that are called for what they do, which is nothing to a model or a batch."""
_HARMLESS: Final = frozenset({"no_grad", "inference_mode", "autocast", "no_sync", "profile", "record_function"})
"""Contexts in which it gives the same."""
_APART: Final = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.comprehension, ast.ListComp, ast.GeneratorExp, ast.DictComp)
"""Expressions of which it is not known whether, or with what, a call in them is made."""
_MOST_PASSES: Final = 64


@dataclass(frozen=True)
class _Pass:
    """A call that may be a forward pass."""

    call: ast.Call
    names: frozenset[str]
    is_compared: bool
    """Its result is only compared with something."""


def passes_for_metrics(tree: ast.Module) -> set[int]:
    """Return the lines of calls that are made only to compare their result, though the same call is made for the loss.

    Args:
        tree: of a file.
    """
    nodes = nodes_of(tree)
    functions = [node for node in nodes if isinstance(node, Function)]
    others = {*imported_names(tree), *(node.name for node in nodes if isinstance(node, Function | ast.ClassDef))}
    bodies = (tree.body, *(each.body for each in functions))
    again = [call for body in bodies for call in _again(body, {}, others, body)]
    return {line for call in again for line in lines_of(call)}


def _again(
    body: Sequence[ast.stmt], passes: dict[str, _Pass], others: set[str], around: Sequence[ast.stmt]
) -> Iterator[ast.Call]:
    """The calls of a sequence of statements.

    Args:
        body: the statements.
        passes: calls before them by their text; those of the statements are added.
        others: names of functions that are no models.
        around: the statements that may read what these set.
    """
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            continue
        blocks = _blocks(statement)
        if not blocks:
            yield from _made_by(statement, around, passes, others)
        is_plain = isinstance(statement, ast.With) and all(map(_is_harmless, statement.items))
        is_branch = isinstance(statement, ast.If)
        for block in blocks:
            known = passes if is_plain else dict(passes) if is_branch else {}
            yield from _again(block, known, others, around if is_plain or is_branch else block)
        if blocks and not is_plain and not is_branch:
            passes.clear()
        _forget(passes, statement)


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, ast.Match):
        return [case.body for case in statement.cases]
    return [block for name in ("body", "orelse", "finalbody") if (block := getattr(statement, name, None))]


def _is_harmless(context: ast.withitem) -> bool:
    return isinstance(context.context_expr, ast.Call) and last_name(context.context_expr) in _HARMLESS


def _made_by(
    statement: ast.stmt, body: Sequence[ast.stmt], passes: dict[str, _Pass], others: set[str]
) -> Iterator[ast.Call]:
    calls = list(islice((call for call in calls_in(statement) if _may_be_pass(call, others)), _MOST_PASSES))
    made: list[tuple[str, _Pass]] = []
    for call in calls if len(passes) + len(calls) < _MOST_PASSES else ():
        if not _is_apart(call, statement):
            is_compared = _is_compared(call, statement, body)
            made.append((_text(call), _Pass(call, frozenset(names_in(call)), is_compared)))
    texts = [text for text, _ in made]
    for text, this in made:
        if texts.count(text) > 1:
            continue  # on one line, samples do not tell which of them it is
        before = passes.setdefault(text, this)
        if before.is_compared != this.is_compared:
            yield this.call if this.is_compared else before.call


def _text(call: ast.Call) -> str:
    """What calls that do the same have in common: a Trainer's `super().compute_loss(model, inputs)` calls
    `model(**inputs)`."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Call()), args=[model, inputs, *_]):
            return f"{ast.unparse(model)}(**{ast.unparse(inputs)})"
        case _:
            return ast.unparse(call)


def _may_be_pass(call: ast.Call, others: set[str]) -> bool:
    """Whether it is a call of what may be a model, with variables alone."""
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="compute_loss"):
            is_model = len(call.args) > 1
        case ast.Name(id=name):
            is_model = name not in others
        case ast.Attribute(value=ast.Name(id="self")):
            is_model = True
        case _:
            is_model = False
    arguments = [*call.args, *(each.value for each in call.keywords)]
    is_constant = all(isinstance(each, ast.Constant) for each in arguments)
    return is_model and not is_constant and all(map(_is_variable, arguments))


def _is_variable(node: ast.expr) -> bool:
    match node:
        case ast.Name() | ast.Constant():
            return True
        case ast.Attribute(value=value) | ast.Subscript(value=value, slice=ast.Constant()):
            return _is_variable(value)
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=arguments, keywords=[]) if name in VIEWS:
            return _is_variable(value) and all(map(_is_variable, arguments))
        case _:
            return False


def _is_apart(call: ast.Call, statement: ast.stmt) -> bool:
    return any(isinstance(node, _APART) and call in nodes_of(node) for node in nodes_of(statement))


def _is_compared(call: ast.Call, statement: ast.stmt, body: Sequence[ast.stmt]) -> bool:
    """Whether the result of a call is only compared, or logged: in its own statement, or by a name that is read for
    nothing else."""
    if any(map(_LOSS.fullmatch, words_in(statement))):
        return _is_only_logged(call, statement, body)
    if any(_compares(node) and call in nodes_of(node) and _is_output(call, node) for node in nodes_of(statement)):
        return True
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            sized = [node for each in body for part in nodes_of(each) if _sizes(part) for node in nodes_of(part)]
            reads = [node for each in body for node in nodes_of(each) if _reads(node, name) and node not in sized]
            compares = [part for each in body for part in nodes_of(each) if _compares(part)]
            compared_by = [part for part in compares if any(_reads(node, name) for node in nodes_of(part))]
            compared = [node for part in compares for node in nodes_of(part)]
            if not _other_outputs(call, body).isdisjoint(each for part in compared_by for each in names_in(part)):
                return False  # where two passes agree, as with dropout
            chooses = _chooses(value) or all(map(_chooses, compared_by))
            return chooses and len(reads) > 0 and all(node in compared for node in reads)
        case _:
            return False


def _is_only_logged(call: ast.Call, statement: ast.stmt, body: Sequence[ast.stmt]) -> bool:
    """Whether only the values of a loss are used: `plain = criterion(model(x), y)`, then `plain.item()`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call()):
            nodes = [node for each in body for node in nodes_of(each)]
            methods = [
                call.func for call in nodes if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            ]
            values = [each.value for each in methods if each.attr in ("detach", "item")]
            reads = [node for node in nodes if _reads(node, name)]
            beside = _other_outputs(call, body)  # how far two passes agree, as with dropout
            plain = (each for each in statements_in(body) if not _blocks(each))
            readers = [each for each in plain if any(_reads(node, name) for node in nodes_of(each))]
            is_alone = all(beside.isdisjoint(names_in(each)) for each in readers)
            return is_alone and bool(reads) and all(node in values for node in reads)
        case _:
            return False


def _other_outputs(call: ast.Call, body: Sequence[ast.stmt]) -> set[str]:
    """The names of what other calls with the same words return."""
    text = _text(call)
    made = (each for each in body if isinstance(each, ast.Assign) and call not in nodes_of(each))
    made = (each for each in made if any(_text(other) == text for other in calls_in(each)))
    return {name for each in made for target in each.targets for name in names_in(target)}


def _is_output(call: ast.Call, compared: ast.AST) -> bool:
    """Whether what is compared is the result of a call itself, and not of another function that is given it."""
    within = [each for each in calls_in(compared) if each is not call and each is not compared]
    return not any(call in nodes_of(argument) for each in within for argument in each.args)


def _reads(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _compares(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.Eq)
    return isinstance(node, ast.Call) and (_ACCURACY.fullmatch(last_name(node)) is not None or last_name(node) == "eq")


def _sizes(node: ast.AST) -> bool:
    """Whether it asks only how large something is."""
    return isinstance(node, ast.Call) and last_name(node) in ("len", "numel")


def _chooses(value: ast.AST) -> bool:
    return any(last_name(call) in ("argmax", "topk") for call in calls_in(value))


def _forget(passes: dict[str, _Pass], statement: ast.stmt) -> None:
    """Leave out the calls whose result may be another one after a statement."""
    nodes = nodes_of(statement)
    call = statement.value if isinstance(statement, ast.Expr) else None
    does_more = isinstance(call, ast.Call) and last_name(call) not in _HARMLESS_CALLS
    if does_more or any(isinstance(node, ast.Call) and _CHANGES.fullmatch(last_name(node)) for node in nodes):
        passes.clear()
        return
    changed = {name for node in nodes for name in changed_by(node)}
    changed |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed |= names_in(node.value)
        elif isinstance(node, ast.Call):
            changed.update(each.id for each in node.args if isinstance(each, ast.Name) and _is_model(passes, each.id))
    for text in [text for text, each in passes.items() if not changed.isdisjoint(each.names)]:
        del passes[text]


def _is_model(passes: dict[str, _Pass], name: str) -> bool:
    """Whether a name is that of a model, which a function that it is given to may change."""
    return any(isinstance(each.call.func, ast.Name) and each.call.func.id == name for each in passes.values())
