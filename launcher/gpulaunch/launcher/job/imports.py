"""Reads from a script's syntax tree what is needed to start it from a preloaded process: what it does before training.

Nothing is run. The fork server has imported torch by the time the script begins, so three things are extracted: the
packages it imports (they can be loaded once for all ranks), what it puts into the environment before it imports torch
(torch reads some of it at import time), and whether it has its own modules with a well-known name.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast

# Already loaded by the fork server, or not a third-party package.
_OURS = "gpulaunch.checkpoint"
_NOT_WORTH_NAMING = frozenset({"torch", "gpulaunch", "__future__", "__main__"})
# Read while torch, or a library it loads, is imported; variables read later can be set later.
_READ_AT_IMPORT = ("TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_", "NPY_", "KINETO_")
_READ_LATER = ("TORCH_NCCL_", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST", "TORCHELASTIC_")
# Loaded by the fork server and not removable for one program: if the user has a module of this name, ranks are spawned.
_HELD = ("torch", "numpy")
# Functions by which a program runs code that its own source does not name.
_RUNS_TEXT = frozenset({"__import__", "compile", "eval", "exec"})
_IMPORTS_OTHERS = frozenset({"code", "imp", "importlib", "pickle", "pkgutil", "runpy", "zipimport"})


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was found in a script."""

    packages: tuple[str, ...] = ()
    """Third-party packages that can be preloaded, in the order of their statements."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Variables that it sets, to constant texts, before its first third-party import."""
    defaults: frozenset[str] = frozenset()
    """Of these, those that it sets only if they are not set already."""
    before_torch: tuple[str, ...] = ()
    """Of the packages, those that it imports before torch."""
    trains: bool = True
    """Whether it may use torch. False: all its imports, anywhere in it, are of the standard library."""
    obstacle: str = ""
    """Why the ranks cannot start from a process that has already imported torch, or ""."""


def read_script(path: str) -> Reading:
    """Read a script; one that cannot be read or parsed, or is no regular file, gives nothing: its ranks will fail."""
    return _read([path], os.path.dirname(os.path.realpath(path)), "next to the script")


def read_module(name: str) -> Reading:
    """Read what `python -m NAME` runs: the parent packages of the module, then the module."""
    if _is_third_party(name.partition(".")[0], os.getcwd()):
        return Reading(packages=(name.partition(".")[0],), before_torch=(name.partition(".")[0],))
    return _read(files_of_module(name), os.getcwd(), "in the current directory")


def files_of_module(name: str) -> list[str]:
    """The files that `python -m NAME` executes, in order, by a path search that imports nothing."""
    *packages, last = name.split(".")
    for directory in (os.getcwd(), *sys.path):
        files: list[str] = []
        for package in packages:
            directory = os.path.join(directory, package)
            files.append(os.path.join(directory, "__init__.py"))
        base = os.path.join(directory, last)
        if os.path.isfile(f"{base}/__main__.py"):
            return [*filter(os.path.isfile, [*files, f"{base}/__init__.py"]), f"{base}/__main__.py"]
        if os.path.isfile(f"{base}.py"):
            return [*filter(os.path.isfile, files), f"{base}.py"]
    return []


def _read(paths: list[str], directory: str, where: str) -> Reading:
    """Read the files that are executed in order; `directory`: the first place where imports are searched."""
    import ast  # only when a job is being prepared

    reader = _Reader(directory)
    trains = False
    try:
        for path in paths:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return Reading()  # a pipe: reading it would take the data from the ranks
            with open(path, "rb") as file:
                tree = ast.parse(file.read(), path)
            for statement in tree.body:
                reader.read(statement)
            trains = trains or _may_import_others(tree)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return Reading()  # the parser raises the last two for deeply nested sources
    own = [name for name in _HELD if _in(reader.directory, name)]
    if own:
        reader.obstacle = f"there is a module {own[0]} {where}"
    return Reading(
        packages=tuple(dict.fromkeys(reader.packages)),
        environment=reader.environment,
        defaults=frozenset(reader.defaults),
        before_torch=tuple(dict.fromkeys(reader.before_torch)),
        trains=trains or not paths,
        obstacle=reader.obstacle,
    )


def imports_of(path: str) -> list[str]:
    """The packages that `read_script` finds."""
    return list(read_script(path).packages)


def preloaded(packages: Collection[str], refused: Collection[str] = (), *, trains: bool) -> list[str]:
    """What the fork server imports: torch and these packages, or nothing if the program needs neither.

    Args:
        packages: what is to be tried.
        refused: of these, what an earlier run found unfit.
        trains: `Reading.trains`.
    """
    torch = ["torch"] if trains or packages else []
    return [*torch, *(name for name in packages if name not in refused)]


def _may_import_others(tree: ast.Module) -> bool:
    """Whether any of its code, whenever run, imports from outside the standard library, or executes generated code."""
    import ast

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module if node.module and not node.level else "."]
        elif isinstance(node, ast.Name) and node.id in _RUNS_TEXT:
            return True
        else:
            continue
        tops = {name.partition(".")[0] for name in names}
        if tops & _IMPORTS_OTHERS or not tops <= sys.stdlib_module_names:
            return True
    return False


