"""The directory: what is kept, who may commit, and what is left of those who were stopped in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.checkpoint import _store
from gpulaunch.checkpoint._store import Keep, Saved, StaleError, Store, obsolete
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


def claimed(path: Path) -> Store:
    store = Store(str(path))
    store.claim()
    return store


def steps(path: Path) -> list[int]:
    return sorted(saved.step for saved in Store(str(path)).complete())


def names(path: Path) -> set[str]:
    return {entry for entry in os.listdir(path) if entry not in (".lock", ".generation")}


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
    import sys, torch
    from gpulaunch.checkpoint import Checkpoint, _store

    write = _store.write
    def slow(directory, manifest):
        write(directory, manifest)
        print("written", flush=True)
        sys.stdin.readline()  # here it is stopped: everything is written, nothing committed

    _store.write = slow
    ckpt = Checkpoint(model=torch.nn.Linear(1, 1), dir=sys.argv[1])
    ckpt.resume()
    for step in ckpt.steps(5):
        ckpt.step(save=step == 1)
    print("at the end", flush=True)
"""


@pytest.mark.torch
@pytest.mark.parametrize("newer", [True, False], ids=["a newer one claims", "nobody claims"])
def test_a_process_stopped_in_its_save_finds_itself_replaced(tmp_path: Path, newer: bool) -> None:
    """It trains on, and says that nothing is saved any more; its checkpoint of step 1 must not appear."""
    command = [sys.executable, "-c", textwrap.dedent(STALE), str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        if newer:
            save(claimed(tmp_path), 7)

        process.send_signal(signal.SIGCONT)
        said, error = process.communicate("go on\n", timeout=60)

    assert process.returncode == 0, error
    assert said.endswith("at the end\n")
    assert error.count("a newer run has taken over") == (1 if newer else 0)
    assert steps(tmp_path) == ([7] if newer else [1, 5])
    assert names(tmp_path) == {f"step-{step:012d}" for step in steps(tmp_path)}


def test_a_dataloader_worker_that_was_forked_over_a_commit_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all that was open then, and lives for an epoch: no checkpoint would be saved meanwhile."""
    store = claimed(tmp_path)
    monkeypatch.setattr(_store, "LOCK_WAIT_S", 2.0)
    ends, lives = os.pipe()
    with store._locked():
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
    monkeypatch.setattr(_store, "LOCK_WAIT_S", 0.05)

    with store._locked(), pytest.raises(TimeoutError, match="another process holds its"):
        claimed(tmp_path)
