"""The directory: what is kept, who may commit, and what is left of those who were stopped in the middle."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.checkpoint import ownership
from gpulaunch.checkpoint import store as stores
from gpulaunch.checkpoint.ownership import InUseError
from gpulaunch.checkpoint.store import Keep, Saved, StaleError, Store, obsolete
from gpulaunch.launcher.checkpoint.manifest import Manifest, ManifestFile, digest, verify

ALL = Keep(newest=None, every=None)


def save(store: Store, step: int, keep: Keep = ALL, spare: str | None = None, text: str = "state") -> str:
    path = store.begin(step)
    file = Path(path, "data")
    file.write_text(text)
    entry = ManifestFile(name="data", size_bytes=file.stat().st_size, sha256=digest(str(file)))
    manifest = Manifest(step=step, attempt=2, generation=store.generation, world_size=1, saved_s=1.0, files=(entry,))
    store.commit(path, manifest, keep, spare)
    return f"{store.directory}/step-{step:012d}"


def claimed(path: Path, *, attempt: int | None = None) -> Store:
    """By this process; with `attempt`, as a rank of that job."""
    store = Store(str(path))
    if attempt is not None:
        store.owner = replace(store.owner, run="the-job", attempt=attempt)
    store.claim()
    return store


def steps(path: Path) -> list[int]:
    return sorted(saved.step for saved in Store(str(path)).complete())


def names(path: Path) -> set[str]:
    return {entry for entry in os.listdir(path) if entry not in (".lock", ".generation", ".owner")}


# -- what is kept


def test_the_newest_and_the_milestones_are_kept(tmp_path: Path) -> None:
    store = claimed(tmp_path)

    for step in range(10, 130, 10):
        save(store, step, Keep(newest=2, every=50))

    assert steps(tmp_path) == [50, 100, 110, 120]
    assert names(tmp_path) == {f"step-{step:012d}" for step in (50, 100, 110, 120)}


def test_the_one_resumed_from_is_kept(tmp_path: Path) -> None:
    store = claimed(tmp_path)
    first = save(store, 10)

    for step in range(20, 60, 10):
        save(store, step, Keep(newest=1, every=None), spare=first)

    assert steps(tmp_path) == [10, 50]


def test_a_life_that_began_further_back_is_the_newer_one(tmp_path: Path) -> None:
    """`--resume` of an older checkpoint: what it saves counts more than the steps that it has left behind."""
    first = claimed(tmp_path)
    for step in (100, 200, 300):
        save(first, step)
    second = claimed(tmp_path)

    save(second, 150, Keep(newest=2, every=None))

    assert [saved.step for saved in second.complete()] == [150, 300]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), unique=True, min_size=1),
    st.integers(1, 5),
    st.none() | st.integers(1, 10),
)
def test_the_newest_is_never_deleted(found: list[tuple[int, int]], newest: int, every: int | None) -> None:
    saved = [Saved(path=f"{g}/{s}", step=s, generation=g) for g, s in sorted(found, reverse=True)]

    gone = obsolete(saved, Keep(newest=newest, every=every), {None, saved[-1].path})

    assert saved[0] not in gone
    assert saved[-1] not in gone
    assert len(saved) - len(gone) >= min(newest, len(saved))
    assert not any(every and each.step % every == 0 for each in gone)


def test_a_step_saved_again_takes_the_place(tmp_path: Path) -> None:
    store = claimed(tmp_path)
    save(store, 10, text="before")

    path = save(store, 10, text="after")

    assert Path(path, "data").read_text() == "after"
    verify(path)
    assert names(tmp_path) == {"step-000000000010"}


def test_what_was_replaced_comes_back_if_nothing_took_its_place(tmp_path: Path) -> None:
    """The process died between two renames."""
    path = save(claimed(tmp_path), 10)
    os.rename(path, tmp_path / ".replaced-000000000010")

    claimed(tmp_path)

    assert steps(tmp_path) == [10]
    verify(path)


# -- who may commit


def test_each_claim_is_the_next_generation(tmp_path: Path) -> None:
    assert [claimed(tmp_path).generation for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("name", [".lock", ".owner", ".owner.new", ".generation.new"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_that_lies_in_the_directory_is_not_followed(tmp_path: Path, name: str, there: bool) -> None:
    """Of another user's making it would have root write elsewhere; of `cp -rs` it is no lock of this directory."""
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "checkpoints"
    directory.mkdir()
    if there:
        elsewhere.write_text("of another")
    (directory / name).symlink_to(elsewhere)

    store = claimed(directory)
    save(store, 5)

    assert (elsewhere.read_text() if there else elsewhere.exists()) == ("of another" if there else False)
    assert steps(directory) == [5]
    assert not (directory / name).is_symlink()