class _Reader:
    """Visits the statements that run when the script is loaded, in order."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.packages: list[str] = []
        self.environment: dict[str, str] = {}
        self.obstacle = ""
        self.defaults: set[str] = set()
        self.before_torch: list[str] = []
        self._torch = False
        self._imported = False  # something third-party, perhaps torch
        self._changed = False  # sys.path, or the environment after an import: later imports are left to the ranks

    def read(self, statement: ast.stmt, *, certain: bool = True, imports: bool = True) -> None:
        """Read one statement; `certain`: it runs unconditionally, once; `imports`: its imports take effect."""
        import ast

        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for name in _names(statement):
                self._import(name, wanted=imports)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            pass  # imports inside come too late to be worth preloading
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            for inner in statement.orelse:
                self.read(inner, certain=False, imports=imports)
        elif inner_statements := list(_inside(statement)):
            once = isinstance(statement, ast.With)
            fallbacks = [one for handler in getattr(statement, "handlers", ()) for one in handler.body]
            runs = once or _is_main(statement) or isinstance(statement, ast.Try)
            for inner in inner_statements:
                self.read(inner, certain=certain and once, imports=imports and runs and inner not in fallbacks)
        else:
            self._settings(statement, certain)

    def _import(self, name: str, *, wanted: bool) -> None:
        if name in sys.stdlib_module_names or name.startswith("_") or name == "gpulaunch":
            return
        third_party = name in _NOT_WORTH_NAMING or name == _OURS or _is_third_party(name, self.directory)
        # A user's module may import torch.
        self._imported = True
        if third_party and wanted and not self._changed and name not in _NOT_WORTH_NAMING:
            self.packages.append(name)
            if not self._torch:
                self.before_torch.append(name)
        self._torch |= name == "torch"

    def _settings(self, statement: ast.stmt, certain: bool) -> None:
        import ast

        for variable, value in _environment_changes(statement):
            if self._imported:
                self._changed = True
            elif value is not None and certain:
                if _is_default(statement) and variable not in self.environment:
                    self.defaults.add(variable)
                if not (_is_default(statement) and variable in self.environment):
                    self.environment[variable] = value
            elif variable.startswith(_READ_AT_IMPORT) and not variable.startswith(_READ_LATER):
                self.obstacle = f"the script computes os.environ[{variable!r}] before it imports torch"
        if any(
            isinstance(node, ast.Attribute) and node.attr == "path" and ast.unparse(node.value) == "sys"
            for node in ast.walk(statement)
        ):
            self._changed = True


def _names(statement: ast.Import | ast.ImportFrom) -> list[str]:
    import ast

    if isinstance(statement, ast.Import):
        return [_to_preload(alias.name) for alias in statement.names]
    return [_to_preload(statement.module)] if statement.level == 0 and statement.module else []


def _to_preload(module: str) -> str:
    """The package of a module; for gpulaunch, the part that imports most of torch."""
    return _OURS if module.startswith(_OURS) else module.partition(".")[0]


def _is_main(statement: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__":`."""
    import ast

    return isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test)


def _inside(statement: ast.stmt) -> Iterator[ast.stmt]:
    """The statements below an if, try, with, for or match."""
    import ast

    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            yield child
        else:
            inner = getattr(child, "body", None)  # of an `except` or a `case`
            yield from inner if isinstance(inner, list) else []


def _environment_changes(statement: ast.stmt) -> Iterator[tuple[str, str | None]]:
    """Each variable that a statement sets, with its value if that is a constant text; "" for a name not constant."""
    import ast

    def is_environ(node: ast.expr) -> bool:
        return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
            isinstance(node, ast.Name) and node.id == "environ"
        )

    def text(node: ast.expr | None) -> str | None:
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    def of_mapping(node: ast.expr) -> Iterator[tuple[str, str | None]]:
        if isinstance(node, ast.Dict):
            yield from ((text(key) or "", text(value)) for key, value in zip(node.keys, node.values, strict=True))
        else:
            yield "", None

    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and is_environ(target.value):
                yield text(target.slice) or "", text(statement.value)
    elif isinstance(statement, ast.AugAssign) and is_environ(statement.target):
        yield from of_mapping(statement.value)
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if isinstance(call.func, ast.Attribute) and (is_environ(call.func.value) or call.func.attr == "putenv"):
            if call.func.attr in ("setdefault", "putenv") and len(call.args) == 2:
                yield text(call.args[0]) or "", text(call.args[1])
            elif call.func.attr == "update":
                for argument in call.args:
                    yield from of_mapping(argument)
                yield from ((keyword.arg or "", text(keyword.value)) for keyword in call.keywords)


def _is_default(statement: ast.stmt) -> bool:
    """Whether it sets only what is not set yet."""
    import ast

    return any(isinstance(node, ast.Attribute) and node.attr == "setdefault" for node in ast.walk(statement))


def _is_third_party(name: str, directory: str) -> bool:
    """Whether it is installed in a site directory, and not shadowed by a module of the user's."""
    from importlib.machinery import PathFinder

    # What the program would find first: next to the script, then on PYTHONPATH.
    if _in(directory, name) or any(_in(path, name) for path in sys.path if path and not _is_python_own(path)):
        return False
    try:
        # A plain path search over the site directories: nothing is imported, and sys.path[0] does not interfere.
        spec = PathFinder.find_spec(name, [path for path in sys.path if _is_site(path)])
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _in(directory: str, name: str) -> bool:
    """Whether a directory contains a module or package of this name."""
    base = os.path.join(directory, name)
    return os.path.isfile(f"{base}.py") or os.path.isfile(os.path.join(base, "__init__.py"))


def _is_site(path: str) -> bool:
    return path.rstrip("/").endswith(("site-packages", "dist-packages"))


def _is_python_own(path: str) -> bool:
    """Whether it is a site directory, or a path that Python itself added."""
    return _is_site(path) or path.startswith((sys.base_prefix, sys.prefix))
