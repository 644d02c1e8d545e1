"""Reads in the source of a loop whether a turn needs what the one before has computed."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import Final

from gpulaunch.profiler.samplers.syntax import dotted, nodes_of

Loop = ast.For | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

_COUNTS: Final = (ast.Name, ast.Constant, ast.BinOp, ast.Add, ast.Sub, ast.expr_context)
"""What a position is made of."""
_SUMS: Final = (ast.Add, ast.Sub, ast.Mult)
"""What may be done with all at once, in any order."""
_GROWS: Final = frozenset({"append", "extend", "insert", "appendleft"})


def turns_need_each_other(loop: Loop) -> bool:
    """Whether a turn needs what the one before has computed, such as the state of a recurrent network: it reads what it
    has not set before, and the loop sets or changes that. A sum (`total = total + loss`) that nothing else reads can be
    taken of all at once."""
    targets = [loop.target] if isinstance(loop, ast.For) else [each.target for each in loop.generators]
    elements = {name.id for target in targets for name in _names(target)}
    turn = _Turn(elements)
    if isinstance(loop, ast.For):
        turn.run(loop.body, set(elements))
    else:
        turn.read([*parts_of(loop), *(each for made in loop.generators for each in made.ifs)], set(elements))
    return turn.needs_another(_positions(loop))


def _positions(loop: Loop) -> set[str]:
    """Names that only say where the elements of a turn begin or end, such as `start` of `scores[start : start + size]`
    and `start += size`: the turns need each other to count, not to compute."""
    nodes = nodes_of(loop)
    made: dict[str, list[ast.expr]] = {}
    times_set = Counter(name.id for name in nodes if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                made.setdefault(name, []).append(value)
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                made.setdefault(name, []).append(value)
            case _:
                pass
    found = {
        name
        for name, values in made.items()
        if len(values) == times_set[name] and all(isinstance(each, _COUNTS) for of in values for each in nodes_of(of))
    }
    indices = {id(name) for node in nodes if isinstance(node, ast.Subscript) for name in _names(node.slice)}
    loads = [name for name in nodes if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)]
    while True:
        counted = {id(name) for of in found for value in made[of] for name in _names(value)}
        wrong = {name.id for name in loads if id(name) not in indices | counted}
        computed = computed_from(found, nodes)
        wrong |= {of for of in found if any(name.id in computed for value in made[of] for name in _names(value))}
        if not found & wrong:
            return found
        found -= wrong


def computed_from(positions: Set[str], nodes: Iterable[ast.AST]) -> set[str]:
    """Other names whose values in a turn depend on these: an element at a position, and what is made of it."""
    reads: dict[str, set[str]] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                targets = [target]
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.For(target=target, iter=value):
                targets = [target]
            case _:
                continue
        for target in targets:
            for name in _names(target):
                reads.setdefault(name.id, set()).update(each.id for each in _names(value))
    found: set[str] = set()
    while more := {name for name, of in reads.items() if of & (positions | found)} - found - positions:
        found |= more
    return found


def parts_of(loop: Loop) -> list[ast.AST]:
    """What a loop does in each turn: its body, or what a comprehension is made of."""
    match loop:
        case ast.For(body=body):
            return [*body]
        case ast.DictComp(key=key, value=value):
            return [key, value]
        case _:
            return [loop.elt]


class _Turn:
    """What one turn of a loop needs of those before it, and what it changes for those after it.

    Both by name: `h`, `self.h`, and `out[i]` if `i` is of the loop, as that is another one in each turn.
    """

    def __init__(self, elements: set[str]) -> None:
        self._elements = elements
        self._needed: set[str] = set()
        self._changed: set[str] = set()

    def needs_another(self, positions: Set[str]) -> bool:
        """Whether it needs one, other than for these names."""
        needed = self._needed - positions
        return any(_share(changed, each) for changed in self._changed for each in needed)

    def run(self, statements: Iterable[ast.stmt], fresh: set[str]) -> None:
        """Go through statements in their order.

        Args:
            statements: of the loop, or of one in it.
            fresh: names that this turn has set; those that are set now in any case are added.
        """
        for statement in statements:
            self._run(statement, fresh)

    def _run(self, statement: ast.AST, fresh: set[str]) -> None:
        match statement:
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value, fresh)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign([target], value, fresh)
            case ast.AugAssign(target=target, op=op, value=value):
                if not isinstance(op, _SUMS):
                    self._need(self._place(target), fresh)
                self._sum(target, [value], fresh)
            case ast.If(test=test, body=body, orelse=otherwise):
                self.read([test], fresh)
                ends = set(fresh), set(fresh)
                self.run(body, ends[0])
                self.run(otherwise, ends[1])
                fresh |= ends[0] & ends[1]
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=whole, attr=method))) if method not in _GROWS:
                self.read([statement.value], fresh)
                self._change(self._place(whole), fresh)  # it is called for what it does
            case ast.With(items=items, body=body):
                self.read([each.context_expr for each in items], fresh)
                for each in items:
                    self._set(each.optional_vars, fresh)
                self.run(body, fresh)
            case _:
                self._run_in_part(statement, fresh)

    def _run_in_part(self, statement: ast.AST, fresh: set[str]) -> None:
        """Go through a statement whose parts may not run: what they set is not set after it."""
        inner = set(fresh)
        if isinstance(statement, ast.For | ast.AsyncFor):
            self.read([statement.iter], fresh)
            self._set(statement.target, inner)
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.stmt):
                self._run(part, inner)
            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                self._run_in_part(part, fresh)
            elif part is not getattr(statement, "target", None):
                self.read([part], fresh)

    def _assign(self, targets: list[ast.expr], value: ast.expr, fresh: set[str]) -> None:
        terms = _terms_beside(targets[0], value) if len(targets) == 1 else None
        if terms is not None:
            self._sum(targets[0], terms, fresh)
            return
        self.read([value], fresh)
        for target in targets:
            self._set(target, fresh)

    def _sum(self, target: ast.expr, terms: list[ast.expr], fresh: set[str]) -> None:
        self.read([*terms, *_indices(target)], fresh)
        if not all(isinstance(term, ast.Constant) for term in terms):  # else it counts the turns
            self._change(self._place(target), fresh)

    def _set(self, target: ast.expr | None, fresh: set[str]) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._set(each, fresh)
        elif target is not None:
            self.read(_indices(target), fresh)
            self._change(self._place(target), fresh)
            fresh.add(dotted(target))

    def read(self, expressions: Iterable[ast.AST], fresh: set[str]) -> None:
        """Go through expressions.

        Args:
            expressions: they read names, and may call what changes them.
            fresh: as of `run`.
        """
        for node in expressions:
            self._read(node, fresh)

    def _read(self, node: ast.AST, fresh: set[str]) -> None:
        if name := dotted(node) or self._own(node):
            self._need(name, fresh)
            self.read(_indices(node), fresh)
            return
        match node:
            case ast.Call(func=func, args=arguments, keywords=keywords):
                self.read([*arguments, *(each.value for each in keywords)], fresh)
                self._call(func, fresh)
                for each in keywords:
                    if each.arg == "out":
                        self._change(self._place(each.value), fresh)
            case ast.NamedExpr(target=target, value=value):
                self._read(value, fresh)
                self._set(target, fresh)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                own = fresh | {name.id for each in node.generators for name in _names(each.target)}
                self.read([*node.generators, *parts_of(node)], own)
            case ast.Lambda(args=arguments, body=body):
                self._read(body, fresh | {each.arg for each in nodes_of(arguments) if isinstance(each, ast.arg)})
            case _:
                self.read(ast.iter_child_nodes(node), fresh)

    def _call(self, function: ast.expr, fresh: set[str]) -> None:
        """Go through what is called: a method may read all of its object, and `add_` and the like change it."""
        if not isinstance(function, ast.Attribute):
            self._read(function, fresh)
            return
        place, method = self._place(function.value), function.attr
        if method in _GROWS:
            self.read(_indices(function.value), fresh)
        else:
            self._read(function.value, fresh)
        if method in _GROWS or (method.endswith("_") and not method.endswith("__")):
            self._change(place, fresh)

    def _need(self, place: str, fresh: set[str]) -> None:
        if place and not _is_known(place, fresh):
            self._needed.add(place)

    def _change(self, place: str, fresh: set[str]) -> None:
        if place and not _is_known(place, fresh):
            self._changed.add(place)

    def _place(self, node: ast.AST) -> str:
        """The name of what a term is, or is a part or a result of; empty: it has none."""
        if name := dotted(node) or self._own(node):
            return name
        match node:
            case (
                ast.Attribute(value=whole)
                | ast.Subscript(value=whole)
                | ast.Starred(value=whole)
                | ast.Call(func=ast.Attribute(value=whole))
            ):
                return self._place(whole)
            case _:
                return ""

    def _own(self, node: ast.AST) -> str:
        """`out[i]`, if `i` is of the loop; empty: it is no such element."""
        if not isinstance(node, ast.Subscript) or not dotted(node.value):
            return ""
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        is_own = any(isinstance(each, ast.Name) and each.id in self._elements for each in indices)
        return ast.unparse(node) if is_own else ""


def _terms_beside(target: ast.expr, value: ast.expr) -> list[ast.expr] | None:
    """The other terms of `total + loss` and `loss + total`, or factors; None: it is no sum with the total."""
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, _SUMS):
        return None
    alike = (ast.Mult,) if isinstance(value.op, ast.Mult) else (ast.Add, ast.Sub)
    terms: list[ast.expr] = []
    rest: ast.expr = value
    while isinstance(rest, ast.BinOp) and isinstance(rest.op, alike):
        terms.append(rest.right)
        rest = rest.left
    total = ast.unparse(target)
    if ast.unparse(rest) == total:
        return terms
    is_last = not isinstance(value.op, ast.Sub) and ast.unparse(value.right) == total
    return [*terms[1:], rest] if is_last else None


def _indices(node: ast.AST) -> list[ast.expr]:
    return [each.slice for each in nodes_of(node) if isinstance(each, ast.Subscript)]


def _share(changed: str, needed: str) -> bool:
    """Whether two names are of the same, or of a whole and a part of it."""
    if "[" in changed and changed == needed:
        return False
    one, other = f"{changed.partition('[')[0]}.", f"{needed.partition('[')[0]}."
    return one.startswith(other) or other.startswith(one)


def _is_known(place: str, fresh: set[str]) -> bool:
    """Whether a name, or the whole that it is a part of, is set."""
    return any(each and f"{place}.".startswith((f"{each}.", f"{each}[")) for each in fresh)


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in nodes_of(node) if isinstance(each, ast.Name))