def test_a_lost_number_is_not_counted_from_zero(tmp_path: Path) -> None:
    for _ in range(4):
        store = claimed(tmp_path)
    save(store, 10)
    (tmp_path / ".generation").write_text("torn\0")

    assert claimed(tmp_path).generation == 5


def test_an_older_generation_cannot_commit(tmp_path: Path) -> None:
    old = claimed(tmp_path)
    path = old.begin(10)
    new = claimed(tmp_path)
    save(new, 20)

    assert not os.path.exists(path)
    with pytest.raises(StaleError):
        save(old, 30)
    assert steps(tmp_path) == [20]


def test_leftovers_of_older_generations_are_cleared_away(tmp_path: Path) -> None:
    old = claimed(tmp_path)
    old.begin(10)
    (tmp_path / ".deleting-000000000005-g1").mkdir()
    (tmp_path / "mine.txt").write_text("not of this program")

    new = claimed(tmp_path)
    new.begin(20)

    assert names(tmp_path) == {".saving-000000000020-g2", "mine.txt"}


STALE = """
    import os, signal, sys, torch
    from gpulaunch.checkpoint import Checkpoint, store

    write = store.write
    def slow(directory, manifest):
        write(directory, manifest)
        print("written", flush=True)
        sys.stdin.readline()  # here it is stopped: everything is written, nothing committed

    store.write = slow
    ckpt = Checkpoint(model=torch.nn.Linear(1, 1), dir=sys.argv[1])
    if sys.argv[2:]:
        print("not begun", flush=True)
        sys.stdin.readline()
    ckpt.resume()
    for step in ckpt.steps(5):
        ckpt.step(save=step == 1)
"""


@pytest.mark.torch
@pytest.mark.parametrize("newer", [True, False], ids=["a newer one claims", "nobody claims"])
def test_a_process_stopped_in_its_save_finds_itself_replaced(tmp_path: Path, newer: bool) -> None:
    """It trains on, and its last save fails, with who has replaced it; its checkpoint of step 1 must not appear."""
    with rank_of_attempt_0(tmp_path) as process:
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        if newer:
            save(claimed(tmp_path, attempt=1), 7)

        process.send_signal(signal.SIGCONT)
        _, error = process.communicate("go on\n", timeout=60)

    assert process.returncode == (1 if newer else 0), error
    if newer:
        assert "was taken over by run the-job (" in error
        assert f"pid {os.getpid()} on " in error
        assert "CheckpointError: the last step, 5, was not saved in" in error
    else:
        assert not error
    assert steps(tmp_path) == ([7] if newer else [1, 5])
    assert names(tmp_path) == {f"step-{step:012d}" for step in steps(tmp_path)}


@pytest.mark.torch
def test_a_rank_of_an_older_attempt_that_comes_late_is_refused_for_ever(tmp_path: Path) -> None:
    """It was stopped before its first claim. The save of the newer attempt that is under way must stay; and the newer
    one need not live any more for the older to be refused."""
    with rank_of_attempt_0(tmp_path, "late") as process:
        assert process.stdout.readline() == "not begun\n"
        newer = os.fork()
        if not newer:
            claimed(tmp_path, attempt=1).begin(7)
            os._exit(0)
        assert os.waitpid(newer, 0) == (newer, 0)
        generation = (tmp_path / ".generation").read_text()

        said, error = process.communicate("\n\n", timeout=60)

    assert (process.returncode, said) == (69, "")
    assert "taken over by run the-job (" in error
    assert names(tmp_path) == {f".saving-{7:012d}-g{int(generation)}"}
    assert (tmp_path / ".generation").read_text() == generation


