"""Real files of torch, written once by a process of their own, and ways to damage them."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulaunch.launcher.checkpoint import memory


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of files that torch wrote; not to be changed."""
    target = tmp_path_factory.mktemp("samples")
    program = Path(__file__).with_name("write_samples.py")
    done = subprocess.run([sys.executable, str(program), str(target)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def put(samples: Path, tmp_path: Path) -> Callable[..., Path]:
    """`put("new.pt", "run/model_20.pt")`: a copy of a sample, in the test's own directory."""

    def copy(sample: str, *places: str) -> Path:
        target = tmp_path
        for place in places:
            target = tmp_path / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if (samples / sample).is_dir():
                shutil.copytree(samples / sample, target, dirs_exist_ok=True)
            else:
                shutil.copyfile(samples / sample, target)
        return target

    return copy


@pytest.fixture
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember also what was written just now."""
    monkeypatch.setattr(memory, "SETTLED_S", -1e9)


@pytest.fixture
def damage() -> Damage:
    return Damage()


class Damage:
    """What happens to files."""

    def truncate(self, path: Path, left: int = -1) -> None:
        """Cut off the end: all but `left` bytes, or the last one."""
        os.truncate(path, path.stat().st_size - 1 if left < 0 else left)

    def flip(self, path: Path, at: int, bit: int = 0) -> None:
        """Flip one bit."""
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << bit
        path.write_bytes(data)


@pytest.fixture
def safetensors() -> Callable[..., bytes]:
    return make_safetensors


def make_safetensors(**shapes: list[int]) -> bytes:
    """A safetensors file of float32 tensors: 8 bytes of header length, the JSON header, the data.

    By the format's description in the README of huggingface/safetensors (0.8.0).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(range(256)) * (end // 256) + bytes(end % 256)
