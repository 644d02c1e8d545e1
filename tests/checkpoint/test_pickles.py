"""Pickles read as data: the same values as pickle gives, and nothing of what pickle would do."""

from __future__ import annotations

import io
import os
import pickle
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulaunch.launcher.checkpoint import pickles
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.find import examine, find
from gpulaunch.launcher.checkpoint.pickles import PickledObject

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


class Evil:
    """Creates a file when it is loaded."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


def as_plain(value: object) -> object:
    """What the reader gives, with its dicts as dicts."""
    match value:
        case PickledObject(name="dict"):
            return {as_plain(key): as_plain(one) for key, one in value.pairs}
        case list():
            return [as_plain(one) for one in value]
        case tuple():
            return tuple(as_plain(one) for one in value)
        case _:
            return value


@given(plain, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_they_were_written(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    # Before protocol 3 bytes are made by a call, which is a name here.
    wanted = value if protocol >= 3 else None

    read = as_plain(pickles.read(data).value)

    assert wanted is None or read == wanted


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_objects_are_names_with_what_they_were_given(protocol: int) -> None:
    value = pickles.read(pickle.dumps(OrderedDict(step=3), protocol)).value

    assert isinstance(value, PickledObject)
    assert (value.name, value.get("step"), value.get("other")) == ("collections.OrderedDict", 3, None)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_damaged(data: bytes) -> None:
    for one in (data, b"\x80\x04" + data, data + b"."):
        try:
            pickles.read(one)
        except Damaged:
            continue


@settings(max_examples=300)
@given(plain, st.integers(0, 5), st.data())
def test_a_truncated_pickle_is_damaged(value: object, protocol: int, data: st.DataObject) -> None:
    whole = pickle.dumps(value, protocol)

    with pytest.raises(Damaged, match="not a whole pickle"):
        pickles.read(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_a_pickle_that_claims_to_be_huge_reserves_nothing() -> None:
    with pytest.raises(Damaged):
        pickles.read(b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b"x.")


def test_a_pickle_that_refers_to_itself_a_billion_times_over_is_read() -> None:
    bomb: list[Any] = []
    for _ in range(200):
        bomb = [bomb, bomb]

    assert isinstance(pickles.read(pickle.dumps(bomb)).value, list)


class Shard:
    """What an object of torch's costs in a pickle."""

    def __init__(self, name: str, at: tuple[int, int]) -> None:
        self.name, self.at = name, at


def test_a_malicious_metadata_does_nothing(tmp_path: Path) -> None:
    for place, content in (("step-1/.metadata", Evil(tmp_path / "w")), ("step-2/.metadata", [Evil(tmp_path / "w")])):
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).write_bytes(pickle.dumps(content))
        (tmp_path / place).with_name("__0_0.distcp").write_bytes(b"")

    search = find([str(tmp_path)])

    assert not search.found
    assert {one.why for one in search.skipped} == {".metadata names no shards"}
    assert not (tmp_path / "w").exists()
    pickle.loads((tmp_path / "step-1/.metadata").read_bytes())
    assert (tmp_path / "w").exists()  # the positive control: loaded, it acts


@pytest.mark.parametrize("name", ["model_1.pt", "epoch=1-step=1.ckpt"])
def test_a_malicious_checkpoint_file_does_nothing(tmp_path: Path, name: str) -> None:
    """It is whole, so it is found: whether to load it is the program's own decision, as with torch.load."""
    with zipfile.ZipFile(tmp_path / name, "w") as made:
        made.writestr("archive/data.pkl", pickle.dumps({"global_step": 7, "x": Evil(tmp_path / "w")}))
        made.writestr("archive/version", "3\n")

    assert len(find([str(tmp_path)]).found) == 1
    assert examine(str(tmp_path / name)).step == (7 if name.endswith(".ckpt") else 1)
    assert not (tmp_path / "w").exists()


def test_the_reader_takes_files_as_well_and_stops_at_the_end() -> None:
    file = io.BytesIO(pickle.dumps(1) + pickle.dumps(2))

    assert [pickles.read(file).value, pickles.read(file).value] == [1, 2]


MANY = 16 << 20


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04" + b"]" * MANY + b".",
        b"\x80\x04(" + b"}" * MANY + b"t.",
        b"\x80\x04]" + b"\x94" * MANY + b".",
        b"\x80\x04)" + b"\x85" * MANY + b".",
        b"\x80\x04" + b"ca\nb\n" * (MANY // 5) + b".",
        b"\x80\x04](" + b"K\x01" * (MANY // 2) + b"e.",
    ],
    ids=["lists", "dicts", "memo", "tuples", "names", "a stack"],
)
def test_a_small_file_that_makes_millions_of_objects_is_refused_before_it_has_made_them(data: bytes) -> None:
    """A `.metadata` of 16 MB took 1.1 GB to look at."""
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="more objects than its size allows"):
            pickles.read(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes - len(data) < 80 << 20


def test_a_large_description_of_shards_is_read() -> None:
    """As dense as torch writes `.metadata`: 12,000 shards here; 100,000 (14 MB) took 168 MB."""
    shards = {
        Shard(f"model.layers.{n // 100}.weight", (n, 0)): Shard(f"__{n}_0.distcp", (n * 2**21, 7))
        for n in range(12_000)
    }

    assert len(pickles.read(pickle.dumps(shards)).value.pairs) == 12_000