def test_a_rank_0_of_an_older_generation_on_another_node_is_refused_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has its own run and counts its own attempts; the job and its generations are the same for all."""

    def rank_0(run: str, attempt: int, generation: int) -> Store:
        monkeypatch.setenv("GPULAUNCH_RUN_ID", run)
        monkeypatch.setenv("GPULAUNCH_ATTEMPT", str(attempt))
        monkeypatch.setenv("GPULAUNCH_JOB", "the-job")
        monkeypatch.setenv("GPULAUNCH_GENERATION", str(generation))
        return Store(str(tmp_path))

    older, newer, newest = rank_0("node-a", 5, 1), rank_0("node-b", 0, 2), rank_0("node-c", 0, 3)
    newer.claim()
    under_way = newer.begin(7)

    with pytest.raises(StaleError):
        older.claim()

    assert os.path.isdir(under_way)
    newest.claim()  # at once: it need not wait for the host that is gone
    with pytest.raises(StaleError):
        newer.claim()


def rank_of_attempt_0(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STALE), directory, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GPULAUNCH_RUN_ID": "the-job", "GPULAUNCH_ATTEMPT": "0"},
    )


# -- who owns it


@pytest.fixture
def other() -> Iterator[Callable[..., int]]:
    """Start another process (give its pid) that owns directories until it is killed."""
    started: list[int] = []

    def start(*directories: Path, worker: bool = False, **environ: str) -> int:
        ready, tell = os.pipe()
        pid = os.fork()
        if not pid:
            os.environ.update(environ)
            for directory in directories:
                Store(str(directory)).claim()
            is_worker = worker and not os.fork()  # as of a dataloader, which outlives the run
            if not is_worker:
                os.write(tell, str(os.getpid()).encode())
            if is_worker or not worker:
                time.sleep(30)
            os._exit(0)
        started.append(pid)
        assert os.read(ready, 100)
        os.close(ready)
        os.close(tell)
        return pid

    yield start
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


SWEEP = """
    import sys, torch
    from gpulaunch.checkpoint import Checkpoint, store
    store.OWNER_WAIT_S = 0.2
    model = torch.nn.Linear(1, 1)
    ckpt = Checkpoint(model=model, every=1)
    print("resumed", ckpt.resume(), flush=True)
    for step in ckpt.steps(3):
        ckpt.step()
        if step == 2:
            sys.stdin.readline()
