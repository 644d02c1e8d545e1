"""Parses the program's source to find the call at a frame's instruction: once for each line in question."""

from __future__ import annotations

import ast
import itertools
import os
from types import CodeType
from typing import Final

_LONGEST_TEXT_BYTES: Final = 500_000


def parsed(code: CodeType) -> tuple[ast.Module, int]:
    """The syntax tree of a function or a module, and the offset of its line numbers.

    Raises:
        OSError, SyntaxError, ValueError, IndexError, RecursionError: it is missing, or is not the running code:
            "<stdin>", a lambda within a line, a file that has changed.
    """
    if not os.path.isfile(code.co_filename) or os.path.getsize(code.co_filename) > _LONGEST_TEXT_BYTES:
        raise ValueError(code.co_filename)  # reading a pipe from which the program was read would block forever
    with open(code.co_filename, encoding="utf-8") as file:
        lines = file.readlines()
    if code.co_name == "<module>":
        return ast.parse("".join(lines)), 0
    first = code.co_firstlineno
    text = "".join(lines[first - 1 : _last_line(code)])
    if text[:1].isspace():  # a method, or a function within a function; columns stay what they are
        return ast.parse("if True:\n" + text), first - 2
    return ast.parse(text), first - 1


def call_under_way(code: CodeType, last: int, tree: ast.Module, added: int) -> ast.Call | None:
    """The call from which a frame of this code at instruction `last` has not returned: it has a unique end position."""
    position = next(itertools.islice(code.co_positions(), last // 2, None), None)
    if position is None or position[1] is None:  # the latter with `python -X no_debug_ranges`
        return None
    end = position[1] - added, position[3]
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return next((call for call in calls if (call.end_lineno, call.end_col_offset) == end), None)


def _last_line(code: CodeType) -> int:
    """Where a function's text ends, functions within it included."""
    own = max(end_line or 0 for _, end_line, _, _ in code.co_positions())
    return max(own, *(_last_line(inner) for inner in code.co_consts if isinstance(inner, CodeType)), 0)
