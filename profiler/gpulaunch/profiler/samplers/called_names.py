"""The names of the functions that a program calls, as its source tells them: `np.linalg.svd` is `numpy.linalg.svd`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Final

from gpulaunch.profiler.samplers.syntax import nodes_of

_BUILTINS: Final = frozenset({"sorted", "open", "eval", "exec", "compile"})
"""Builtin functions that take time of their own; `sum` or `print` may well be given tensors, and wait for a GPU."""
_GENERATORS: Final = {
    "numpy.random.default_rng": "numpy.random",
    "numpy.random.RandomState": "numpy.random",
    "random.Random": "random",
}
"""What makes a random generator, and the module whose functions its methods are like."""


def called_name(call: ast.Call, modules: Mapping[str, str]) -> str:
    """Return the function that is called; empty: it is of no module that is known, and no slow builtin.

    Args:
        call: the call.
        modules: names of the file, also of attributes (`self.rng`), and the modules that they stand for.
    """
    attributes: list[str] = []
    named = call.func
    while isinstance(named, ast.Attribute):
        attributes.insert(0, named.attr)
        named = named.value
    if not isinstance(named, ast.Name):
        return ""
    if (of := ".".join([named.id, *attributes[:-1]])) in modules and attributes:
        return f"{modules[of]}.{attributes[-1]}"
    if named.id in modules:
        return ".".join([modules[named.id], *attributes])
    return f"builtins.{named.id}" if not attributes and named.id in _BUILTINS else ""


def generators_of(tree: ast.Module, imported: Mapping[str, str]) -> dict[str, str]:
    """The names, such as `self.rng`, of what a file makes as a random generator, or gives another name, and the module
    whose functions its methods are like."""
    assigned = [*_assigned(tree)]
    found: dict[str, str] = {}
    for name, value in assigned:
        if isinstance(value, ast.Call) and (called := called_name(value, imported)) in _GENERATORS:
            found[ast.unparse(name)] = _GENERATORS[called]
    renamed = [(name, value.id) for name, value in assigned if isinstance(value, ast.Name)]
    return found | {ast.unparse(name): found[of] for name, of in renamed if of in found}


def _assigned(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """All names and attributes to which a file assigns something, and what; each of several at once."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value
