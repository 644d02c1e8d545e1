"""The packages that a script names in its import statements, read from its syntax tree; nothing is run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast

# Already loaded by the fork server, or not a package of anybody else's.
_NOT_WORTH_NAMING = frozenset({"torch", "gpulaunch", "__future__", "__main__"})


def imports_of(script_path: str) -> list[str]:
    """Top-level third-party packages that the script imports when it is loaded, in the order of the statements.

    Imports inside functions count too late to be worth preloading, and those under `if TYPE_CHECKING` never happen;
    both are left out. So are packages that are not installed and modules that lie beside the script: the user's own
    code is never imported ahead. A script that cannot be read or parsed gives an empty list: the ranks will say why.
    """
    import ast  # only when a job is being prepared

    try:
        with open(script_path, "rb") as file:
            tree = ast.parse(file.read(), script_path)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # the parser gives up with the last two on sources that are deeply nested
    names = dict.fromkeys(name.partition(".")[0] for name in _imported(tree.body))
    return [name for name in names if _is_third_party(name)]


def _imported(statements: list[ast.stmt]) -> Iterator[str]:
    import ast

    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            if statement.level == 0 and statement.module:
                yield statement.module
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _imported(statement.orelse)
        else:  # if, try, with, for, match: whatever holds statements
            for child in ast.iter_child_nodes(statement):
                inner = getattr(child, "body", None)  # of an `except` or a `case`
                yield from _imported(
                    [child] if isinstance(child, ast.stmt) else inner if isinstance(inner, list) else []
                )


def _is_third_party(name: str) -> bool:
    """Installed in a site directory: neither the standard library nor the user's own tree."""
    if name in sys.stdlib_module_names or name in _NOT_WORTH_NAMING or name.startswith("_"):
        return False
    from importlib.machinery import PathFinder

    try:
        # A plain path search over the site directories: nothing is imported, and sys.path[0] cannot interfere.
        spec = PathFinder.find_spec(name, [path for path in sys.path if _is_site(path)])
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _is_site(path: str) -> bool:
    return path.rstrip("/").endswith(("site-packages", "dist-packages"))
