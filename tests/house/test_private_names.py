"""No test touches a private name of gpulaunch's modules: what is tested is what other modules may use, too.

Read from the source with `ast`, of tests and of the programs that stand in them as text. Private names of torch, of the
standard library and of the tests themselves are not meant: a name counts if a module of gpulaunch defines it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLICES = ("launcher", "profiler", "exporters")

OF_OTHERS = {
    ("api/test_position.py", "_iterator"),  # of torch's DataLoader
    ("checkpoint/test_remote.py", "_open"),  # of fsspec's file systems
    ("compat/test_parser.py", "_actions"),  # of argparse
    ("probe/test_tempdir.py", "_config"),  # of multiprocessing's processes
}
"""(file, name): gpulaunch has a private name like it, but it is another package's that is touched."""
PUBLIC = {"_asdict", "_fields", "_make", "_replace"}
"""The public names of a namedtuple."""

BY_NAME = ("setattr", "getattr", "delattr", "hasattr")
IN_TEXT = re.compile(r"(?<![\w.])(?!self\b|cls\b)(?:\w+\.)+(_[a-zA-Z]\w*)|\bimport +(?:[\w, ]+, *)?(_[a-zA-Z]\w*)")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.AST) -> set[str]:
    """The private names of functions, classes, variables and attributes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return {name for name in names if is_private(name)}


def text_of(node: ast.AST) -> str:
    """The text of a string, of an f-string without its values; "" for all else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) or "0" for value in values)
    return ""


def touched(source: str, ours: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of every name of `ours` that a module touches, and of all private ones that it imports."""
    tree = ast.parse(source)
    theirs = ours - defined_in(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if module.partition(".")[0] == "gpulaunch":
                names = [*module.split("."), *(alias.name for alias in aliases)]
                yield from ((node.lineno, name) for name in names if is_private(name))
            case ast.Import(names=aliases):
                names = [
                    name for each in aliases if each.name.startswith("gpulaunch.") for name in each.name.split(".")
                ]
                yield from ((node.lineno, name) for name in names if is_private(name))
            case ast.Attribute(value=owner, attr=name) if name in theirs:
                if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                    yield node.lineno, name
            case ast.Call(func=function, args=[_, ast.Constant(value=str(name)), *_]) if name in theirs:
                if ast.unparse(function).rpartition(".")[2] in BY_NAME:
                    yield node.lineno, name
            case ast.Constant() | ast.JoinedStr():
                text = text_of(node)
                if re.fullmatch(r"gpulaunch(\.\w+)+", text):
                    yield from ((node.lineno, name) for name in text.split(".") if is_private(name))
                elif "gpulaunch" in text and "import" in text:
                    for found in IN_TEXT.finditer(text):
                        if (name := found[1] or found[2]) in ours:
                            yield node.lineno + text.count("\n", 0, found.start()), name


def names_of_gpulaunch() -> set[str]:
    paths = [path for slice_ in SLICES for path in (ROOT / slice_).rglob("*.py")]
    private_modules = {path.stem for path in paths if is_private(path.stem)}
    return private_modules.union(*(defined_in(ast.parse(path.read_text())) for path in paths)) - PUBLIC


def test_no_test_touches_a_private_name() -> None:
    ours, tests = names_of_gpulaunch(), ROOT / "tests"
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(tests.rglob("*.py"))
        if path != Path(__file__)
        for line, name in sorted(set(touched(path.read_text(), ours)))
        if (str(path.relative_to(tests)), name) not in OF_OTHERS
    ]

    assert len(ours) > 1000
    assert found == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("from gpulaunch.profiler.probe.worker import Meter, _opened", 1),
        ("from gpulaunch.profiler import _worker", 1),
        ("import os, gpulaunch.profiler._worker", 1),
        ("from gpulaunch.profiler._worker import Meter", 1),
        ("def test(meter):\n    meter.begin()\n    meter._slot.add(1)", 3),
        ("def test(monkeypatch):\n    monkeypatch.setattr(worker, '_slot', None)", 2),
        ("monkeypatch.setattr('gpulaunch.profiler.probe.worker._slot', None)", 1),
        ("PROGRAM = '''\nfrom gpulaunch.profiler.probe import worker\nworker._slot = {not python}\n'''", 3),
        ("PROGRAM = f'''\nfrom gpulaunch.profiler.probe.worker import Meter, _slot\nprint({1})\n'''", 2),
    ],
)
def test_a_planted_private_name_is_found(source: str, line: int) -> None:
    assert {at for at, _ in touched(source, {"_slot", "_opened", "_worker"})} == {line}


@pytest.mark.parametrize(
    "source",
    [
        "torch.utils.data._utils.worker._worker_info",
        "class Mine:\n    def __init__(self):\n        self._slot = 1\n\nMine()._slot",
        "def _slot():\n    pass\n\nmodule._slot()",
        "from torch._slot import _opened",
        "assert frame.name == '_slot'",
    ],
)
def test_the_names_of_others_are_not(source: str) -> None:
    assert list(touched(source, {"_slot", "_opened"})) == []
