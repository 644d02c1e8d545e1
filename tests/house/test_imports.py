"""The import direction: launcher -> exporters -> profiler, and which package may import which.

Read from the source with `ast`: an import inside a function, below TYPE_CHECKING or by importlib counts like any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLICES = ("launcher", "profiler", "exporters")

# package: those that it may import (its own always). A package that is not named here may not exist.
MAY_IMPORT: dict[str, set[str]] = {
    "profiler.cgroup": set(),
    "profiler.files": set(),
    "profiler.kernel": set(),
    "profiler.redact": set(),
    "profiler.stack": set(),
    "profiler.xid": set(),
    "profiler.channel": {"profiler.files"},
    "profiler.record": {"profiler.channel"},
    "profiler.probe": {"profiler.channel", "profiler.files"},
    "profiler.samplers": {
        *("profiler.cgroup", "profiler.channel", "profiler.record", "profiler.files"),
        *("profiler.stack", "profiler.xid"),
    },
    "profiler.analysis": {"profiler.channel", "profiler.record"},
    "profiler.daemon": {
        *("profiler.samplers", "profiler.analysis", "profiler.channel", "profiler.record", "profiler.stack"),
    },
    "mark": {"profiler.probe"},
    "exporters.http": {"profiler.files"},
    "exporters.prometheus": {
        *("exporters.http", "profiler.record", "profiler.channel", "profiler.analysis", "profiler.xid"),
    },
    "exporters.worker": set(),
    "exporters.files": {"exporters.store", "exporters.worker", "profiler.record", "profiler.files"},
    "exporters.store": {"exporters.prometheus", "exporters.worker", "profiler.files", "profiler.record"},
    "exporters.view": {
        *("exporters.store", "exporters.files"),
        *("profiler.channel", "profiler.files", "profiler.kernel", "profiler.record", "profiler.redact"),
    },
    "exporters.discovery": {"exporters.worker", "profiler.record", "profiler.files", "profiler.kernel"},
    "exporters.push": {"exporters.prometheus", "profiler.record"},
    "exporters.report": {"exporters.view", "profiler.channel", "profiler.analysis"},
    "exporters.tui": {"exporters.view", "profiler.redact"},
    "exporters.web": {
        *("exporters.http", "exporters.prometheus", "exporters.report", "exporters.view", "profiler.record"),
    },
    "exporters.otlp": {"exporters.prometheus", "profiler.record"},
    "launcher.job": {"profiler.cgroup", "profiler.redact"},
    "launcher.loop": {"profiler.files"},
    "launcher.rendezvous": {"launcher.loop", "launcher.job", "launcher.failure", "launcher.policy"},
    "launcher.failure": {"launcher.loop", "launcher.job", "profiler.redact", "profiler.xid"},
    "launcher.checkpoint": {"launcher.loop", "launcher.job"},
    "launcher.hang": {"launcher.loop", "launcher.job", "profiler.channel", "profiler.stack"},
    "launcher.policy": {"launcher.failure", "profiler.record"},
    "launcher.gpus": {"launcher.loop", "launcher.job", "profiler.xid"},
    "launcher.logs": {"launcher.loop", "launcher.job", "profiler.redact"},
    "launcher.agent": {
        *("launcher.rendezvous", "launcher.failure", "launcher.checkpoint", "launcher.logs"),
        *("launcher.hang", "launcher.policy", "launcher.gpus"),
        *("launcher.loop", "launcher.job", "profiler.channel", "profiler.record", "profiler.redact"),
    },
    # A run seen from outside, as its user sees it; and faults on purpose.
    "launcher.runs": {"launcher.loop", "profiler.files", "exporters.store"},
    "launcher.tune": {
        *("launcher.job", "launcher.loop", "launcher.runs"),
        *("exporters.files", "profiler.channel", "profiler.files"),
    },
    "launcher.chaos": {"launcher.runs", "launcher.checkpoint", "launcher.loop", "launcher.job"},
    # What user programs save and resume with; they have torch.
    "checkpoint": {"launcher.checkpoint", "profiler.channel", "profiler.probe"},
    # The composition roots.
    "launcher.cli": {"*"},
    "compat": {"*"},
    "__main__": {"launcher.cli"},
}

# By name, and no other: one process, the rank, is put together below the agent; and looking into one is shared.
BY_NAME: dict[str, set[str]] = {
    "launcher.loop.rank_main": {"launcher.failure.inside", "profiler.probe.inject", "compat.function_call"},
    "launcher.loop.preload": {"launcher.failure.inside", "profiler.probe.cost", "profiler.probe.inject"},
    # Only in the process that looks into ranks, never in the agent.
    "launcher.hang.stacks": {"profiler.samplers.pyspy"},
    # What a trial's ranks say about themselves.
    "launcher.tune.trial": {"profiler.samplers.facts"},
    # Only where there is a driver.
    "launcher.job.host_info": {"profiler.samplers.nvml.driver"},
    "launcher.gpus.memory": {"profiler.samplers.nvml.driver"},
}

# Importing torch, once for all ranks, is what the fork server is for; and its store is torch's.
IMPORTS_TORCH = {"launcher.loop.preload", "launcher.loop.forkserver_main"}
# An interpreter that lacks this package can still run a rank: the file beside it is found without the package.
IMPORTS_ITS_NEIGHBOUR = {"launcher.loop.rank_main": "rank_end"}

# What runs inside the user's process: nothing but the standard library, and each other.
IN_RANK = (
    *("profiler.files", "profiler.channel", "profiler.probe", "mark"),
    *("launcher.failure.inside", "launcher.loop.rank_main", "launcher.loop.rank_end", "launcher.loop.linux"),
    *(
        "launcher.loop.forkserver_main",
        "launcher.loop.preload",
        "launcher.loop.import_watch",
        "launcher.loop.import_state",
    ),
    *("launcher.loop.preload_finder", "launcher.loop.restart_plain"),
    *("compat.function_call",),
)


def package_of(module: str) -> str:
    """`launcher.loop` for `launcher.loop.child`; `mark` for `mark`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in SLICES else parts[0]


