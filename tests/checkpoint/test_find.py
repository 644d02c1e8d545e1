"""The search: which checkpoint is the newest, what is no candidate, and that nothing in a directory can break it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulaunch.launcher.checkpoint import scan
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.find import Search, examine, find
from gpulaunch.launcher.checkpoint.source import Entry, Local

pytestmark = pytest.mark.torch

Put = Callable[..., Path]


def keys(search: Search) -> list[str]:
    assert search.error == ""
    return [one.key for one in search.found]


def saved_at(path: Path, when_s: float) -> None:
    """Set the times of a checkpoint's files."""
    for one in [*path.rglob("*"), path]:
        os.utime(one, (when_s, when_s))


# --- which is the newest ------------------------------------------------------------------------------------------


def test_in_one_series_the_higher_step_is_newer_whatever_the_times(put: Put, tmp_path: Path) -> None:
    for step, when_s in ((9, 300), (10, 100), (100, 200)):
        saved_at(put("new.pt", f"model_{step}.pt"), when_s)

    assert keys(find([str(tmp_path)], limit=9)) == ["model_100.pt", "model_10.pt", "model_9.pt"]


def test_between_series_the_later_time_is_newer(put: Put, tmp_path: Path) -> None:
    for place, when_s in (("a/model_100.pt", 100), ("b/model_5.pt", 200), ("c/last.ckpt", 300)):
        saved_at(put("new.pt", place), when_s)
    saved_at(put("dcp_small", "step-50"), 250)

    assert keys(find([str(tmp_path)], limit=9)) == ["c/last.ckpt", "step-50", "b/model_5.pt", "a/model_100.pt"]


def test_a_copied_series_keeps_its_order_beside_another(put: Put, tmp_path: Path) -> None:
    """Step 20 was copied before step 10, and is no older for that: no order of pairs that leads in a circle."""
    for name, when_s in (("step_20.pt", 100), ("step_10.pt", 300), ("last.ckpt", 200)):
        saved_at(put("new.pt", name), when_s)

    assert keys(find([str(tmp_path)], limit=9)) == ["step_20.pt", "step_10.pt", "last.ckpt"]


def test_epochs_count_as_steps_do_and_are_not_called_steps(put: Put, tmp_path: Path) -> None:
    for epoch in (2, 10):
        put("new.pt", f"model_epoch_{epoch}.pt")

    search = find([str(tmp_path)], limit=9)

    assert keys(search) == ["model_epoch_10.pt", "model_epoch_2.pt"]


def test_bare_weights_come_last(put: Put, tmp_path: Path, safetensors: Callable[..., bytes]) -> None:
    saved_at(put("new.pt", "model_5.pt"), 100)
    (tmp_path / "model.safetensors").write_bytes(safetensors(weight=[2]))
    put("new.pt", "pytorch_model.bin")

    found = keys(find([str(tmp_path)], limit=9))

    assert found[0] == "model_5.pt"
    assert set(found[1:]) == {"model.safetensors", "pytorch_model.bin"}


def test_several_roots_are_one_search_and_nested_ones_count_once(put: Put, tmp_path: Path) -> None:
    saved_at(put("new.pt", "a/model_1.pt"), 100)
    saved_at(put("new.pt", "b/model_2.pt"), 200)

    search = find([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path)], limit=9)

    assert [one.path for one in search.found] == [str(tmp_path / "b/model_2.pt"), str(tmp_path / "a/model_1.pt")]


def test_only_as_many_as_asked_are_read_and_only_newer_ones_are_told(put: Put, tmp_path: Path) -> None:
    for step in range(5):
        put("new.pt", f"model_{step}.pt")
    for step in (1, 4):
        (tmp_path / f"model_{step}.pt").write_bytes(b"")

    search = find([str(tmp_path)])

    assert keys(search) == ["model_3.pt"]
    assert [(one.path, one.why) for one in search.skipped] == [
        (str(tmp_path / "model_4.pt"), "model_4.pt: it is empty"),
    ]


