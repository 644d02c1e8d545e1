"""The census of tests/conftest.py finds what a test leaves behind, and nothing in a test that leaves nothing."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAVES_A_PROCESS = """
import subprocess
def test_leaves_a_process():
    subprocess.Popen(["sleep", "60"], start_new_session=True).returncode = 0  # nobody waits for it, nobody warns
"""

LEAVES_A_FILE = """
from pathlib import Path
def test_leaves_a_file():
    Path("/dev/shm/{name}").mkdir()
"""

LEAVES_NOTHING = """
import subprocess
def test_leaves_nothing(tmp_path):
    subprocess.run(["true"], check=True)
    (tmp_path / "file").touch()
"""

# Popen is back before the kernel has written the environment of the new program, one time in fifty.
LOOKS_AT_ONCE = """
import os, subprocess
from pathlib import Path
import conftest
def test_finds_what_is_in_the_middle_of_its_exec():
    marker = f"{conftest.MARKER}={os.environ[conftest.MARKER]}".encode()
    early = []
    for _ in range(2000):
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
            early.append(not Path(f"/proc/{process.pid}/environ").read_bytes())
            found = marker in conftest.environ_of(f"/proc/{process.pid}").split(b"\\0")
            process.kill()
        assert found
        if sum(early) == 3:
            break
"""


def run(source: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A pytest of its own, with our conftest."""
    (directory / "conftest.py").write_text(CONFTEST.read_text().replace("SETTLE_S = 5.0", "SETTLE_S = 0.2"))
    (directory / "test_one.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=.", "."]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)


def test_a_process_left_behind_fails_the_test(tmp_path: Path) -> None:
    done = run(LEAVES_A_PROCESS, tmp_path)

    assert done.returncode == 1, done.stdout
    assert "sleep 60" in done.stdout


def test_a_process_that_has_just_been_started_is_found(tmp_path: Path) -> None:
    done = run(LOOKS_AT_ONCE, tmp_path)

    assert done.returncode == 0, done.stdout


def test_a_file_left_behind_fails_the_test(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    name = f"gpulaunch-{os.getuid()}-planted-{secrets.token_hex(4)}"
    request.addfinalizer(lambda: Path("/dev/shm", name).rmdir())  # before our own census looks

    done = run(LEAVES_A_FILE.format(name=name), tmp_path)

    assert done.returncode == 1, done.stdout
    assert name in done.stdout


def test_a_tidy_test_passes(tmp_path: Path) -> None:
    done = run(LEAVES_NOTHING, tmp_path)

    assert done.returncode == 0, done.stdout
