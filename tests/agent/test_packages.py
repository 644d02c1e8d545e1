"""The memory of packages that must not be imported before a fork."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpulaunch.launcher.agent import packages


def test_an_upgrade_makes_a_refused_package_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a command of the package's name lies in a directory that comes before it on the path."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/wrapped").write_text("#!/bin/sh\n")
    module = tmp_path / "site/wrapped/__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    monkeypatch.setattr("sys.path", [os.fspath(tmp_path / "bin"), os.fspath(tmp_path / "site")])

    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    spec: Any = SimpleNamespace(program=SimpleNamespace(kind="script", target="train.py"))

    packages.remember({"wrapped": "it starts threads"})
    assert packages.recall(spec, ["wrapped"]) == {"wrapped": "it starts threads"}
    os.utime(module, (0, 0))

    assert packages.recall(spec, ["wrapped"]) == {}


@pytest.mark.parametrize(
    ("environ", "customized", "because"),
    [
        ({}, "", ""),
        ({}, "import os\nos.environ['MINE'] = '1'", ""),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "", ""),
        ({"LD_PRELOAD": "/opt/ansys/libinsight.so"}, "", ""),
        ({"LD_PRELOAD": "/opt/nvidia/nsight-systems/2025.3/libToolsInjectionProxy64.so"}, "", "an NVIDIA tool"),
        ({"NSYS_PROFILING_SESSION_ID": "7"}, "", "an NVIDIA tool"),
        ({"CUDA_INJECTION64_PATH": "/opt/nvidia/libToolsInjection64.so"}, "", "an NVIDIA tool"),
        ({"LD_PRELOAD": "/opt/nvidia/compute-sanitizer/libTreeLauncherTargetInjection.so"}, "", "an NVIDIA tool"),
        ({}, "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = os.environ.get('LOCAL_RANK', '')", "sitecustomize reads"),
        ({}, "import os\nnode = os.getenv('SLURM_PROCID')", "sitecustomize reads"),
    ],
)
def test_where_ranks_must_not_be_forked_whatever_the_program(
    tmp_path: Path, environ: dict[str, str], customized: str, because: str
) -> None:
    module = ModuleType("sitecustomize")
    module.__file__ = str(tmp_path / "sitecustomize.py")
    Path(module.__file__).write_text(customized)
    built_in = ModuleType("usercustomize")  # has no file

    why = packages.obstacle_of_process(environ, {"sitecustomize": module, "usercustomize": built_in})

    assert why.startswith(because) if because else why == ""
