"""The directory of a run's segments: what killed launchers have left of theirs is removed, and nothing else is."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from gpulaunch.launcher.agent.segments import Segments

LONG_AGO_S = time.time() - 3600


def left(root: Path, name: str, *, lock: str = "lock", old: bool = False) -> Path:
    directory = root / name
    directory.mkdir()
    if lock:
        (directory / lock).touch()
    if old:
        os.utime(directory, (LONG_AGO_S, LONG_AGO_S))
    return directory


def test_what_killed_launchers_have_left_goes_and_nothing_else(tmp_path: Path) -> None:
    mine = f"gpulaunch-{os.getuid()}-"
    gone = [
        left(tmp_path, mine + "dead"),
        left(tmp_path, mine + "killed-while-it-made-it", lock="lock.draft", old=True),
        left(tmp_path, mine + "killed-before-that", lock="", old=True),
    ]
    stays = [
        left(tmp_path, mine + "lives"),
        left(tmp_path, mine + "is-being-made", lock="lock.draft"),
        left(tmp_path, f"gpulaunch-{os.getuid() + 1}-another-users", old=True),
        left(tmp_path, "something-else", lock="", old=True),
    ]
    with open(stays[0] / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        segments = Segments("new", run_dir="", root=str(tmp_path))

        assert [path.name for path in gone if path.exists()] == []
        assert [path.name for path in stays if not path.exists()] == []
        segments.close()
    assert not Path(segments.directory).exists()


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    """That no process holds the file it leads to does not make the directory abandoned."""
    aim = tmp_path / "of-somebody"
    aim.touch()
    linked = left(tmp_path, f"gpulaunch-{os.getuid()}-linked", lock="", old=True)
    (linked / "lock").symlink_to(aim)

    Segments("new", run_dir="", root=str(tmp_path)).close()

    assert (linked / "lock").is_symlink()
