"""Checkpoints on remote storage, with two storages that fsspec has built in."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.find import examine, find

fsspec = pytest.importorskip("fsspec")
pytestmark = pytest.mark.torch


@pytest.fixture
def bucket(samples: Path) -> Iterator[Any]:
    """A bucket in memory with a DCP checkpoint, a damaged newer one, and a file of torch.save."""
    storage = fsspec.filesystem("memory")
    for step in (10, 20):
        storage.put(f"{samples / 'dcp'}/", f"/bucket/run/step_{step}/", recursive=True)
    storage.put(str(samples / "new.pt"), "/bucket/run/model_5.pt")
    whole = storage.cat("/bucket/run/step_20/__0_1.distcp")
    storage.pipe("/bucket/run/step_20/__0_1.distcp", whole[:-1])
    yield storage
    storage.rm("/bucket", recursive=True)


def test_the_same_verification_on_storage_far_away(bucket: Any) -> None:
    search = find(["memory://bucket/run"], limit=9)

    assert [(one.path, one.format, one.key) for one in search.found] == [
        ("memory://bucket/run/model_5.pt", "torch", "model_5.pt"),
        ("memory://bucket/run/step_10", "dcp", "step_10"),
    ]
    assert all(one.saved_s > 1e9 for one in search.found)
    assert [(one.path, one.why[:13]) for one in search.skipped] == [("memory://bucket/run/step_20", "__0_1.distcp ")]
    assert examine("memory://bucket/run/step_10/").step == 10
    with pytest.raises(Damaged, match="no such file"):
        examine("memory://bucket/run/step_30")


def test_a_memory_of_remote_files(bucket: Any, tmp_path: Path, no_settling: None) -> None:
    memory = str(tmp_path / "verified.json")
    assert len(find(["memory://bucket/run"], limit=9, memory=memory).found) == 2

    damaged = bytearray(bucket.cat("/bucket/run/model_5.pt"))
    damaged[len(damaged) // 2] ^= 1
    bucket.pipe("/bucket/run/model_5.pt", bytes(damaged))

    search = find(["memory://bucket/run"], limit=9, memory=memory)
    assert [one.key for one in search.found] == ["step_10"]


def test_local_files_through_fsspec(put: Callable[..., Path], tmp_path: Path) -> None:
    put("dcp", "run/step_10")
    put("new.pt", "run/model_5.pt")
    (tmp_path / "run/again").symlink_to(tmp_path / "run")

    far = find([f"file://{tmp_path}/run"], limit=9)
    near = find([f"{tmp_path}/run"], limit=9)

    assert [(one.key, one.format, one.step, one.size_bytes) for one in far.found if "again" not in one.key] == [
        (one.key, one.format, one.step, one.size_bytes) for one in near.found
    ]
    assert far.found[0].path.startswith(f"file://{tmp_path}/run/")


def test_a_bucket_that_is_not_there_has_nothing() -> None:
    search = find(["memory://nowhere/run"])

    assert (search.found, search.error) == ((), "")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nonsense://x/y", "nonsense://x/y cannot be reached: "),
        ("s3://bucket/x", "s3://bucket/x cannot be reached: fsspec lacks the package for s3://"),
    ],
)
def test_a_storage_that_cannot_be_reached_is_said_and_the_others_are_searched(
    put: Callable[..., Path], url: str, why: str
) -> None:
    if url.startswith("s3") and importlib.util.find_spec("s3fs"):
        pytest.skip("s3fs is installed here")
    root = put("new.pt", "run/model_1.pt").parent

    search = find([url, str(root)])

    assert search.error.startswith(why)
    assert "\n" not in search.error
    assert len(search.found) == 1
    with pytest.raises(Damaged, match="cannot be reached"):
        examine(url)


def test_without_fsspec_it_says_what_to_install() -> None:
    program = """
import sys
sys.modules["fsspec"] = sys.modules["fsspec.core"] = None
from gpulaunch.launcher.checkpoint.find import find
print(find(["s3://bucket/run"]).error)
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert done.stdout == "s3://bucket/run needs the package fsspec, which is not installed: pip install fsspec\n"


def test_whatever_a_storage_raises_is_one_sentence(monkeypatch: pytest.MonkeyPatch, bucket: Any) -> None:
    class Refused(Exception):
        """As botocore's own errors, which are no OSError."""

    def refuse(*_: object, **__: object) -> None:
        raise Refused("An error occurred (403)\nwhen calling HeadObject")

    with monkeypatch.context() as patched:
        patched.setattr(type(bucket), "_open", refuse)
        search = find(["memory://bucket/run"], limit=9)
        assert search.found == ()
        whys = {one.why.partition(" cannot be read: ")[2] for one in search.skipped}
        assert whys == {"Refused: An error occurred (403)"}

        patched.setattr(type(bucket), "ls", refuse)
        (told,) = find(["memory://bucket/run"]).skipped
        assert told.why == "cannot be read: Refused: An error occurred (403)"
