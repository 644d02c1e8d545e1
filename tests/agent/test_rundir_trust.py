"""A run directory that another user prepared is not used; those that people and clusters have are."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulaunch.launcher.agent.rundir import RunDirError, RunDirLockedError, open_run_dir, why_untrusted

ME, OTHER, ROOT = 1000, 1001, 0


def spec_of(job_dir: Path) -> Any:
    return SimpleNamespace(
        nnodes=1, job_dir=os.fspath(job_dir), log_dir=None, node_rank=0, elastic=None, shared_dir=None
    )


@pytest.mark.parametrize(
    ("owner", "group", "mode", "me", "mounted", "why"),
    [
        (OTHER, OTHER, 0o755, ME, False, "belongs to another user (uid 1001)"),
        (OTHER, OTHER, 0o777, ROOT, False, "belongs to another user (uid 1001)"),
        (OTHER, OTHER, 0o755, ROOT, True, "belongs to another user (uid 1001)"),
        (ME, ME, 0o757, ME, False, "can be written by every user"),
        (ROOT, ROOT, 0o1777, ME, False, "can be written by every user"),
        (ROOT, ME, 0o775, ROOT, False, "can be written by a group (gid 1000), and this is root"),
        (ME, ME, 0o700, ME, False, ""),
        (ME, ME, 0o775, ME, False, ""),  # umask 002
        (ME, 5000, 0o2775, ME, False, ""),  # a project's directory
        (ROOT, 5000, 0o2770, ME, True, ""),  # a volume of Kubernetes with fsGroup
        (ROOT, ROOT, 0o777, ME, True, ""),  # emptyDir
        (ROOT, ROOT, 0o755, ROOT, False, ""),
        (65534, 65534, 0o755, 65534, False, ""),  # NFS that maps all users to one
        (ROOT, 2000, 0o2770, ROOT, False, ""),  # below a volume with fsGroup, which the kubelet has given g+rwX
    ],
)
def test_whose_directory_is_trusted(owner: int, group: int, mode: int, me: int, mounted: bool, why: str) -> None:
    found: Any = SimpleNamespace(st_uid=owner, st_gid=group, st_mode=0o040000 | mode)
    made: Any = SimpleNamespace(st_uid=me, st_mode=0o100600)

    assert why_untrusted(found, made=made, groups={me, 2000}, mounted=mounted) == why


@pytest.mark.parametrize("shown", [0o777, 0o770])
def test_modes_that_a_file_system_makes_up_say_nothing(shown: int) -> None:
    """CIFS, WSL's /mnt/c, FUSE: a file made with 0600 has them too. The owner counts there as well."""
    made: Any = SimpleNamespace(st_uid=ROOT, st_mode=0o100000 | shown)
    found: Any = SimpleNamespace(st_uid=ROOT, st_gid=ME, st_mode=0o040000 | shown)
    others: Any = SimpleNamespace(st_uid=OTHER, st_gid=ME, st_mode=0o040000 | shown)

    assert why_untrusted(found, made=made, groups=(), mounted=False) == ""
    assert why_untrusted(others, made=made, groups=(), mounted=False) == "belongs to another user (uid 1001)"


@pytest.mark.root
def test_root_does_not_run_in_a_directory_that_a_user_prepared(gpulaunch, tmp_path: Path) -> None:
    prepared = tmp_path / "run"
    prepared.mkdir()
    os.chown(prepared, 65534, 65534)

    ended = gpulaunch("--no-python", "--job-dir", prepared, "true")

    assert ended.code == 2, ended
    assert "belongs to another user (uid 65534)" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert list(prepared.iterdir()) == []


def test_a_directory_that_every_user_can_write_is_refused(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)

    ended = gpulaunch("--no-python", "--job-dir", tmp_path / "run", "true")

    assert ended.code == 2, ended
    assert "can be written by every user" in ended.stderr


def test_a_link_to_a_directory_of_ones_own_is_followed(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o775)
    (tmp_path / "latest").symlink_to(tmp_path / "run")

    assert gpulaunch("--no-python", "--no-profile", "--job-dir", tmp_path / "latest", "true").code == 0


def test_a_directory_that_is_pruned_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gpulaunch runs prune` holds the lock of one while it removes it."""
    path, locks, flock = tmp_path / "run", list[int](), fcntl.flock

    def pruned(lock: int, how: int) -> None:
        locks.append(lock)
        if len(locks) < 3:
            path.rmdir()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", pruned)
    held = open_run_dir(spec_of(path))

    assert len(locks) == 3
    assert os.path.samestat(os.fstat(locks[-1]), path.stat())
    with pytest.raises(RunDirLockedError):
        open_run_dir(spec_of(path))
    held.close()


def test_events_are_not_written_through_a_link(gpulaunch, tmp_path: Path) -> None:
    """The events are lost, the job is not."""
    aim = tmp_path / "of-somebody"
    aim.write_text("as it was")
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run/events.jsonl").symlink_to(aim)

    ended = gpulaunch("--no-python", "--no-profile", "--job-dir", tmp_path / "run", "true")

    assert ended.code == 0, ended
    assert aim.read_text() == "as it was"


def test_a_link_that_takes_the_place_of_the_directory_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at where the path leads and the opening."""
    (tmp_path / "of-somebody").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "of-somebody")
    monkeypatch.setattr(os.path, "realpath", os.fspath)

    with pytest.raises(NotADirectoryError):
        open_run_dir(spec_of(tmp_path / "run"))


def of_several(job_dir: Path) -> Any:
    """Nodes without numbers of their own."""
    return SimpleNamespace(**{**vars(spec_of(job_dir)), "nnodes": 3, "elastic": SimpleNamespace(order=None)})


def test_hosts_have_numbers_in_the_order_in_which_they_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def node_of(host: str) -> int:
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=host))
        rundir = open_run_dir(of_several(tmp_path / "job"))
        rundir.close()
        assert (
            rundir.path
            == os.fspath(tmp_path / "job" / (f"node-{rundir.node}" if rundir.node else ""))[: len(rundir.path)]
        )
        return rundir.node

    os.umask(os.umask(0))
    assert [node_of(host) for host in ("b", "a", "c", "a", "b")] == [0, 1, 2, 1, 0]
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("planted", ["open to all", "a link", "a pipe", "a linked number"])
def test_the_numbers_of_hosts_are_not_taken_from_others(tmp_path: Path, planted: str) -> None:
    job, nodes = tmp_path / "job", tmp_path / "job" / ".nodes"
    job.mkdir(mode=0o700)
    if planted == "a link":
        (tmp_path / "elsewhere").mkdir()
        nodes.symlink_to(tmp_path / "elsewhere")
    else:
        nodes.mkdir()
    if planted == "open to all":
        job.chmod(0o777)
    elif planted == "a pipe":
        os.mkfifo(nodes / "0")
    elif planted == "a linked number":
        (tmp_path / "name").write_text(os.uname().nodename)
        (nodes / "0").symlink_to(tmp_path / "name")
    if planted == "a pipe":  # does not block
        assert open_run_dir(of_several(job)).node == 1
        return
    with pytest.raises(RunDirError):
        open_run_dir(of_several(job))
