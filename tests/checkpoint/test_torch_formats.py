"""What torch itself writes: torch.save in its two formats, and torch.distributed.checkpoint."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulaunch.launcher.checkpoint import pickles
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.find import examine, find

pytestmark = pytest.mark.torch


# --- torch.save ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", ["new.pt", "old.pt", "script.pt", "nocrc.pt"])
def test_a_whole_file_is_a_checkpoint(put: Callable[..., Path], sample: str) -> None:
    path = put(sample, "model_20.pt")

    checkpoint = examine(str(path))

    assert (checkpoint.path, checkpoint.format, checkpoint.step) == (str(path), "torch", 20)
    assert checkpoint.size_bytes == path.stat().st_size
    assert checkpoint.saved_s == path.stat().st_mtime


@pytest.mark.parametrize("sample", ["new.pt", "old.pt", "script.pt", "nocrc.pt"])
@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_file_that_was_cut_off_is_not(put: Callable[..., Path], sample: str, cut: int, damage: object) -> None:
    path = put(sample, "model_20.pt")
    path.write_bytes(path.read_bytes()[:-cut])

    with pytest.raises(Damaged, match=r"model_20\.pt: "):
        examine(str(path))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_truncation_of_the_old_format_is_found(put: Callable[..., Path], data: st.DataObject) -> None:
    path = put("old.pt", "model_20.pt")
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])

    with pytest.raises(Damaged):
        examine(str(path))


def test_something_after_the_end_is_damage(put: Callable[..., Path]) -> None:
    """A shorter file written over a longer one."""
    for sample in ("new.pt", "old.pt"):
        path = put(sample, "model_20.pt")
        path.write_bytes(path.read_bytes() + b"\0" * 100)
        with pytest.raises(Damaged, match=r"something follows it|its storages end at byte"):
            examine(str(path))


def test_what_is_no_file_of_torch_is_refused_with_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for content, why in ((b"", "it is empty"), (b"hello", "begins with b'hell'"), (pickle.dumps([1]), "begins with")):
        path.write_bytes(content)
        with pytest.raises(Damaged, match=why):
            examine(str(path))
    with pytest.raises(Damaged, match="no such file"):
        examine(str(tmp_path / "gone.pt"))


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------------


def test_a_whole_directory_is_a_checkpoint(put: Callable[..., Path]) -> None:
    path = put("dcp", "run/step_20")
    shards = sorted(one.name for one in path.glob("*.distcp"))

    search = find([str(path.parent)])

    assert shards == ["__0_0.distcp", "__0_1.distcp"]
    assert [(one.path, one.format, one.step, one.key) for one in search.found] == [(str(path), "dcp", 20, "step_20")]
    assert search.found[0].size_bytes == sum(one.stat().st_size for one in path.iterdir())


def test_its_metadata_is_read_as_torch_reads_it(samples: Path) -> None:
    """The positive control of reading without unpickling: the very numbers, and each names an archive in its file."""
    metadata = pickles.read((samples / "dcp/.metadata").read_bytes()).value
    infos = [info for _, info in metadata.get("storage_data").pairs]

    assert len(infos) > 5
    for info in infos:
        data = (samples / "dcp" / info.get("relative_path")).read_bytes()
        item = data[info.get("offset") : info.get("offset") + info.get("length")]
        assert item.startswith(b"PK\x03\x04")
        assert item[-22:].startswith(b"PK\x05\x06")


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: (path / "__0_1.distcp").unlink(), "__0_1.distcp is missing"),
        (lambda path: (path / ".metadata").unlink(), "no .metadata: the save was not finished"),
        (lambda path: (path / ".metadata").rename(path / ".metadata.tmp"), "no .metadata: the save was not finished"),
        (lambda path: shorten(path / "__0_0.distcp"), r"__0_0.distcp has \d+ of \d+ bytes"),
        (lambda path: shorten(path / ".metadata"), ".metadata: not a whole pickle"),
        (lambda path: (path / ".metadata").write_bytes(b""), ".metadata: not a whole pickle"),
        (lambda path: (path / ".metadata").write_bytes(pickle.dumps({})), ".metadata names no shards"),
    ],
)
def test_a_part_that_is_missing_or_short_is_named(
    put: Callable[..., Path], harm: Callable[[Path], object], why: str
) -> None:
    path = put("dcp", "run/step_20")
    harm(path)

    search = find([str(path.parent)])

    assert search.found == ()
    assert [(one.path, one.format) for one in search.skipped] == [(str(path), "dcp")]
    assert re.fullmatch(f".*{why}.*", search.skipped[0].why), search.skipped[0].why


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_flipped_bit_of_the_data_in_a_shard_is_found(put: Callable[..., Path], data: st.DataObject) -> None:
    path = put("dcp_small", "step_20") / "__0_0.distcp"
    whole = bytearray(path.read_bytes())
    # The bytes of the tensors and pickles, and the four that make an item an archive.
    places = [found.end() for found in re.finditer(rb"Z{4,}", whole)] + [0, 1, 2, 3]
    at = data.draw(st.sampled_from(places))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)

    with pytest.raises(Damaged, match=r"__0_0\.distcp: the item at byte"):
        examine(str(path.parent))


def test_an_item_that_is_no_archive_is_taken_by_its_length(tmp_path: Path) -> None:
    """Raw tensors, or what an extension compressed: there is nothing to compare the bytes with."""
    write_dcp(tmp_path / "step_1", {"__0_0.distcp": b"raw bytes of a tensor, as they are"})

    assert examine(str(tmp_path / "step_1")).step == 1


def test_a_shard_of_zeros_is_found(put: Callable[..., Path], tmp_path: Path) -> None:
    """What a crash leaves of a file whose blocks had not reached the disk: the right length, and nothing in it."""
    path = put("dcp", "step_1") / "__0_1.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(Damaged, match=r"__0_1\.distcp: the item at byte 0 is all zeros"):
        examine(str(path.parent))

    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(Damaged, match=r"__0_1\.distcp: the item at byte 0 is not an archive, unlike the others"):
        examine(str(path.parent))

    write_dcp(tmp_path / "step_2", {"__0_0.distcp": bytes(100)})
    with pytest.raises(Damaged, match="is all zeros"):
        examine(str(tmp_path / "step_2"))


def test_a_shard_outside_the_directory_is_refused(tmp_path: Path) -> None:
    write_dcp(tmp_path / "step_1", {"../secret": b"x" * 30})

    with pytest.raises(Damaged, match=r"names the file '\.\./secret'"):
        examine(str(tmp_path / "step_1"))


def test_a_save_without_collectives_has_metadata_for_every_rank(put: Callable[..., Path]) -> None:
    """torch 2.13, filesystem.py: _get_metadata_path(rank) gives `__<rank>.metadata`."""
    path = put("dcp", "step_20")
    (path / ".metadata").rename(path / "__0.metadata")
    assert examine(str(path)).format == "dcp"

    (path / "__0.metadata").rename(path / "__1.metadata")
    with pytest.raises(Damaged, match=r"__0\.metadata is missing"):
        examine(str(path))


def write_dcp(path: Path, shards: dict[str, bytes]) -> None:
    """A checkpoint with these shards, without torch: dicts for its objects, whose attributes are what is looked at."""
    path.mkdir(parents=True)
    for name, content in shards.items():
        (path / name).write_bytes(content)
    infos = {name: {"relative_path": name, "offset": 0, "length": len(content)} for name, content in shards.items()}
    (path / ".metadata").write_bytes(pickle.dumps({"storage_data": infos}))


# --- safetensors --------------------------------------------------------------------------------------------------


def test_a_safetensors_file_is_whole_when_its_header_says_so(tmp_path: Path, safetensors: Callable[..., bytes]) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(weight=[8, 32], bias=[8], empty=[0]))

    assert examine(str(path)).format == "safetensors"

    for broken, why in (
        (path.read_bytes()[:-1], r"has \d+ of \d+ bytes"),
        (path.read_bytes() + b"\0", r"has \d+ of \d+ bytes"),
        (path.read_bytes()[:5], "its header needs"),
        (path.read_bytes()[:50], "its header needs"),
        (b"\xff" * 8 + path.read_bytes()[8:], "its header needs"),
        (path.read_bytes().replace(b"[8, 32]", b"[8, 33]"), "invalid for tensor weight"),
        (path.read_bytes().replace(b'"weight"', b'"weight'), "is not JSON"),
        (b"", "its header needs"),
    ):
        path.write_bytes(broken)
        with pytest.raises(Damaged, match=why):
            examine(str(path))
        path.write_bytes(safetensors(weight=[8, 32], bias=[8], empty=[0]))


def test_it_agrees_with_the_library_that_defines_the_format(tmp_path: Path, safetensors: Callable[..., bytes]) -> None:
    library = pytest.importorskip("safetensors")
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(weight=[8, 32], bias=[8]))

    with library.safe_open(path, "np") as opened:
        assert opened.keys() == ["bias", "weight"] or set(opened.keys()) == {"bias", "weight"}
    shorten(path)
    with pytest.raises(library.SafetensorError):
        library.safe_open(path, "np").__enter__()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_header_raises_anything_but_damaged(
    tmp_path: Path, safetensors: Callable[..., bytes], data: st.DataObject
) -> None:
    whole = bytearray(safetensors(weight=[2, 2], bias=[2]))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole)

    try:
        examine(str(path))
    except Damaged:
        return


def test_a_model_in_several_files_needs_them_all(tmp_path: Path, safetensors: Callable[..., bytes]) -> None:
    shards = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    for shard in shards:
        (tmp_path / shard).write_bytes(safetensors(weight=[4]))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}))

    search = find([str(tmp_path)])
    assert [(one.format, one.key) for one in search.found] == [("safetensors", ".")]

    (tmp_path / shards[1]).unlink()
    search = find([str(tmp_path)])
    assert [one.why for one in search.skipped] == [f"{shards[1]} is missing"]
    assert search.found == ()

    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    assert find([str(tmp_path)]).skipped[0].why.endswith("names the file '../x.safetensors'")


# --- what tells two of one name apart -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "same"),
    [
        ({"step": 200, "model": 1.0}, {"step": 100, "model": 1.0}, False),
        ({"step": 200, "rng": 1}, {"step": 200, "rng": 2}, True),
        ({"epoch": 3, "iter_num": 7}, {"epoch": 3, "iter_num": 8}, False),
        ({"epoch": 3, "model": 1.0}, {"epoch": 3, "model": 2.0}, False),
        ({"epoch": 3, "model": 1.0}, {"epoch": 3, "model": 1.0}, True),
        ({"model": 1.0}, {"model": 1.0}, True),
        ({"model": 1.0}, {"model": 2.0}, False),
    ],
)
def test_two_files_of_one_name_are_one_checkpoint_where_they_are_of_one_step(
    tmp_path: Path, here: object, there: object, same: bool
) -> None:
    """`last.pt` on the nodes' own disks. Without a step in it, it must be the same to the last bit."""
    identities: list[str] = []
    for node, content in (("a", here), ("b", there)):
        (tmp_path / node).mkdir()
        torch.save(content, tmp_path / node / "last.pt")
        identities.append(find([str(tmp_path / node)], identify=True, content_s=0).found[0].identity)

    assert (identities[0] == identities[1]) is same
