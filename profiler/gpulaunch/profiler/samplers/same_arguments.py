"""Finds calls on the stack of a training step that give the same in every step, because their arguments are the same.

What a loop that makes steps neither sets nor changes is the same in all of its turns. Where it is an argument of a
call, the function has it under another name, and so on down the stack: `net(words, edges)` in the loop, `forward(self,
x, edges)` in the model, and in a layer of it `normalised(edges)`. That function computes the same each time if it only
computes (see `pure_functions`) and has no other arguments.

What an optimizer has may be trained, and does not stay the same; nor does a model with dropout.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpulaunch.profiler.samplers.constants import changed_by
from gpulaunch.profiler.samplers.loops import Function, calls_in, imported_names, last_name, lines_of
from gpulaunch.profiler.samplers.pure_functions import Pure, PureFunctions
from gpulaunch.profiler.samplers.syntax import nodes_of, root_of
from gpulaunch.profiler.samplers.tensor_functions import SCALARS, VIEWS

_Loop = ast.For | ast.While
_Names = frozenset[str]
_NONE: _Names = frozenset()
_DROPS: Final = re.compile(r"drop|transformer|rrelu", re.IGNORECASE)
_OPTIMIZER: Final = re.compile(r"A?SGD|\w*Adam\w*|Ada\w+|R(?:MS)?prop|LBFGS|Lion|LAMB|LARS|Muon|SAM")


@dataclass(frozen=True)
class _CallSite:
    """A call, and the names that each of its arguments depends on; None: it may be anything."""

    name: str
    is_of_package: bool
    positional: tuple[_Names | None, ...]
    by_name: Mapping[str, _Names | None]


@dataclass(frozen=True)
class _Callee:
    """A function."""

    parameters: tuple[str, ...]
    """Without `self`."""
    needed: int
    """How many of them have no default."""
    varying: _Names
    """Those of them that it sets or changes."""
    pure: Pure | None


@dataclass
class Calls:
    """The calls of a file. Without arguments: of one that is not known."""

    sites: dict[int, list[_CallSite]] = field(default_factory=dict[int, list[_CallSite]])
    """By line."""
    functions: dict[int, _Callee] = field(default_factory=dict[int, _Callee])
    """The innermost by line."""
    staying: dict[int, _Names] = field(default_factory=dict[int, _Names])
    """By line of a loop that makes steps: the names that stay the same in it, and are not trained."""
    drops: bool = False
    """A model may have dropout."""


def calls_of(tree: ast.Module, makes_steps: Callable[[_Loop], bool]) -> Calls:
    """Read a file.

    Args:
        tree: of the file.
        makes_steps: whether a loop makes training steps.
    """
    nodes = nodes_of(tree)
    trained = _trained(tree)
    found = Calls(drops=_has_dropout(tree))
    pure = PureFunctions(tree)
    imported = imported_names(tree).keys()
    for node in nodes:  # the outermost first
        if isinstance(node, ast.Call):
            by_name = {each.arg: _depends_on(each.value) for each in node.keywords if each.arg}
            has_rest = any(isinstance(each, ast.Starred) for each in node.args) or len(by_name) < len(node.keywords)
            is_of_package = root_of(node.func) in imported
            site = _CallSite(last_name(node), is_of_package, tuple(map(_depends_on, node.args)), by_name)
            for line in () if has_rest else lines_of(node):
                found.sites.setdefault(line, []).append(site)
        elif isinstance(node, Function):
            callee = _callee(node, pure)
            found.functions.update(dict.fromkeys(lines_of(node), callee))
        elif isinstance(node, _Loop) and trained is not None and makes_steps(node):
            found.staying.update(dict.fromkeys(lines_of(node), _staying(node) - trained))
    return found


class SameArguments:
    """Follows one stack, from its outermost frame on."""

    def __init__(self) -> None:
        self._names = _NONE
        self._frozen = _NONE

    def calls(self, calls: Calls, line: int, name: str, called: _Callee | None) -> bool:
        """Whether a frame calls a function that gives the same as in the step before.

        Args:
            calls: of the frame's file.
            line: of the frame.
            name: of the function that it calls, without its class.
            called: what is known of that.
        """
        if line in calls.staying:
            self._names = calls.staying[line]
            self._frozen = _NONE if calls.drops else self._names
        site = _site_of(calls.sites.get(line, ()), name, called) if self._names and called is not None else None
        if site is None or called is None:
            self.loses_track()
            return False
        bound = dict(_bound(site, called))
        same = frozenset(each for each, names in bound.items() if names is not None and names <= self._names)
        frozen = frozenset(each for each in same if (bound[each] or _NONE) <= self._frozen)
        self._names, self._frozen = same - called.varying, frozen - called.varying
        return called.pure is not None and len(same) == len(called.parameters) > 0 and called.pure.models <= frozen

    def loses_track(self) -> None:
        """What the next frame is called with is not known."""
        self._names = self._frozen = _NONE


def _site_of(sites: Sequence[_CallSite], name: str, called: _Callee) -> _CallSite | None:
    """The one call of a line that calls a function; `forward` is that of a module, by any name."""
    fitting = [each for each in sites if each.name == name or (name == "forward" and not each.is_of_package)]
    counts = [len(each.positional) + len(each.by_name) for each in fitting]
    fitting = [each for each, n in zip(fitting, counts, strict=True) if called.needed <= n <= len(called.parameters)]
    return fitting[0] if len(fitting) == 1 else None


def _bound(site: _CallSite, called: _Callee) -> Iterator[tuple[str, _Names | None]]:
    """The arguments of a function, and the names of the caller that each depends on; a default depends on none."""
    for at, parameter in enumerate(called.parameters):
        if at < len(site.positional):
            yield parameter, site.positional[at]
        else:
            yield parameter, site.by_name.get(parameter, _NONE)


def _callee(function: Function, pure: PureFunctions) -> _Callee:
    arguments = function.args
    parameters = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    nodes = nodes_of(function)
    varying = {name for node in nodes for name in changed_by(node)}
    varying.update(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return _Callee(
        tuple(each for each in parameters if each != "self"),
        len(parameters) - ("self" in parameters) - len(arguments.defaults) - sum(map(bool, arguments.kw_defaults)),
        frozenset(varying),
        None if "self" in parameters else pure.read(function),
    )


def _depends_on(value: ast.expr) -> _Names | None:
    """The names that an argument depends on, other than by their shapes; None: it may be anything."""
    match value:
        case ast.Constant() | ast.Attribute(attr="shape" | "device" | "dtype" | "ndim"):
            return _NONE
        case ast.Call(func=ast.Name(id="len")) | ast.Call(func=ast.Attribute(attr="size" | "dim" | "numel")):
            return _NONE
        case ast.Name(id=name):
            return frozenset({name})
        case ast.Call(func=ast.Attribute(value=on, attr=name), args=arguments, keywords=[]) if name in VIEWS:
            return _together([on, *arguments])
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in SCALARS:
            return _together(arguments)
        case ast.Subscript() | ast.UnaryOp() | ast.BinOp() | ast.Compare() | ast.Tuple() | ast.List() | ast.Slice():
            return _together([each for each in ast.iter_child_nodes(value) if isinstance(each, ast.expr)])
        case _:
            return None


def _together(parts: Iterable[ast.expr]) -> _Names | None:
    found = [_depends_on(each) for each in parts]
    return None if None in found else frozenset[str]().union(*(each for each in found if each is not None))


def _staying(loop: _Loop) -> _Names:
    """The names that a loop reads, and neither sets nor may change."""
    nodes = nodes_of(loop)
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    varies = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    changed = {name for node in nodes for name in changed_by(node)}
    varies |= changed
    for node in nodes:
        match node:
            case ast.Expr():  # called for what it does
                varies.update(root_of(part) for call in calls_in(node) for part in _parts(call))
            case ast.For(target=target, iter=iterated) if not changed.isdisjoint(_names(target)):
                varies |= _names(iterated)
            case ast.FunctionDef(name=name):
                varies.add(name)
            case _:
                pass
    return frozenset(read - varies)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in nodes_of(node) if isinstance(each, ast.Name)}


def _parts(call: ast.Call) -> Iterator[ast.expr]:
    """What a call may change: the object whose method it is, and its arguments."""
    if isinstance(call.func, ast.Attribute):
        yield call.func.value
    yield from call.args
    yield from (each.value for each in call.keywords)


def _trained(tree: ast.Module) -> _Names | None:
    """The names of what a file may train: what it gives to an optimizer, or does something with all parameters of, but
    to freeze them. None: it may train tensors by any name."""
    freezing = {id(node.iter) for node in nodes_of(tree) if isinstance(node, ast.For) and _freezes(node)}
    of_classes = {id(each) for node in nodes_of(tree) if isinstance(node, ast.ClassDef) for each in nodes_of(node)}
    found = set[str]()
    for call in calls_in(tree):
        name = last_name(call)
        if name in ("parameters", "named_parameters", "train") and id(call) not in freezing:
            found |= _names(call.func)
        elif _OPTIMIZER.fullmatch(name) or "optim" in ast.unparse(call.func):
            found.update(name for part in _parts(call) for name in _names(part))
        elif _makes_parameter(call) and id(call) not in of_classes:
            return None
    return frozenset(found)


def _makes_parameter(call: ast.Call) -> bool:
    """Whether a call makes a tensor that may be trained."""
    if last_name(call) == "requires_grad_":
        return not any(map(_is_false, call.args))
    wants = any(each.arg == "requires_grad" and not _is_false(each.value) for each in call.keywords)
    return wants or last_name(call) == "Parameter"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _freezes(loop: ast.For) -> bool:
    names = {node.attr for node in nodes_of(loop) if isinstance(node, ast.Attribute)}
    return names <= {"parameters", "named_parameters", "requires_grad", "requires_grad_"}


def _has_dropout(tree: ast.Module) -> bool:
    """Whether a file has names of modules, or arguments, with dropout."""
    attributes = {node.attr for node in nodes_of(tree) if isinstance(node, ast.Attribute)}
    keywords = {node.arg for node in nodes_of(tree) if isinstance(node, ast.keyword) and node.arg}
    return any(_DROPS.search(name) for name in (attributes | keywords | _names(tree)) - {"drop_last"})
