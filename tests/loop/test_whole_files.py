"""Whole files or none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpulaunch.launcher.loop.files import write_json


def test_a_file_is_replaced_whole_and_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")

    write_json(str(file), {"ranks": {2, 1}, "place": tmp_path, "text": "\udcff\u00e9"})

    assert json.loads(file.read_text()) == {"ranks": [1, 2], "place": str(tmp_path), "text": "\udcff\u00e9"}
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(str(file), {"a": 1})
    itself: list[object] = []
    itself.append(itself)

    with pytest.raises(ValueError, match="Circular"):
        write_json(str(file), itself)
    with pytest.raises(OSError, match="none"):
        write_json(str(tmp_path / "none/a.json"), {})

    assert json.loads(file.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_planted_under_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep")
    (tmp_path / f"a.json.{os.getpid()}").symlink_to(target)

    write_json(str(tmp_path / "a.json"), {})

    assert target.read_text() == "keep"
    assert sorted(os.listdir(tmp_path)) == ["a.json", "precious"]
