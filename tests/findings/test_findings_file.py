"""findings.jsonl: small, whole at any moment, and carried on by the next sidecar."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.exporters.files.findings import FindingsFile, read_findings
from gpulaunch.profiler.record import Finding

GC = Finding(
    rule="gc-pauses",
    file=None,
    line=None,
    subject="",
    ranks=(0,),
    seconds_per_step=0.02,
    seconds_per_hour=600.0,
    confidence=0.9,
    evidence={"collections_per_step": 1.0},
    advice="Collect less.",
)
SYNC = replace(GC, rule="sync-every-step", file="train.py", line=88, evidence={"kind": "item"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "findings.jsonl"


def told(path: Path) -> dict[str, tuple[bool, float, float]]:
    return {each["rule"]: (each["active"], each["first_seen_s"], each["last_seen_s"]) for each in read_findings(path)}


def test_what_an_earlier_sidecar_has_found_stands_until_another_could_judge(path: Path) -> None:
    FindingsFile(path).tell((GC, SYNC), 100.0)
    successor = FindingsFile(path)
    successor.tell((), 105.0, False)
    assert told(path) == {"gc-pauses": (True, 100.0, 100.0), "sync-every-step": (True, 100.0, 100.0)}

    successor.tell((GC,), 110.0)
    assert told(path) == {"gc-pauses": (True, 100.0, 110.0), "sync-every-step": (False, 100.0, 100.0)}


def test_nothing_found_is_an_empty_file(path: Path) -> None:
    FindingsFile(path).tell((), 100.0)

    assert path.read_text() == ""
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_finding_is_one_object_on_one_line(path: Path) -> None:
    FindingsFile(path).tell((SYNC,), 100.0)

    (line,) = path.read_text().splitlines()
    assert json.loads(line) == {
        "version": 1,
        **SYNC.as_json(),
        "active": True,
        "first_seen_s": 100.0,
        "last_seen_s": 100.0,
    }


@given(st.text(st.characters()))
def test_a_name_of_anything_is_one_line_and_comes_back(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    path = tmp_path_factory.mktemp("any") / "findings.jsonl"
    FindingsFile(path).tell((replace(SYNC, file=name, subject=name, evidence={"where": name}),), 100.0)

    (line,) = path.read_bytes().splitlines()
    (found,) = read_findings(path)
    assert line.isascii()
    assert (found["file"], found["subject"], found["evidence"]) == (name, name, {"where": name})


def test_findings_come_and_go_and_stay_in_the_file(path: Path) -> None:
    file = FindingsFile(path)
    file.tell((GC,), 100.0)
    file.tell((GC, SYNC), 105.0)
    file.tell((SYNC,), 110.0)

    assert told(path) == {"gc-pauses": (False, 100.0, 105.0), "sync-every-step": (True, 105.0, 110.0)}

    file.tell((GC, SYNC), 115.0)
    assert told(path)["gc-pauses"] == (True, 100.0, 115.0)


def test_what_only_goes_on_is_written_now_and_then(path: Path) -> None:
    file = FindingsFile(path)
    for second in range(0, 60, 5):
        file.tell((GC,), 100.0 + second)

    assert told(path) == {"gc-pauses": (True, 100.0, 130.0)}
    file.close()
    assert told(path) == {"gc-pauses": (True, 100.0, 155.0)}


def test_the_next_sidecar_goes_on_with_it(path: Path) -> None:
    first = FindingsFile(path)
    first.tell((GC, SYNC), 100.0)

    FindingsFile(path).tell((SYNC,), 200.0)

    assert told(path) == {"gc-pauses": (False, 100.0, 100.0), "sync-every-step": (True, 100.0, 200.0)}


def test_a_sidecar_that_looked_at_nothing_writes_nothing(path: Path) -> None:
    FindingsFile(path).close()

    assert not path.exists()


def test_a_full_disk_is_told_and_tried_again(path: Path) -> None:
    file = FindingsFile(path)
    path.with_name("findings.jsonl.tmp").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        file.tell((GC,), 100.0)
    path.with_name("findings.jsonl.tmp").rmdir()

    file.tell((GC,), 101.0)

    assert told(path) == {"gc-pauses": (True, 100.0, 101.0)}


def test_the_file_stays_small(path: Path) -> None:
    """A program that makes its code anew at every step has new lines without end."""
    file = FindingsFile(path)
    for line in range(1000):
        file.tell((replace(SYNC, line=line),), 100.0 + line)

    lines = [each["line"] for each in read_findings(path)]
    assert lines == list(range(800, 1000))


@given(st.binary() | st.text().map(str.encode))
def test_any_file_is_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "findings.jsonl"
    path.write_bytes(content)

    assert read_findings(path) == []


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        "null",
        '{"version": 1}',
        json.dumps({"version": 2, **GC.as_json(), "active": True, "first_seen_s": 1, "last_seen_s": 1}),
        json.dumps({"version": 1, **GC.as_json(), "active": True, "first_seen_s": "1", "last_seen_s": 1}),
        *(
            json.dumps({"version": 1, **GC.as_json(), "active": True, "first_seen_s": 1, "last_seen_s": 1, name: value})
            for name in ("seconds_per_step", "confidence", "last_seen_s")
            for value in (float("nan"), float("-inf"), 10**400)
        ),
        "[" * 100_000,
    ],
)
def test_what_is_no_finding_is_passed_over(path: Path, line: str) -> None:
    whole = json.dumps({"version": 1, **GC.as_json(), "active": True, "first_seen_s": 1, "last_seen_s": 1})
    path.write_text(f"{line}\n{whole}\n{whole[:40]}")

    assert [each["rule"] for each in read_findings(path)] == ["gc-pauses"]


def test_no_file_is_no_findings(path: Path) -> None:
    assert read_findings(path) == []


@pytest.mark.parametrize("kind", ["fifo", "directory", "link to what has no end"])
def test_what_is_no_file_is_no_findings_and_holds_up_nobody(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
        os.write(os.open(path, os.O_RDWR), b"{}\n")  # somebody who has written, and may go on
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")

    assert read_findings(path) == []


def test_a_file_without_a_writer_is_opened_without_waiting(path: Path) -> None:
    os.mkfifo(path)

    assert read_findings(path) == []


def test_of_a_file_that_is_too_large_only_the_beginning_is_read(path: Path) -> None:
    whole = json.dumps({"version": 1, **GC.as_json(), "active": True, "first_seen_s": 1, "last_seen_s": 1})
    with path.open("w") as file:
        file.write(f"{whole}\n")
        file.truncate(1 << 40)  # sparse: a terabyte of zeros

    assert [each["rule"] for each in read_findings(path)] == ["gc-pauses"]
