"""Getting in: `arm` in every process that imports torch, with a stand-in for torch where none is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulaunch.profiler.channel import segment, segment_writer

ARM = """
import sys, types
if "with-torch" in sys.argv:
    sys.modules["torch"] = types.ModuleType("torch")
from gpulaunch.profiler.probe.inject import arm, current
arm()
arm()
assert current() is None
print(*sorted(name for name in sys.modules if name.startswith("gpulaunch.profiler.") or name == "dataclasses"))
"""

LIGHT = "gpulaunch.profiler.probe gpulaunch.profiler.probe.inject"
"""What a program outside a run pays for us: two small modules."""


def arm(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}
    return subprocess.run(
        [sys.executable, "-c", ARM, *argv], env=clean | environ, capture_output=True, text=True, check=True, timeout=60
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"GPULAUNCH_CHANNEL_DIR": "/dev/shm"},
        {"RANK": "0", "GPULAUNCH_CHANNEL_DIR": "/dev/shm", "GPULAUNCH_PROFILE": "off"},
    ],
    ids=["plain program", "another launcher's rank", "fork server", "switched off"],
)
def test_outside_a_run_nothing_happens(environ):
    done = arm("with-torch", **environ)

    assert (done.stdout.strip(), done.stderr) == (LIGHT, "")


def test_without_torch_nothing_happens(tmp_path):
    segment_writer.create(str(tmp_path / "rank-0.bin"), rank=0, local_rank=0, attempt=0)
    done = arm(RANK="0", GPULAUNCH_CHANNEL_DIR=str(tmp_path))

    assert (done.stdout.strip(), done.stderr) == (LIGHT, "")
    assert not segment.read(str(tmp_path / "rank-0.bin")).armed


def test_a_page_that_is_gone_is_no_news(tmp_path):
    assert arm("with-torch", RANK="0", GPULAUNCH_CHANNEL_DIR=str(tmp_path / "gone")).stderr == ""


@pytest.mark.parametrize(("rank", "content"), [("0", b"no page"), ("zero", b"")])
def test_a_fault_is_one_line_and_no_exception(tmp_path: Path, rank, content):
    (tmp_path / "rank-0.bin").write_bytes(content)
    done = arm("with-torch", RANK=rank, GPULAUNCH_CHANNEL_DIR=str(tmp_path))

    assert done.stderr.startswith(f"[gpulaunch] rank {rank}: the profiler is off: ")
    assert done.stderr.count("\n") == 1


def test_outside_a_run_marks_do_nothing():
    from gpulaunch import mark

    with mark.phase("forward"):
        mark.note("nobody listens")
        mark.step()


def test_a_program_without_torch_has_its_marks(tmp_path, monkeypatch):
    """JAX, say: there is nothing to tap, but what the program says itself is told."""
    path = str(tmp_path / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    program = (
        "import sys\n"
        "from gpulaunch import mark\n"
        "for _ in range(3):\n"
        "    with mark.phase('forward'):\n"
        "        mark.step()\n"
        "assert 'torch' not in sys.modules\n"
    )
    env = {**os.environ, "RANK": "0", "GPULAUNCH_CHANNEL_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=60)

    with segment.SegmentReader(path) as reader:
        assert reader.read().steps == 3
