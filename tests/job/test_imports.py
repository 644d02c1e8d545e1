"""What a script does before it trains: read, never run."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.job.imports import Reading, imports_of, read_module, read_script


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
        ("try:\n    import numpy\nexcept ImportError:\n    import pytest", ["numpy"]),
        ("if flag:\n    import numpy", []),
        ("if flag:\n    try:\n        import numpy\n    except ImportError:\n        pass", []),
        ("if __name__ == '__main__':\n    import numpy", ["numpy"]),
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


# --- what else the fork server must know ---------------------------------------------------------------------------


def reading(tmp_path: Path, source: str) -> Reading:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    return read_script(str(script))


@pytest.mark.parametrize(
    "statement",
    [
        'os.environ["OMP_NUM_THREADS"] = "2"',
        'environ["OMP_NUM_THREADS"] = "2"',
        'os.environ.setdefault("OMP_NUM_THREADS", "2")',
        'os.environ.update({"OMP_NUM_THREADS": "2"})',
        'os.environ.update(OMP_NUM_THREADS="2")',
        'os.environ |= {"OMP_NUM_THREADS": "2"}',
        'os.putenv("OMP_NUM_THREADS", "2")',
    ],
)
def test_fixed_settings_before_torch_are_known(tmp_path: Path, statement: str) -> None:
    found = reading(tmp_path, f"import os\nfrom os import environ\n{statement}\nimport torch\n")

    assert found.environment == {"OMP_NUM_THREADS": "2"}
    assert found.obstacle == ""


@pytest.mark.parametrize(
    "source",
    [
        'import os, torch\nos.environ["OMP_NUM_THREADS"] = "2"',
        'import torch\ndef main():\n    import os\n    os.environ["OMP_NUM_THREADS"] = str(2)',
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]\nimport torch',
        'import os\nos.environ["TORCH_NCCL_BLOCKING_WAIT"] = str(1)\nimport torch',
        'import os\nname = os.environ["OMP_NUM_THREADS"]\nimport torch',
        "import os\nos.environ.update(settings())\nimport torch",
    ],
    ids=["after torch", "in a function", "read later", "read by NCCL", "only read", "nobody knows"],
)
def test_what_torch_does_not_read_at_its_import_is_no_obstacle(tmp_path: Path, source: str) -> None:
    found = reading(tmp_path, source)

    assert found.environment == {}
    assert found.obstacle == ""


@pytest.mark.parametrize(
    "statement",
    ['os.environ["OMP_NUM_THREADS"] = str(n)', 'if n:\n    os.environ["OMP_NUM_THREADS"] = "2"'],
    ids=["computed", "conditional"],
)
def test_what_torch_reads_at_its_import_and_nobody_knows_is_an_obstacle(tmp_path: Path, statement: str) -> None:
    assert "OMP_NUM_THREADS" in reading(tmp_path, f"import os\nn = 1\n{statement}\nimport torch\n").obstacle


def test_nothing_is_preloaded_that_comes_after_a_change_of_the_path_or_the_environment(tmp_path: Path) -> None:
    by_path = "import numpy\nimport sys\nsys.path.insert(0, 'vendor')\nimport sklearn"
    by_environment = "import numpy\nimport os\nos.environ['X'] = 'y'\nimport sklearn"

    assert reading(tmp_path, by_path).packages == ("numpy",)
    assert reading(tmp_path, by_environment).packages == ("numpy",)


def test_a_module_beside_the_script_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").touch()

    assert reading(tmp_path, "import numpy, sklearn").packages == ("numpy",)


@pytest.mark.parametrize("name", ["torch.py", "numpy/__init__.py"])
def test_the_users_own_torch_is_an_obstacle(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()

    assert name.partition("/")[0].removesuffix(".py") in reading(tmp_path, "import torch").obstacle


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    """Who reads it takes it from the rank; and nobody may ever write to it."""
    os.mkfifo(tmp_path / "pipe")

    assert read_script(str(tmp_path / "pipe")) == Reading()


def test_our_own_part_with_much_of_torch_in_it_is_preloaded(tmp_path: Path) -> None:
    """`gpulaunch.checkpoint` takes 0.2 s to import, at every restart; `gpulaunch.mark` nothing."""
    script = tmp_path / "train.py"
    script.write_text("import torch\nfrom gpulaunch import mark\nfrom gpulaunch.checkpoint import Checkpoint\n")

    assert imports_of(str(script)) == ["gpulaunch.checkpoint"]


@pytest.mark.parametrize(
    ("source", "trains"),
    [
        ("import os, json.decoder\nfrom os.path import join", False),
        ("from __future__ import annotations\nprint(1)", False),
        ("def main():\n    import torch", True),
        ("import os\nclass Model:\n    from numpy import ndarray", True),
        ("import my_own_module", True),
        ("from . import sibling", True),
        ("from .os import sibling", True),
        ("import importlib\nimportlib.import_module('torch')", True),
        ("__import__('torch')", True),
        ("exec(open('train.py').read())", True),
        ("import pickle", True),  # what is in a pickle is imported when it is read
        ("", False),
        ("def broken(:", True),  # Python will say so
    ],
)
def test_a_program_that_cannot_come_by_torch_is_known(tmp_path: Path, source: str, trains: bool) -> None:
    """torch's own slow part (dynamo, for DDP) is then not loaded for it."""
    path = tmp_path / "script.py"
    path.write_text(source)

    assert read_script(str(path)).trains is trains


def test_a_default_is_told_from_a_setting(tmp_path: Path) -> None:
    found = reading(tmp_path, 'import os\nos.environ.setdefault("A", "1")\nos.environ["B"] = "2"\nimport torch\n')

    assert found.environment == {"A": "1", "B": "2"}
    assert found.defaults == {"A"}


def test_what_is_imported_before_torch_is_known(tmp_path: Path) -> None:
    assert reading(tmp_path, "import numpy\nimport torch, pytest").before_torch == ("numpy",)


def test_a_module_is_read_with_the_packages_that_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m` executes them; nothing is imported."""
    (tmp_path / "job/deep").mkdir(parents=True)
    (tmp_path / "job/__init__.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\n")
    (tmp_path / "job/deep/train.py").write_text("import os\nos.environ['TORCH_LOGS'] = 'dynamo'\nimport numpy\n")
    (tmp_path / "job/__main__.py").write_text("import pytest\n")
    monkeypatch.chdir(tmp_path)

    found = read_module("job.deep.train")

    assert found.environment == {"OMP_NUM_THREADS": "2", "TORCH_LOGS": "dynamo"}
    assert found.packages == ("numpy",)
    assert read_module("job").packages == ("pytest",)
    assert read_module("numpy.f2py").packages == ("numpy",), "a module of a package that can be preloaded itself"
    assert read_module("no.such.module") == Reading()
