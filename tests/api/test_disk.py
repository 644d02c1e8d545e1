"""Disks that are full, limited or closed: said once for each cause, training goes on, nothing half written stays; but
what was not saved at the end is an error."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from gpulaunch.checkpoint import Checkpoint, CheckpointError, api, saver

pytestmark = pytest.mark.torch

OWN_FILES = {".generation", ".lock", ".owner"}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    place = tmp_path / "tiny"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.root
def test_a_full_disk_is_said_once_and_training_goes_on(tiny_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing half written stays; when there is room again, the next save succeeds."""
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(7 << 20))
    wide = nn.Linear(1000, 500)  # 2 MB
    ckpt = Checkpoint(model=wide, dir=tiny_disk / "saved", every=1, keep=2)
    ckpt.resume()

    for step in ckpt.steps(6):
        if step == 5:
            ckpt.wait()
            assert set(os.listdir(tiny_disk / "saved")) <= OWN_FILES
            ballast.unlink()
        ckpt.step()

    said = capfd.readouterr().err
    assert said.count("could not be saved") == 1
    assert "step 1 could not be saved in" in said
    assert "No space left on device" in said
    assert "training continues" in said
    assert sorted(path.name[-2:] for path in (tiny_disk / "saved").glob("step-*")) == ["05", "06"]


def test_a_limit_on_file_size_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = Checkpoint(model=nn.Linear(1000, 500), dir=tmp_path, every=1)
    ckpt.resume()
    monkeypatch.setattr(api, "LAST_SAVE_AGAIN_S", (0.01,))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"^the last step, 3, was not saved in .*: File too large$"):  # noqa: PT012
            for _ in ckpt.steps(3):
                ckpt.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    said = capfd.readouterr().err
    assert said.count("could not be saved") == 1
    assert "File too large" in said
    assert {path.name for path in tmp_path.iterdir()} == OWN_FILES


def test_the_last_save_is_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room was made meanwhile, or a mount came back: the program ends well, and everything is saved."""
    ckpt = Checkpoint(model=nn.Linear(2, 2), dir=tmp_path)
    ckpt.resume()
    failures = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None])

    def sync(path: str) -> None:
        if trouble := next(failures, None):
            raise trouble

    monkeypatch.setattr(saver, "sync_file", sync)
    monkeypatch.setattr(api, "LAST_SAVE_AGAIN_S", (0.01, 0.01))
    for _ in ckpt.steps(2):
        ckpt.step()

    assert capfd.readouterr().err.count("could not be saved") == 1
    assert [path.name[-1:] for path in tmp_path.glob("step-*")] == ["2"]


READ_ONLY = """
    import sys, torch
    from gpulaunch.checkpoint import Checkpoint, api
    api.LAST_SAVE_AGAIN_S = (0.01,)
    ckpt = Checkpoint(model=torch.nn.Linear(1, 1), dir=sys.argv[1], every=1)
    ckpt.resume()
    for step in ckpt.steps(3):
        print("step", step)
        ckpt.step()
"""


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """A regular file stands where the directory should be: not even root can write there."""
    (tmp_path / "file").write_text("")

    done = run(READ_ONLY, tmp_path / "file" / "saved")

    assert (done.returncode, done.stdout) == (1, "step 1\nstep 2\nstep 3\n")
    assert done.stderr.endswith("was not saved in {}: Not a directory\n".format(tmp_path / "file" / "saved"))
    assert done.stderr.count("could not be saved") == 1
    assert "Not a directory" in done.stderr


@pytest.mark.root
def test_a_directory_without_permission(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir(mode=0o555)
    for place in (tmp_path, *tmp_path.parents):  # pytest's directories are root's own
        if place.owner() == "root" and place.is_relative_to("/tmp") and place != Path("/tmp"):
            place.chmod(place.stat().st_mode | 0o055)

    # Python itself may lie where only root can read: what is needed of it is loaded before.
    program = READ_ONLY.replace(
        "    ckpt.resume()", "    import os; os.setgid(65534); os.setuid(65534)\n    ckpt.resume()"
    )
    done = run(program, tmp_path / "saved")

    assert (done.returncode, done.stdout) == (1, "step 1\nstep 2\nstep 3\n"), done.stderr
    assert done.stderr.count("could not be saved") == 1
    assert "Permission denied" in done.stderr


def run(program: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
