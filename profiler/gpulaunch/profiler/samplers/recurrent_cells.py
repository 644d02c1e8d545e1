"""Finds in the source of a program loops that call an LSTM cell for one element of a sequence after the other, although
all of the sequence is known before: `nn.LSTM` takes it at once.

Not where a turn does anything else with the state than to call the cell, such as dropout or a mask, or where the input
of a turn depends on it, as in a decoder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpulaunch.profiler.samplers.function_bodies import is_set
from gpulaunch.profiler.samplers.loop_turns import computed_from
from gpulaunch.profiler.samplers.loops import calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import dotted, names_in, nodes_of

_CELL = "LSTMCell"
_Ends = ast.Break | ast.Continue | ast.Return


def lines_of_cells(tree: ast.Module) -> set[int]:
    """Return the lines on which such a loop calls the cell.

    Args:
        tree: of a file.
    """
    cells = {
        dotted(target)
        for node in nodes_of(tree)
        if isinstance(node, ast.Assign) and any(last_name(call) == _CELL for call in calls_in(node.value))
        for target in node.targets
    } - {""}
    if not cells:
        return set()
    return {line for node in nodes_of(tree) if isinstance(node, ast.For) for line in _calls(node, cells)}


def _calls(loop: ast.For, cells: set[str]) -> Iterator[int]:
    statements = [node for part in loop.body for node in nodes_of(part) if isinstance(node, ast.stmt)]
    if any(isinstance(node, _Ends) for node in statements):
        return
    for statement in statements:
        match statement:
            case ast.Assign(targets=[target], value=ast.Call(func=function, args=[given, state])):
                if dotted(function) in cells and _is_all_that_it_does(statements, statement, names_in(target), state):
                    state_names = names_in(target)
                    depends = state_names | computed_from(state_names, statements)
                    if depends.isdisjoint(names_in(given)):
                        yield from lines_of(statement)
            case _:
                pass


def _is_all_that_it_does(statements: list[ast.stmt], call: ast.stmt, state: set[str], given: ast.expr) -> bool:
    """Whether only the call sets the state, to what it is given the next time."""
    others = (node for each in statements if each is not call for node in nodes_of(each))
    is_changed = any(isinstance(node, ast.Name) and node.id in state and is_set(node) for node in others)
    return not is_changed and names_in(given) <= state
