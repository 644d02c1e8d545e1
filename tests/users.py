"""This user, and another one where the tests run as root."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from needed import program

ROOT = Path(__file__).parents[1]
NOBODY = 65534
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class User:
    uid: int
    gid: int
    before: tuple[str, ...] = ()
    """What makes a command this user's."""
    python: str = sys.executable

    def run(self, *argv: str, cwd: str | Path = "/", within: tuple[str, ...] = ()) -> Done:
        """`within`: a command in front, for surroundings of its own."""
        slices = [str(ROOT / name) for name in ("launcher", "exporters", "profiler")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(slices), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [*within, *self.before, *argv]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)

    def call(self, expression: str, *args: object, within: tuple[str, ...] = ()) -> str:
        """What an expression gives in a process of this user's."""
        code = f"import sys; from gpulaunch.launcher.tune.scratch import *; print({expression})"
        done = self.run(self.python, "-c", code, *map(str, args), within=within)
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")


@functools.cache
def nobody() -> User | str:
    """Another user, or why there is none."""
    if os.geteuid() != 0:
        return "needs root, to become another user"
    before = (program("setpriv", package="util-linux"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    # Root's own interpreter may lie where others cannot look, though the one exec by setpriv itself finds it.
    enough = "import sys; assert sys.version_info >= (3, 11); import gpulaunch.launcher.tune.scratch"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        found = User(NOBODY, NOBODY, before, python)
        if found.run("sh", "-c", '"$@"', "sh", python, "-c", enough).returncode == 0:
            return found
    return "no Python 3.11 or newer that another user may run"


def user_named(name: str) -> User:
    """`self`, or `nobody`, without whom the test is skipped."""
    found = nobody() if name == "nobody" else User(os.geteuid(), os.getegid())
    if isinstance(found, str):
        pytest.skip(found)
    return found
