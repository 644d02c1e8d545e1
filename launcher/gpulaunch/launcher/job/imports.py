"""The packages that a script names in its import statements, read from its syntax tree; nothing is run."""

from __future__ import annotations

import sys

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
    names: dict[str, None] = {}
    statements: list[ast.stmt] = list(reversed(tree.body))
    while statements:
        statement = statements.pop()
        if isinstance(statement, ast.Import):
            names.update((alias.name.partition(".")[0], None) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            names[statement.module.partition(".")[0]] = None
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            statements.extend(reversed(statement.orelse))
        elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = [child for child in ast.walk(statement) if isinstance(child, (ast.Import, ast.ImportFrom))]
            statements.extend(reversed(inner))
    return [name for name in names if _is_third_party(name)]


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
