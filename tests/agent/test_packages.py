"""The memory of packages that must not be imported before a fork."""

from __future__ import annotations

import os
from pathlib import Path

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

    before = packages._key("wrapped")
    assert packages._key("wrapped") == before
    os.utime(module, (0, 0))

    assert packages._key("wrapped") != before
