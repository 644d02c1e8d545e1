"""Changes the keyword arguments of a call in the source of a program, and shows that as a unified diff.

Nothing is written, imported or run. A change that cannot be shown for certain is not shown at all: whether the result
says what it should, and nothing else, is read from the result itself.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import re
import tokenize
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gpulaunch.profiler.files import read_file

_NEEDED: Final = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
"""What does more than give a value: the code around may rely on it, so a value with one in it is not replaced."""
_LINE_END: Final = re.compile(rb"\r\n|\r|\n")
"""As Python counts lines; str.splitlines also ends them at a form feed."""
_MARK: Final = re.compile(rb"#[^\r\n]*|[),]")
"""What may stand between an argument and the end of its call; what a comment has in it does not count."""
_UNREADABLE: Final = (ValueError, SyntaxError, RecursionError, MemoryError)


@dataclass(frozen=True)
class IfGiven:
    """The value of an argument, for a call that has this argument."""

    value: object


CallChange = tuple[int, str, Mapping[str, object], Sequence[str]]
"""Line, callee, arguments and positions, as `patched` takes them."""
_Edit = tuple[int, int, str]  # start and end in the bytes of the source, and what comes in their place


def patched(
    source: str, line: int, callee: str, arguments: Mapping[str, object], positions: Sequence[str] = ()
) -> str | None:
    """Return the source with the keyword arguments of one call changed or added; all else stays byte for byte.

    Args:
        source: of a module.
        line: any line of the call, from 1.
        callee: the last name of what is called, `DataLoader`; an import of the source may give it another.
        arguments: the values, each True, False, None or an int, float or str, or one of these `IfGiven`.
        positions: names of the parameters in order, without self: what is given by position is replaced in its place.
            Positional arguments beyond these are taken to be none of `arguments`.

    Returns:
        None if it cannot be shown: not exactly one such call covers the line (none in an f-string), `*args` or
        `**kwargs` may have the value, the old one is needed elsewhere (`:=`), or something cannot be parsed.
    """
    return patched_all(source, [(line, callee, arguments, positions)])


def patched_all(source: str, changes: Sequence[CallChange]) -> str | None:
    """Return the source with several calls changed, or None if one of the changes cannot be shown.

    All lines are those of the source as given. Changes of one call are joined; of one argument, the last counts.
    """
    with contextlib.suppress(*_UNREADABLE):
        tree = _parsed(source)
        wanted: dict[ast.Call, tuple[dict[str, object], Sequence[str]]] = {}
        for line, callee, arguments, positions in changes:
            call = _call_at(tree, line, callee)
            new, known = wanted.get(call, ({}, ()))
            wanted[call] = {**new, **arguments}, max(known, positions, key=len)
        data = source.encode()
        starts = [0, *(each.end() for each in _LINE_END.finditer(data))]
        edits = [edit for call, (new, known) in wanted.items() for edit in _edits(data, starts, call, new, known)]
        edits.sort(key=lambda edit: edit[0])  # stable: of two in one place, the first stays the first
        if any(end > start for (_, end, _), (start, _, _) in pairwise(edits)):  # one replaces what another changes
            return None
        for start, end, text in reversed(edits):
            data = data[:start] + text.encode() + data[end:]
        if ast.dump(_parsed(data.decode())) == ast.dump(tree):  # which `_edits` has made what the text should be
            return data.decode()
    return None


def diff_of(
    path: str,
    line: int,
    callee: str,
    arguments: Mapping[str, object],
    positions: Sequence[str] = (),
    shown_as: str | None = None,
) -> str:
    """Return the change of one call as a unified diff; "" if it cannot be shown, or changes nothing. See `patched`.

    Args:
        path: a regular file of at most 1 MiB.
        shown_as: the path that the diff names; by default the file's own.
    """
    before = read_source(path)
    after = patched(before, line, callee, arguments, positions)
    return "" if after is None else diff_of_source(before, after, path if shown_as is None else shown_as)


def read_source(path: str) -> str:
    """Return the text of a Python file; "" if it cannot be read."""
    try:
        data = read_file(path, most_bytes=1 << 20)
        # Not tokenize.open, which reads CRLF as LF.
        return data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])
    except (OSError, *_UNREADABLE):
        return ""


def diff_of_source(before: str, after: str, shown_as: str) -> str:
    """Return a unified diff that `git apply` and `patch -p1` take; "" if nothing differs."""
    name = shown_as.lstrip("/")
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (before, after))  # as those tools count: by LF alone
    end = "\t" if " " in name else ""  # as git does, for `patch`
    diff = difflib.unified_diff(old, new, f"a/{name}{end}", f"b/{name}{end}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff)


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes: they are shown when the program runs
        return ast.parse(source)


def _call_at(tree: ast.Module, line: int, callee: str) -> ast.Call:
    """The one call of that name which covers the line. Raises ValueError."""
    everything = [*ast.walk(tree)]
    names: dict[str, set[str]] = {}
    for node in everything:
        for each in node.names if isinstance(node, ast.ImportFrom) else ():
            names.setdefault(each.asname or each.name, set()).add(each.name)
    here = [node for node in everything if isinstance(node, ast.Call) and _is_of(node, callee, names)]
    here = [call for call in here if call.lineno <= line <= (call.end_lineno or 0)]
    # Python 3.11 misplaces what is in f-strings.
    inside = {each for string in everything if isinstance(string, ast.JoinedStr) for each in ast.walk(string)}
    if len(here) != 1 or here[0] in inside:
        raise ValueError("not one such call")
    return here[0]


def _is_of(call: ast.Call, callee: str, names: Mapping[str, set[str]]) -> bool:
    called = call.func.value if isinstance(call.func, ast.Subscript) else call.func  # `DataLoader[int](...)`
    if isinstance(called, ast.Attribute):
        return called.attr == callee
    return isinstance(called, ast.Name) and callee in names.get(called.id, {called.id})


def _edits(
    data: bytes, starts: Sequence[int], call: ast.Call, arguments: Mapping[str, object], positions: Sequence[str]
) -> list[_Edit]:
    """What to change in the text for one call; changes its tree, too. Raises ValueError."""
    given = {each.arg: each for each in call.keywords}
    if None in given or len(given) < len(call.keywords) or any(isinstance(each, ast.Starred) for each in call.args):
        raise ValueError("what the call is given cannot be told")
    by_position = dict(zip(positions, range(len(call.args)), strict=False))
    edits: list[_Edit] = []
    added: dict[str, ast.expr] = {}
    for name, value in arguments.items():
        if isinstance(value, IfGiven):
            if name not in given and name not in by_position:
                continue
            value = value.value
        if type(value) not in (bool, int, float, str, type(None)):
            raise ValueError("not a plain value")
        new = ast.parse(text := repr(value), mode="eval").body
        ast.literal_eval(new)  # ValueError for infinity, which is not what its repr says
        if name in given:
            old, given[name].value = given[name].value, new
        elif name in by_position:
            old, call.args[by_position[name]] = call.args[by_position[name]], new
        else:
            added[name] = new
            continue
        ast.copy_location(new, old)
        if any(isinstance(each, _NEEDED) for each in ast.walk(old)):
            raise ValueError("the value is needed")
        if ast.dump(old) != ast.dump(new):
            edits.append((*_span(starts, old), text))
    if added:
        edits += _additions(data, starts, call, [f"{name}={arguments[name]!r}" for name in added])
        call.keywords += [ast.keyword(name, new) for name, new in added.items()]
    return edits


def _span(starts: Sequence[int], node: ast.expr | ast.keyword) -> tuple[int, int]:
    return starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)


def _additions(data: bytes, starts: Sequence[int], call: ast.Call, new: Sequence[str]) -> list[_Edit]:
    """Put arguments after the last: on its line if the closing parenthesis is there, else on lines of their own."""
    close = _span(starts, call)[1] - 1
    given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if not given:
        return [(close, close, ", ".join(new))]
    end = last = _span(starts, given[-1])[1]
    for mark in _MARK.finditer(data, end, close):
        if mark[0] in (b")", b","):
            last = mark.end()
            end = last if mark[0] == b")" else end  # a parenthesis around the argument
    if not (line_end := _LINE_END.search(data, last, close)):
        return [(end, end, "".join(f", {each}" for each in new))]
    beside = next(each for each in given if each.lineno == given[-1].lineno)
    indent = re.sub(r"[^ \t]", " ", data[starts[beside.lineno - 1] : _span(starts, beside)[0]].decode())
    lines = ",".join(f"{line_end[0].decode()}{indent}{each}" for each in new)
    before, after = ("", ",") if last > end else (",", "")
    return [(end, end, before), (line_end.start(), line_end.start(), lines + after)]
