"""Which packages a script names: read, never run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.job.imports import imports_of


def imports(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(source)
    return imports_of(str(path))


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("import numpy", ["numpy"]),
        ("import numpy.linalg as la, pytest", ["numpy", "pytest"]),
        ("from numpy.linalg import norm", ["numpy"]),
        ("import pytest\nimport numpy\nimport pytest", ["pytest", "numpy"]),
        ("import os, json, torch, gpulaunch\nimport no_such_package", []),
        ("from . import sibling\nfrom .numpy import x", []),
        ("try:\n    import numpy\nexcept ImportError:\n    import pytest", ["numpy", "pytest"]),
        ("if True:\n    import numpy", ["numpy"]),
        ("with open('x'):\n    import numpy", ["numpy"]),
        ("def f():\n    import numpy", []),
        ("class C:\n    import numpy", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy\nelse:\n    import pytest", ["pytest"]),
        ("import typing\nif typing.TYPE_CHECKING:\n    import numpy", []),
        ("raise SystemExit('never run')\nimport numpy", ["numpy"]),
        ("def broken(:\n", []),
        ("", []),
    ],
)
def test_the_packages_of_a_script(tmp_path: Path, source: str, packages: list[str]) -> None:
    assert imports(tmp_path, source) == packages


def test_the_users_own_modules_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helpers.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)

    assert imports(tmp_path, "import helpers, numpy") == ["numpy"]


def test_a_script_that_cannot_be_read_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\x00\x01import numpy")

    assert imports_of(str(tmp_path / "binary.py")) == []
    assert imports_of(str(tmp_path / "missing.py")) == []
    assert imports_of(str(tmp_path)) == []


@given(st.binary(max_size=80) | st.text("import fromas.,()\n\t numpy:if", max_size=80).map(str.encode))
def test_any_bytes_are_survived(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.py"
    path.write_bytes(content)

    assert set(imports_of(str(path))) <= {"numpy"}