def inside(module: str, places: tuple[str, ...] | set[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def imports(module: str, source: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that the module imports."""
    package = f"gpulaunch.{module}".split(".") if is_package else f"gpulaunch.{module}".split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__") and str(node.args[0].value).startswith("gpulaunch"):
                yield node.lineno, str(node.args[0].value)


def violations(sources: Mapping[str, str]) -> list[str]:
    """Every import that the rules above forbid, as `module:line imports name`."""
    found: list[str] = []
    for module, source in sources.items():
        package = package_of(module)
        if len(package.split(".")) == 1 and package in SLICES:
            allowed: set[str] = set()  # the __init__.py of a slice
        elif package in MAY_IMPORT:
            allowed = MAY_IMPORT[package] | {package}
        else:
            found.append(f"{module}: a package without a rule; add it to MAY_IMPORT")
            continue
        for line, name in imports(module, source):
            if not name.startswith("gpulaunch."):
                top = name.split(".")[0]
                known = top in sys.stdlib_module_names or top == IMPORTS_ITS_NEIGHBOUR.get(module)
                known = known or (module in IMPORTS_TORCH and top == "torch")
                if inside(module, IN_RANK) and not known:
                    found.append(f"{module}:{line} imports {name} inside a rank")
                continue
            target = name.removeprefix("gpulaunch.")
            if inside(target, BY_NAME.get(module, set())):
                continue
            if not inside(target, allowed) and "*" not in allowed:
                found.append(f"{module}:{line} imports {name}")
            elif inside(module, IN_RANK) and not inside(target, IN_RANK) and not inside_of_package(target):
                found.append(f"{module}:{line} imports {name} inside a rank")
    return found


def inside_of_package(target: str) -> bool:
    """Whether `from package import target` names a package in which in-rank modules lie, and not another module."""
    return any(place.startswith(f"{target}.") for place in IN_RANK)


def the_house() -> dict[str, str]:
    """Module name (without `gpulaunch.`) -> source, of all three slices."""
    sources: dict[str, str] = {}
    for slice_ in SLICES:
        root = ROOT / slice_ / "gpulaunch"
        for path in sorted(root.rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            sources[name] = path.read_text()
    return sources


def test_every_import_goes_down() -> None:
    sources = the_house()

    assert len(sources) > 40
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("profiler.channel.segment", "from gpulaunch.launcher.job import spec"),
        ("profiler.channel.segment", "import gpulaunch.launcher.job.spec"),
        ("profiler.samplers.host", "from ...exporters.prometheus import render"),
        ("profiler.samplers.host", "from gpulaunch.exporters import prometheus"),
        ("profiler.record", "def f():\n    from gpulaunch.profiler.daemon import sidecar"),
        ("profiler.probe.step", "from gpulaunch.profiler import record"),
        ("exporters.prometheus.render", "import importlib\nimportlib.import_module('gpulaunch.launcher.job')"),
        ("launcher.job.load", "from gpulaunch.launcher.loop import linux"),
        ("launcher.loop.child", "from gpulaunch.launcher.failure import inside"),
        ("launcher.logs.console", "from gpulaunch.launcher.agent.state import step"),
        ("launcher.agent.agent", "from gpulaunch.profiler.samplers import host"),
        ("launcher.agent.agent", "from gpulaunch.exporters.http import server"),
        ("launcher.agent.agent", "from gpulaunch.launcher import cli"),
        ("launcher.newpackage.thing", "import os"),
    ],
)
def test_a_planted_back_import_is_found(module: str, source: str) -> None:
    assert len(violations({module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("profiler.probe.step", "import torch"),
        ("profiler.channel.segment", "def f():\n    import psutil"),
        ("launcher.failure.inside", "from numpy import random"),
        ("launcher.failure.inside", "from gpulaunch.launcher.failure import report"),
        ("launcher.loop.rank_main", "from gpulaunch.launcher.loop import loop"),
    ],
)
def test_a_planted_import_inside_a_rank_is_found(module: str, source: str) -> None:
    assert len(violations({module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("launcher.cli.sidecar", "from gpulaunch.exporters.http import server"),
        ("launcher.agent.agent", "from gpulaunch.profiler.channel import segment"),
        ("launcher.loop.rank_main", "from gpulaunch.launcher.failure import inside"),
        ("launcher.job.host_info", "from gpulaunch.profiler.samplers.nvml import driver"),
        ("profiler.probe.step", "from ..channel import layout"),
    ],
)
def test_a_permitted_import_is_not(module: str, source: str) -> None:
    assert violations({module: source}) == []


def test_the_binding_of_nvml_is_named_in_one_place() -> None:
    """All others take a session of NVML there, or its reader."""
    named = [module for module, source in the_house().items() if '"pynvml"' in source or "import pynvml" in source]

    assert named == ["profiler.samplers.nvml.driver"]


def test_in_rank_modules_do_nothing_when_imported() -> None:
    """Without site-packages they import, load only the standard library and themselves, and change no hook."""
    names = [f"gpulaunch.{module}" for module in the_house() if inside(module, IN_RANK)]
    program = f"""
import importlib, signal, sys, threading
sys.path[:0] = {[str(ROOT / slice_) for slice_ in SLICES]!r}
handlers = [signal.getsignal(s) for s in signal.valid_signals()]
for name in {names!r}:
    importlib.import_module(name)
assert sys.excepthook is sys.__excepthook__, "excepthook replaced"
assert threading.excepthook is threading.__excepthook__, "threading.excepthook replaced"
assert handlers == [signal.getsignal(s) for s in signal.valid_signals()], "signal handler set"
assert threading.active_count() == 1, "thread started"
foreign = {{n.split(".")[0] for n in sys.modules}} - set(sys.stdlib_module_names) - {{"gpulaunch", "__main__"}}
assert not foreign, foreign
"""

    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_agent_imports_nothing_heavy() -> None:
    """The agent lives beside the ranks for days: its memory is what it imports (30 MB is all it may have)."""
    program = f"""
import sys
sys.path[:0] = {[str(ROOT / slice_) for slice_ in SLICES]!r}
import gpulaunch.launcher.cli.main, gpulaunch.launcher.cli.run
heavy = {{"asyncio", "email", "http", "logging", "multiprocessing", "numpy", "psutil", "pynvml", "sqlite3", "torch",
         "unittest", "urllib", "xml"}}
print(" ".join(sorted(heavy & set(sys.modules))))
"""

    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
