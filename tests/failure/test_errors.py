"""Error files from everywhere: whatever lies at the path, reading it gives an error, or None and a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.failure.errors import READ_CAP_BYTES, examine


def write(path: Path, document: object) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def test_torchs_own_layout(tmp_path: Path) -> None:
    extra = {"py_callstack": "Traceback ...", "timestamp": "1690000000"}
    error = examine(write(tmp_path / "e", {"message": {"message": "ValueError: x: y", "extraInfo": extra}}))[0]

    assert error is not None
    assert (error.type, error.message) == ("ValueError", "x: y")
    assert error.traceback == "Traceback ..."
    assert error.at_wall_s == 1_690_000_000
    assert error.at_monotonic_s is None


def test_the_old_layout_with_a_plain_string(tmp_path: Path) -> None:
    error = examine(write(tmp_path / "e", {"message": "it broke: badly", "timestamp": 1690000000}))[0]

    assert error is not None
    assert (error.type, error.message, error.at_wall_s) == ("", "it broke: badly", 1_690_000_000)


def test_error_traits_and_unknown_keys_do_no_harm(tmp_path: Path) -> None:
    document = {"message": {"message": "KeyError: 'x'", "errorCode": 3}, "errorTraits": {"category": "user"}}
    error = examine(write(tmp_path / "e", document))[0]

    assert error is not None
    assert error.headline == "KeyError: 'x'"


def test_our_own_keys(tmp_path: Path) -> None:
    extra = {"timestamp": "1", "type": "my error", "monotonic_ns": 2_500_000_000, "wall_ns": 1_690_000_000_500_000_000}
    error = examine(write(tmp_path / "e", {"message": {"message": "my error: x", "extraInfo": extra}}))[0]

    assert error is not None
    assert (error.type, error.message) == ("my error", "x")
    assert (error.at_monotonic_s, error.at_wall_s) == (2.5, 1_690_000_000.5)


def test_a_missing_file_is_no_error_and_no_complaint(tmp_path: Path) -> None:
    assert examine(str(tmp_path / "none")) == (None, None)
    assert examine("bad\0path") == (None, None)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "error.json is empty"),
        (b" \n", "error.json is empty"),
        (b'{"message": {"message": "ValueError: x", "extra', 'not a complete error file; it begins: {"message"'),
        (b"\xff\xfe\x00garbage", "not a complete error file"),
        (b"[1, 2]", "not a complete error file"),
        (b'{"message": 7}', "not a complete error file"),
        (b"[" * 200_000, "not a complete error file"),
        (b"9" * 10_000, "not a complete error file"),
    ],
)
def test_nonsense_becomes_evidence(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)

    error, evidence = examine(str(path))

    assert error is None
    assert evidence is not None
    assert complaint in evidence
    assert len(evidence) < 400


def test_a_file_of_100_mb_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(b'{"message": "x')
    os.truncate(path, 100_000_000)  # sparse: costs no disk

    error, evidence = examine(str(path))

    assert error is None
    assert evidence is not None
    assert f"larger than {READ_CAP_BYTES >> 20} MiB" in evidence


def test_what_is_not_a_file_neither_blocks_nor_raises(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    assert examine(str(tmp_path / "fifo"))[0] is None
    assert examine(str(tmp_path))[0] is None
    assert examine("/dev/zero")[0] is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
EXTRA = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(["timestamp", "py_callstack", "type", "monotonic_ns", "wall_ns"], JSON)
)
MESSAGE = st.fixed_dictionaries({}, optional={"message": JSON | st.text(), "extraInfo": JSON | EXTRA})
DOCUMENT = JSON | st.fixed_dictionaries({}, optional={"message": JSON | MESSAGE, "timestamp": JSON})


@given(document=DOCUMENT, cut=st.none() | st.integers(0, 200))
def test_no_document_makes_the_reader_raise(
    tmp_path_factory: pytest.TempPathFactory, document: object, cut: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(document)[:cut], encoding="utf-8")

    error, evidence = examine(str(path))

    assert (error is None) == (evidence is not None)
    if error is not None:
        assert error.at_wall_s == error.at_wall_s, "not NaN"
        assert isinstance(error.headline, str)


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_raise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.bin"
    path.write_bytes(data)

    error, evidence = examine(str(path))

    assert (error is None) == (evidence is not None)
