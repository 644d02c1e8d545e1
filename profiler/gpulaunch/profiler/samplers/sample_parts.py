"""Which numbers of a program tell the ranks and the workers of a DataLoader apart, by the words of its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.record.line_calls import OTHER_PARTS, OTHER_RANKS, OTHER_WORKERS
from gpulaunch.profiler.samplers.function_bodies import inits_of
from gpulaunch.profiler.samplers.loops import calls_in, last_name, word_of
from gpulaunch.profiler.samplers.rank_slices import RANK_WORDS
from gpulaunch.profiler.samplers.syntax import assigned_in, nodes_of, words_in

_WORKER_INFO: Final = "get_worker_info"
_ARITHMETIC: Final = (
    *(ast.BinOp, ast.operator, ast.Name, ast.Attribute, ast.Constant, ast.expr_context, ast.IfExp, ast.Compare),
    *(ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.Call),
)
"""What the number of a part is computed by."""
_GIVE_NUMBERS: Final = frozenset({"get_rank", "get_world_size", "int", "len", _WORKER_INFO})


class Parts:
    """The numbers of a file."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = nodes_of(tree)
        given = list(_given(tree))
        # `rank=0`, which the file gives no other value: all may be of one rank
        unknown = _defaults(tree) - {name for name, value in given if not isinstance(value, ast.Constant)}
        self._of_ranks, self._of_workers, self._infos = RANK_WORDS - unknown, {"worker_id"} - unknown, set[str]()
        given += [(word_of(target), value) for target, value in assigned_in(nodes)]
        for _ in range(3):  # `info = get_worker_info()`, `shard = rank * workers + info.id`, `Texts(shard=shard)`
            for name, value in given:
                if isinstance(value, ast.Call) and last_name(value) == _WORKER_INFO:
                    self._infos.add(name)
                elif _is_number(value) and name not in unknown:
                    by_rank, by_worker = self._parts(value)
                    self._of_ranks |= {name} if by_rank else set()
                    self._of_workers |= {name} if by_worker else set()

    def whose(self, number: ast.expr) -> str:
        """Whose samples a number that is compared with this one leaves out; empty: it is of no part."""
        match self._parts(number):
            case True, True:
                return OTHER_PARTS
            case by_rank, by_worker:
                return OTHER_RANKS if by_rank else OTHER_WORKERS if by_worker else ""

    def _parts(self, number: ast.expr) -> tuple[bool, bool]:
        """Whether a number is computed from that of a rank, and from that of a worker."""
        words = words_in(number) - {""}
        ids = (node.value for node in nodes_of(number) if isinstance(node, ast.Attribute) and node.attr == "id")
        of_worker = any(word_of(each) in self._infos or _WORKER_INFO in words_in(each) for each in ids)
        return not words.isdisjoint(self._of_ranks), of_worker or not words.isdisjoint(self._of_workers)


def _given(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The arguments with which a file calls functions by name, and makes objects of its classes."""
    classes = {node.name: node for node in nodes_of(tree) if isinstance(node, ast.ClassDef)}
    for call in calls_in(tree):
        yield from ((each.arg, each.value) for each in call.keywords if each.arg)
        for init in inits_of(classes[last_name(call)]) if last_name(call) in classes else ():
            yield from ((each.arg, value) for each, value in zip(init.args.args[1:], call.args, strict=False))


def _defaults(tree: ast.Module) -> set[str]:
    """The arguments that are numbers if they are not given."""
    found = set[str]()
    for each in (node.args for node in nodes_of(tree) if isinstance(node, ast.FunctionDef)):
        last = [
            *zip(reversed(each.args), reversed(each.defaults), strict=False),
            *zip(each.kwonlyargs, each.kw_defaults, strict=True),
        ]
        found |= {name.arg for name, value in last if isinstance(value, ast.Constant) and value.value is not None}
    return found


def _is_number(value: ast.expr) -> bool:
    calls = set(map(last_name, calls_in(value)))
    return calls <= _GIVE_NUMBERS and all(isinstance(node, _ARITHMETIC) for node in nodes_of(value))
