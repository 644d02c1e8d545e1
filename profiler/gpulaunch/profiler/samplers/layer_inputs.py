"""Finds in the source of a program which arguments a model gives to all of its layers of a class alike.

    for layer in self.layers:
        x = layer(x, edges)

In one forward pass, `edges` is the same for each of them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from gpulaunch.profiler.samplers.function_bodies import changed_by
from gpulaunch.profiler.samplers.loops import Function
from gpulaunch.profiler.samplers.syntax import names_in, nodes_of


def arguments_of_layers(
    tree: ast.Module, is_read: Callable[[ast.expr], bool]
) -> Mapping[tuple[Function, ast.ClassDef], set[str]]:
    """Return for the `forward` of a class the arguments that several of its layers are given alike.

    Args:
        tree: of a file, in which both the layers and the model are.
        is_read: whether the place at which a tensor is used neither changes it nor gives it another name.
    """
    classes = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
    found: dict[tuple[Function, ast.ClassDef], set[str]] = {}
    for model in classes.values():
        passes, layers = _method(model, "forward"), _layers(model, classes)
        if passes is None or not layers:
            continue
        calls: dict[str, list[tuple[ast.Call, bool]]] = {}
        for call, name, is_repeated in _calls(passes, layers):
            calls.setdefault(name, []).append((call, is_repeated))
        for name, made in calls.items():
            layer = classes[name]
            forward = _method(layer, "forward")
            if forward is None or len(made) + sum(is_repeated for _, is_repeated in made) < 2:
                continue
            positions = [each.arg for each in forward.args.args][1:]
            for at, argument in enumerate(positions):
                given = [call.args[at] if at < len(call.args) else None for call, _ in made]
                if _is_one(given, passes, [call for call, _ in made], is_read):
                    found.setdefault((forward, layer), set()).add(argument)
    return found


def is_of(node: ast.expr, names: Set[str]) -> bool:
    """Whether an expression is made of some names, and of nothing that differs between layers."""
    return any(names & names_in(each) for each in _given(node)) and is_alike(node, names)


def is_alike(node: ast.expr, names: Set[str]) -> bool:
    """Whether nothing in an expression differs between layers that are given `names` alike: what they are themselves,
    and shapes of what they are given besides, but for the first dimension."""
    parts = [part for each in _given(node) for part in nodes_of(each)]
    counts = {id(each.value) for each in parts if isinstance(each, ast.Subscript) and _is_first(each.slice)}
    counts |= {id(each.func) for each in parts if isinstance(each, ast.Call) and each.args and _is_first(each.args[0])}
    for each in parts:
        match each:
            case ast.Name(id="self"):
                return False
            case ast.Attribute(value=ast.Name(id=name), attr="shape" | "size" | "ndim" | "numel" | "dim"):
                if name not in names and id(each) not in counts:
                    return False
            case _:
                pass
    return True


def _given(node: ast.expr) -> Sequence[ast.AST]:
    """The arguments of a call of a method of its own; anything else itself."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"))):
            return [*node.args, *node.keywords]
        case _:
            return [node]


def _is_first(index: ast.expr) -> bool:
    return isinstance(index, ast.Constant) and index.value == 0


def _method(of: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((each for each in of.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def _layers(model: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> dict[str, tuple[str, bool]]:
    """The attributes that `__init__` sets to a layer of a class of the file, or to several: the class, and whether."""
    init = _method(model, "__init__")
    found: dict[str, tuple[str, bool]] = {}
    for node in nodes_of(init) if init is not None else ():
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=ast.Call() as value):
                made = names_in(value) & classes.keys()
                if len(made) == 1:
                    found[name] = made.pop(), not isinstance(value.func, ast.Name)
            case _:
                pass
    return found


def _calls(passes: ast.FunctionDef, layers: Mapping[str, tuple[str, bool]]) -> Iterator[tuple[ast.Call, str, bool]]:
    """The calls of layers in a forward pass: the class of each, and whether it is made several times."""
    loops = [each for each in nodes_of(passes) if isinstance(each, ast.For)]
    repeated = {node for loop in loops for node in nodes_of(loop)}
    of_loops = {
        name: layers[of][0]
        for loop in loops
        if len(walked := _attributes(loop.iter) & layers.keys()) == 1  # not `zip(self.layers, self.norms)`
        for name in names_in(loop.target)
        for of in walked
        if layers[of][1]
    }
    for node in nodes_of(passes):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)) if name in layers:
                if not layers[name][1]:
                    yield node, layers[name][0], node in repeated
            case ast.Call(func=ast.Name(id=name)) if name in of_loops:
                yield node, of_loops[name], True
            case _:
                pass


def _attributes(node: ast.AST) -> set[str]:
    return {each.attr for each in nodes_of(node) if isinstance(each, ast.Attribute)}


def _is_one(
    given: list[ast.expr | None], passes: ast.FunctionDef, calls: list[ast.Call], is_read: Callable[[ast.expr], bool]
) -> bool:
    """Whether all of what is given is one argument of the forward pass, which that only reads besides."""
    names = {each.id if isinstance(each, ast.Name) else "" for each in given}
    if len(names) != 1 or not (name := names.pop()) or name not in {each.arg for each in passes.args.args}:
        return False
    used = [each for each in nodes_of(passes) if isinstance(each, ast.Name) and each.id == name]
    is_set = any(not isinstance(each.ctx, ast.Load) for each in used)
    if is_set or name in {changed for node in nodes_of(passes) for changed in changed_by(node)}:
        return False
    arguments = {argument for call in calls for argument in call.args}
    return all(each in arguments or is_read(each) for each in used)
