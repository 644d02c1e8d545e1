"""Finds in the source of a program what each rank computes for all ranks, to keep only its own part.

    pictures = augment(pictures[rows])
    yield pictures[rank::world_size], labels[rows[rank::world_size]]

Only what is computed of samples whose indices are sliced by the rank, too, or what a list comprehension computes: each
of them is used alone then. What is drawn, sorted or gathered needs all elements.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import is_set, statements_in
from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of, word_of
from gpulaunch.profiler.samplers.syntax import assigned_in, names_in, nodes_of, words_in
from gpulaunch.profiler.samplers.tensor_functions import NUMBERS, ROOM, SHAPES, VIEWS

RANK_WORDS: Final = frozenset({"rank", "local_rank", "global_rank", "world_rank", "get_rank", "RANK", "process_index"})
_DISTRIBUTED: Final = frozenset({"init_process_group", "get_rank", "process_index", "RANK", "LOCAL_RANK"})
_OF_ALL: Final = re.compile(
    r"\w*(?:rand|shuffle|sample|draw|multinomial|choice|perm|sort|topk|unique|cumsum|balance|pack|group|gather|reduce"
    r"|broadcast|scatter|all_to_all|load|read|recv)\w*"
)
"""Words of functions that need all elements, or of which each rank has to make the same calls."""
_COUNTS: Final = (
    *(ast.BinOp, ast.operator, ast.Name, ast.Attribute, ast.Constant, ast.expr_context, ast.Slice, ast.UnaryOp),
    ast.unaryop,
)
"""What a part of all is given by."""
_GIVE_COUNTS: Final = frozenset({"slice", "get_rank", "get_world_size", "len", "int"})


def lines_for_all_ranks(tree: ast.Module) -> set[int]:
    """Return the lines of statements that compute what only a slice by the rank is read of.

    Args:
        tree: of a file.
    """
    texts = {node.value for node in nodes_of(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    if _DISTRIBUTED.isdisjoint(words_in(tree) | texts):
        return set()  # the rank of a matrix
    of_rank = _words_of_rank(tree)
    functions = (node for node in nodes_of(tree) if isinstance(node, Function))
    return {line for each in (tree, *functions) for line in _lines_in(each, of_rank)}


def _words_of_rank(tree: ast.Module) -> set[str]:
    """The names of the rank, and of slices and numbers that are computed from it alone: `self.mine`."""
    found = set(RANK_WORDS)
    assigned = list(assigned_in(nodes_of(tree)))
    for _ in range(2):  # `first = rank * 32`, `mine = slice(first, first + 32)`
        found.update(word_of(target) for target, value in assigned if _is_part_of(value, found))
    return found - {""}


def _is_part_of(value: ast.expr, of_rank: set[str]) -> bool:
    """Whether it is a number or a slice that is computed from the rank."""
    calls = set(map(last_name, calls_in(value)))
    is_counted = all(isinstance(node, (*_COUNTS, ast.Call)) for node in nodes_of(value)) and calls <= _GIVE_COUNTS
    return is_counted and not of_rank.isdisjoint(words_in(value))


def _lines_in(scope: ast.AST, of_rank: set[str]) -> set[int]:
    nodes = nodes_of(scope)
    slices = [node for node in nodes if isinstance(node, ast.Subscript) and _is_slice(node.slice, of_rank)]
    kept = [each.value for each in slices if isinstance(each.value, ast.Name)]
    rows = {each.id for each in kept} | {name for each in slices for name in _indices_in(each.value)}
    found = set[int]()
    statements = list(statements_in(getattr(scope, "body", []))) if kept else []
    for at, statement in enumerate(statements):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _computes(value):
                reads = _reads_of(name, nodes)
                following = next((each for each in statements[at + 1 :] if name in names_in(each)), None)
                if isinstance(following, ast.Assign) and name in {word_of(each) for each in following.targets}:
                    reads = _reads_of(name, nodes_of(following))  # `x = x[mine]`: from there on it is another one
                is_alone = _is_one_by_one(value) or not rows.isdisjoint(_indices_in(value))
                if reads and is_alone and all(each in kept for each in reads):
                    found.update(lines_of(statement))
            case _:
                pass
    return found


def _is_one_by_one(value: ast.expr) -> bool:
    """Whether it is a list whose elements are computed each by itself: `[build(molecules[i]) for i in chosen]`."""
    return isinstance(value, ast.ListComp) and not any(each.ifs for each in value.generators)


def _indices_in(value: ast.expr) -> set[str]:
    """`rows` of `self.pictures[rows]`."""
    parts = (node.slice for node in nodes_of(value) if isinstance(node, ast.Subscript))
    return {each.id for each in parts if isinstance(each, ast.Name)}


def _reads_of(name: str, nodes: Iterable[ast.AST]) -> list[ast.Name]:
    return [each for each in nodes if isinstance(each, ast.Name) and each.id == name and not is_set(each)]


def _is_slice(index: ast.expr, of_rank: set[str]) -> bool:
    if isinstance(index, ast.Tuple):
        return bool(index.elts) and _is_slice(index.elts[0], of_rank)
    match index:
        case ast.Slice(lower=ast.expr() as first, upper=upper, step=step):
            return (upper is not None or step is not None) and _is_part_of(first, of_rank)
        case ast.Name() | ast.Attribute():
            return word_of(index) not in RANK_WORDS and _is_part_of(index, of_rank)
        case _:
            return False


def _computes(value: ast.expr) -> bool:
    """Whether an expression computes something for each element, which needs no other one, as far as it says so."""
    names = [last_name(call) for call in calls_in(value)]
    return any(name not in VIEWS | SHAPES | ROOM | NUMBERS for name in names) and not any(map(_OF_ALL.fullmatch, names))