"""


@pytest.mark.torch
def test_two_live_runs_of_one_program_do_not_share_its_directory(tmp_path: Path) -> None:
    """Two `python sweep.py` at once: the second is refused by name, the first ends as if it were alone. A third, when
    the first is over, goes on from there: that is what the directory is for."""
    program = tmp_path / "sweep.py"
    program.write_text(textwrap.dedent(SWEEP))
    alike = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "sweep.py"], stdin=subprocess.PIPE, **alike) as first:
        assert first.stdout.readline() == "resumed None\n"
        second = subprocess.run([sys.executable, "sweep.py"], timeout=60, stdin=subprocess.DEVNULL, **alike)
        _, error = first.communicate("\n", timeout=60)

    assert (second.returncode, second.stdout) == (69, "")
    assert len(second.stderr.splitlines()) == 1
    assert f"(sweep.py, pid {first.pid} on " in second.stderr
    assert "save elsewhere (Checkpoint(dir=...), gpulaunch --checkpoint-dir)" in second.stderr
    assert (first.returncode, error) == (0, "")
    saved = Store(str(tmp_path / "checkpoints" / "sweep")).complete()
    assert [each.step for each in saved] == [3, 2, 1]
    third = subprocess.run([sys.executable, "sweep.py"], timeout=60, stdin=subprocess.DEVNULL, **alike)
    assert (third.returncode, third.stdout) == (0, "resumed 3\n"), third.stderr


@pytest.mark.torch
def test_a_job_whose_directory_another_run_holds_ends_with_69_at_once(
    gpulaunch: Any, other: Callable[..., int], tmp_path: Path
) -> None:
    """Not restarted, and never 93: that would fail a Job of Kubernetes for good."""
    (tmp_path / "sweep.py").write_text(textwrap.dedent(SWEEP))
    other(tmp_path / "held")

    ended = gpulaunch("--nproc", "2", "--max-restarts", "10", "--checkpoint-dir", tmp_path / "held", "sweep.py")

    assert ended.code == 69, ended
    assert "is in use by run" in ended.stderr
    assert "; 0 restarts; " in ended.stderr
    assert "another live run saves there; use one directory per run" in ended.stderr


def test_sweeps_with_names_of_their_own_share_a_parent(tmp_path: Path, other: Callable[..., object]) -> None:
    other(tmp_path / "lr-0.1", tmp_path / "lr-0.2")

    assert claimed(tmp_path / "lr-0.3").generation == 1


def test_the_owner_is_let_go_when_its_process_ends_though_a_worker_of_it_lives_on(
    tmp_path: Path, other: Callable[..., int]
) -> None:
    os.waitid(os.P_PID, other(tmp_path, worker=True), os.WEXITED | os.WNOWAIT)

    assert claimed(tmp_path).generation == 2


def test_a_newer_attempt_of_one_job_does_not_wait_for_an_older_that_was_stopped(
    tmp_path: Path, other: Callable[..., int]
) -> None:
    os.kill(other(tmp_path, GPULAUNCH_RUN_ID="the-job", GPULAUNCH_ATTEMPT="3"), signal.SIGSTOP)

    assert claimed(tmp_path, attempt=4).generation == 2


def test_a_job_that_was_ended_is_waited_for_a_moment(tmp_path: Path, other: Callable[..., int]) -> None:
    """Its launcher was killed and is started again: its ranks are still dying."""
    timer = threading.Timer(0.5, os.kill, (other(tmp_path, GPULAUNCH_RUN_ID="the launcher before"), signal.SIGKILL))
    timer.start()

    assert claimed(tmp_path).generation == 2
    timer.join()


def test_an_owner_on_another_host_is_waited_for_until_its_lease_ends(
    tmp_path: Path, other: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The host has died; the NFS server gives its locks back later than a requeued job starts."""
    monkeypatch.setattr(stores, "OWNER_WAIT_S", 0.1)
    timer = threading.Timer(0.5, os.kill, (other(tmp_path, GPULAUNCH_RUN_ID="the job before"), signal.SIGKILL))
    timer.start()
    store = Store(str(tmp_path))
    store.owner = replace(store.owner, host="another-node")

    assert store.claim() == 2

    timer.join()
    (said,) = capfd.readouterr().err.splitlines()
    assert f"waiting up to 100 s for {tmp_path}: it is in use by run the job before" in said


def test_two_ranks_that_do_not_know_of_each_other_are_not_one_owner(
    tmp_path: Path, other: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without a process group, in which each rank saves for itself, into one directory."""
    monkeypatch.setattr(stores, "OWNER_WAIT_S", 0.1)
    other(tmp_path, GPULAUNCH_RUN_ID="the-job", GPULAUNCH_ATTEMPT="1")

    with pytest.raises(InUseError, match="in use by run the-job"):
        claimed(tmp_path, attempt=1)


def test_where_nothing_can_be_locked_the_numbers_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre without `flock`: two live runs are not kept apart, but the first finds out, and saves nothing."""

    def cannot(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(ownership.fcntl, "flock", cannot)
    first = claimed(tmp_path)
    save(first, 1)
    save(claimed(tmp_path), 2)

    with pytest.raises(StaleError, match="run "):
        save(first, 3)
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("content", ["", "torn", "[]", '{"run": 1}', "[" * 5000])
def test_a_damaged_owner_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / ".owner").write_text(content)

    assert claimed(tmp_path).generation == 1


def test_a_dataloader_worker_that_was_forked_over_a_commit_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all that was open then, and lives for an epoch: no checkpoint would be saved meanwhile."""
    store = claimed(tmp_path)
    monkeypatch.setattr(stores, "LOCK_WAIT_S", 2.0)
    ends, lives = os.pipe()
    with store.locked():
        worker = os.fork()
        if not worker:
            os.close(lives)
            os.read(ends, 1)
            os._exit(0)
    try:
        save(store, 10)
        assert os.waitpid(worker, os.WNOHANG) == (0, 0), "and it is still there"
    finally:
        os.close(lives)
        os.close(ends)
        os.waitpid(worker, 0)


def test_whoever_holds_the_lock_for_ever_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = claimed(tmp_path)
    monkeypatch.setattr(stores, "LOCK_WAIT_S", 0.05)

    with store.locked(), pytest.raises(TimeoutError, match="another process holds its"):
        claimed(tmp_path)