# --- what is no candidate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        ".hidden/model_1.pt",
        "tmp-checkpoint-5/model_1.pt",
        "step_5.tmp/model_1.pt",
        "model_1.pt.tmp",
        "attempts/0/model_1.pt",
        "a/b/c/d/e/model_1.pt",
    ],
)
def test_what_is_unfinished_hidden_or_too_deep_is_not_looked_at(put: Put, tmp_path: Path, place: str) -> None:
    put("new.pt", place)

    assert find([str(tmp_path)]) == Search()


def test_the_parts_of_a_directory_are_never_candidates(put: Put, tmp_path: Path) -> None:
    path = put("dcp_small", "step-5")
    put("new.pt", "step-5/extra_7.pt")
    (path / "__0_0.distcp").unlink()

    search = find([str(tmp_path)], limit=9)

    assert search.found == ()
    assert [one.path for one in search.skipped] == [str(path)]


def test_the_root_itself_can_be_the_checkpoint(put: Put, tmp_path: Path) -> None:
    path = put("dcp_small", "latest_state")

    assert [(one.path, one.key) for one in find([str(path)]).found] == [(str(path), ".")]


def test_links_are_not_followed_in_circles_and_linked_files_count(put: Put, tmp_path: Path) -> None:
    path = put("new.pt", "run/model_1.pt")
    (tmp_path / "run/again").symlink_to(tmp_path)
    (tmp_path / "run/last.ckpt").symlink_to("model_1.pt")
    (tmp_path / "run/dangling.pt").symlink_to("gone.pt")
    os.mkfifo(tmp_path / "run/pipe.pt")

    search = find([str(path.parent)], limit=9)

    assert (sorted(keys(search)), search.skipped) == (["last.ckpt", "model_1.pt"], ())


# --- what can go wrong --------------------------------------------------------------------------------------------


def test_a_root_that_is_missing_or_a_file_has_nothing(put: Put, tmp_path: Path) -> None:
    assert find([str(tmp_path / "gone")]) == Search()
    search = find([str(put("new.pt", "model_1.pt"))])
    assert [one.why for one in search.skipped] == ["cannot be read: Not a directory"]


def test_a_directory_that_cannot_be_read_is_told_and_the_rest_is_searched(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("new.pt", "a/model_1.pt", "b/model_2.pt")
    listing = Local.listing

    def refuse(self: Local, path: str, at_most: int) -> list[Entry]:
        if path == "b":
            raise PermissionError(13, "Permission denied")
        return listing(self, path, at_most)

    monkeypatch.setattr(Local, "listing", refuse)  # root may read everything: the refusal is made here
    search = find([str(tmp_path)])

    assert keys(search) == ["a/model_1.pt"]
    assert [(one.path, one.why) for one in search.skipped] == [
        (str(tmp_path / "b"), "cannot be read: Permission denied")
    ]


def test_a_directory_with_too_many_entries_is_searched_as_far_as_the_bound(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "MAX_ENTRIES", 20)
    for number in range(30):
        (tmp_path / f"note-{number:02d}").touch()

    search = find([str(tmp_path)])

    assert [one.why for one in search.skipped] == ["contains more than 20 entries: the rest was not searched"]


def test_names_that_are_no_text_do_no_harm(put: Put, tmp_path: Path) -> None:
    path = put("new.pt", "model_1.pt")
    os.rename(path, os.path.join(os.fsencode(tmp_path), b"model_\xff\n_2.pt"))

    assert len(find([str(tmp_path)]).found) == 1


# --- a user's pattern ---------------------------------------------------------------------------------------------


def test_with_a_pattern_only_what_it_matches_is_a_candidate(put: Put, tmp_path: Path) -> None:
    put("new.pt", "model_3.pt", "model_20.pt", "other_99.pt", "deep/model_50.pt")

    search = find([str(tmp_path)], pattern="model_{step}.pt", limit=9)

    assert [(one.key, one.step, one.format) for one in search.found] == [
        ("model_20.pt", 20, "torch"),
        ("model_3.pt", 3, "torch"),
    ]


def test_a_pattern_of_directories_takes_whatever_can_be_verified_in_them(put: Put, tmp_path: Path) -> None:
    put("new.pt", *(f"run-a/step_{step}/{name}" for step in (1, 2) for name in ("model.pt", "optim.pt")))
    put("dcp_small", "run-b/step_1")
    (tmp_path / "run-b/step_9").mkdir()
    (tmp_path / "run-a/step_2/optim.pt").write_bytes(b"")

    search = find([str(tmp_path)], pattern="run-*/step_{step}/", limit=9)

    assert {(one.key, one.format, one.step) for one in search.found} == {
        ("run-a/step_1", "pattern", 1),
        ("run-b/step_1", "dcp", 1),
    }
    assert {(os.path.relpath(one.path, tmp_path), one.why) for one in search.skipped} == {
        ("run-a/step_2", "optim.pt: it is empty"),
        ("run-b/step_9", "it contains nothing that can be verified"),
    }


def test_a_pattern_that_fits_nothing_of_what_is_there_is_said(put: Put, tmp_path: Path) -> None:
    put("new.pt", "mine/model_3.pt")
    mine, other = str(tmp_path / "mine"), str(tmp_path / "other")

    def said(pattern: str) -> list[tuple[str, str]]:
        return [(one.path, one.why) for one in find([mine, other], pattern=pattern).skipped]

    assert said("ckpt-{step}.pt") == [(mine, "nothing in it matches the pattern 'ckpt-{step}.pt': model_3.pt does not")]
    assert said("model_{step}.pt") == []
    put("new.pt", "other/ckpt-3.pt")
    assert said("ckpt-{step}.pt") == [], "in one of the directories is enough"


def test_a_pattern_that_makes_no_sense_is_said(tmp_path: Path) -> None:
    assert "more than once" in find([str(tmp_path)], pattern="{step}/{step}").error


# --- the memory ---------------------------------------------------------------------------------------------------


def test_an_unchanged_file_is_not_read_twice_and_a_changed_one_is(
    put: Put, tmp_path: Path, no_settling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    from gpulaunch.launcher.checkpoint import archive

    check_data = archive.check_data
    monkeypatch.setattr(archive, "check_data", lambda *args: (reads.append(1), check_data(*args))[1])
    memory = str(tmp_path / "verified.json")
    root = put("dcp", "run/step-2").parent
    put("new.pt", "run/model_1.pt")

    first = find([str(root)], limit=9, memory=memory)
    whole = len(reads)
    second = find([str(root)], limit=9, memory=memory)

    assert first == second
    assert whole > 2
    assert len(reads) == whole

    # Another bit, the same size: its times have changed, so it is read, and found damaged.
    data = bytearray((root / "model_1.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (root / "model_1.pt").write_bytes(data)
    search = find([str(root)], limit=9, memory=memory)
    assert keys(search) == ["step-2"]
    assert len(search.skipped) == 1

    # What is only structure is looked at every time.
    os.truncate(root / "step-2/__0_0.distcp", 10)
    assert keys(find([str(root)], limit=9, memory=memory)) == []


def test_what_was_written_just_now_is_not_remembered(put: Put, tmp_path: Path) -> None:
    memory = tmp_path / "verified.json"
    root = put("new.pt", "run/model_1.pt").parent

    find([str(root)], memory=str(memory))

    assert not memory.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"files": 3}', b'{"files": {"a": 1}}', b"\xff\xfe"])
def test_a_damaged_memory_is_as_good_as_none(put: Put, tmp_path: Path, no_settling: None, content: bytes) -> None:
    memory = tmp_path / "verified.json"
    memory.write_bytes(content)
    root = put("new.pt", "run/model_1.pt").parent

    assert keys(find([str(root)], memory=str(memory))) == ["model_1.pt"]
    assert b"model_1.pt" in memory.read_bytes()


def test_a_memory_that_cannot_be_written_does_no_harm(put: Put, tmp_path: Path, no_settling: None) -> None:
    root = put("new.pt", "run/model_1.pt").parent

    assert keys(find([str(root)], memory=str(tmp_path / "gone/verified.json"))) == ["model_1.pt"]


# --- the whole ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_nothing_is_found_that_does_not_verify_or_that_was_harmed(
    put: Put, tmp_path: Path, samples: Path, data: st.DataObject
) -> None:
    """Random harm to random files: what is found verifies, is not harmed, and is the newest that is not."""
    for step in (1, 2, 3):
        put("dcp_small", f"run/step_{step}")
        put("new.pt", f"run/model_{step}.pt")
    harmed: set[str] = set()
    for _ in range(data.draw(st.integers(0, 5))):
        key, name = data.draw(
            st.sampled_from(
                [(f"step_{n}", f"step_{n}/{part}") for n in (1, 2, 3) for part in (".metadata", "__0_0.distcp")]
                + [(f"model_{n}.pt", f"model_{n}.pt") for n in (1, 2, 3)]
            )
        )
        path = tmp_path / "run" / name
        how = data.draw(st.sampled_from(["cut", "remove", "zeros"]))
        if not path.exists():
            continue
        size = path.stat().st_size
        if how == "remove":
            path.unlink()
        elif how == "cut" and size:
            os.truncate(path, data.draw(st.integers(0, size - 1)))
        else:
            path.write_bytes(bytes(size))
        harmed.add(key)

    search = find([str(tmp_path / "run")], limit=9)

    assert {one.key for one in search.found} == {f"step_{n}" for n in (1, 2, 3)} - harmed | {
        f"model_{n}.pt" for n in (1, 2, 3)
    } - harmed
    for one in search.found:
        assert examine(one.path).size_bytes == one.size_bytes
    for refused in search.skipped:
        with pytest.raises(Damaged):
            examine(refused.path)
    shutil.rmtree(tmp_path / "run")


def test_examine_of_a_users_directory_takes_all_that_is_in_it(put: Put) -> None:
    path = put("new.pt", "my/step_7/model.pt", "my/step_7/extra.pth").parent

    found = examine(f"{path}/")

    assert (found.path, found.format, found.step, found.key) == (str(path), "pattern", 7, "step_7")
    (path / "extra.pth").write_bytes(b"")
    with pytest.raises(Damaged, match=r"extra\.pth: it is empty"):
        examine(str(path))


def test_examine_of_a_directory_of_checkpoints_takes_the_newest_in_it(put: Put) -> None:
    root = put("dcp_small", "run/step_1", "run/step_2").parent

    assert examine(str(root)).path == str(root / "step_2")

    for step in (1, 2):
        (root / f"step_{step}/__0_0.distcp").unlink()
    with pytest.raises(Damaged, match=r"it contains nothing complete: step_2: __0_0\.distcp is missing"):
        examine(str(root))
    (root / "empty").mkdir()
    with pytest.raises(Damaged, match="it contains nothing that can be verified"):
        examine(str(root / "empty"))


def test_only_what_was_saved_since_a_time(put: Put, tmp_path: Path) -> None:
    """A run that began with a named checkpoint goes on from its own, though others have higher steps."""
    for step, when_s in ((9, 100), (3, 300)):
        saved_at(put("new.pt", f"model_{step}.pt"), when_s)

    assert keys(find([str(tmp_path)], limit=9)) == ["model_9.pt", "model_3.pt"]
    assert keys(find([str(tmp_path)], limit=9, since_s=200)) == ["model_3.pt"]
    assert keys(find([str(tmp_path)], since_s=301)) == []
