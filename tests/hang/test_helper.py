"""What the helper process answers, line for line."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.hang import proc
from gpulaunch.launcher.hang.detector import mark_over
from gpulaunch.launcher.hang.helper import serve
from gpulaunch.launcher.hang.values import Limits, RankProgress, progress_from, to_json, verdict_from
from gpulaunch.launcher.loop import linux
from gpulaunch.profiler.channel.layout import Region

ENDED_RANK = RankProgress(
    rank=3, pid=2**22 - 7, region=Region.LOADER, steps=1, armed=True, begun=True, saving=False, quiet_s=9.0,
    allowed_s=10.0, stopped_s=0.0,
)  # fmt: skip


def exchange(*requests: object, path: str = "/nonexistent/hang.json", **limits: float) -> list[dict[str, Any]]:
    first = {"limits": to_json(Limits(sample_s=0.0, **limits)), "whole": True, "path": path}
    asked = [{"others_idle_s": math.inf, **one} if isinstance(one, dict) else one for one in requests]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(one) + "\n" for one in [first, *asked])), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_what_is_said_survives_json() -> None:
    assert progress_from(json.loads(json.dumps(to_json(ENDED_RANK)))) == ENDED_RANK


def test_a_request_is_answered_with_a_verdict() -> None:
    (answer,) = exchange({"standings": [to_json(ENDED_RANK)], "dirs": {"3": "/nonexistent"}, "tell_from_s": 0.0})

    verdict = verdict_from(answer["verdict"])
    assert (verdict.tells, verdict.sentence) == (False, "rank 3 has ended")


def test_a_bad_request_is_answered_and_the_next_one_too() -> None:
    good = {"standings": [to_json(ENDED_RANK)], "dirs": {}, "tell_from_s": 0.0}

    bad, nonsense, after = exchange({"standings": [{"rank": 0}]}, [], good)

    assert "error" in bad
    assert "error" in nonsense
    assert "verdict" in after


def test_nothing_said_is_nothing_answered() -> None:
    answers = io.StringIO()
    serve(io.StringIO(""), answers)

    assert answers.getvalue() == ""


def me(quiet_s: float) -> dict[str, Any]:
    return to_json(RankProgress(**{**vars(ENDED_RANK), "pid": os.getpid(), "quiet_s": quiet_s, "stopped_s": 5.0}))


@pytest.mark.parametrize("writable", [True, False])
def test_a_verdict_stands_without_its_evidence(tmp_path: Path, writable: bool) -> None:
    """A full disk or a directory that is gone takes the file, not the verdict."""
    path = str(tmp_path / "hang.json") if writable else "/nonexistent/hang.json"

    (answer,) = exchange({"standings": [me(20.0)], "dirs": {}, "tell_from_s": 0.0}, path=path)

    assert (answer["verdict"]["acts"], answer["verdict"]["rule"]) == (True, "stopped")
    assert os.path.exists(path) is writable
    assert os.listdir(tmp_path) == (["hang.json"] if writable else [])


@pytest.mark.parametrize(("tell_from_s", "written"), [(0.0, True), (40.0, True), (41.0, False)])
def test_what_is_told_is_written_down_when_it_is_told(tmp_path: Path, tell_from_s: float, written: bool) -> None:
    """Not at each look in between, and not as if it were acted on."""
    path = tmp_path / "hang.json"
    with subprocess.Popen(["sleep", "60"]) as rests:
        while linux.state_of(rests.pid) != "S":  # it still reads its libraries
            time.sleep(0.01)
        late = to_json(RankProgress(**{**vars(ENDED_RANK), "pid": rests.pid, "quiet_s": 40.0}))
        (answer,) = exchange({"standings": [late], "dirs": {}, "tell_from_s": tell_from_s}, path=str(path))
        rests.kill()

    assert (answer["verdict"]["tells"], answer["verdict"]["acts"]) == (True, False)
    assert path.exists() is written
    assert not written or json.loads(path.read_text())["state"] == "told"


def test_what_was_told_is_marked_as_over(tmp_path: Path) -> None:
    path = tmp_path / "hang.json"
    path.write_text(json.dumps({"version": 2, "state": "told", "sentence": "rank 3 is away"}))

    mark_over(str(path), 63.0)

    assert json.loads(path.read_text()) == {
        "version": 2, "state": "over", "sentence": "rank 3 is away", "moved_after_s": 63.0
    }  # fmt: skip


@pytest.mark.parametrize("text", ['{"state": "acted"}', "[]", "not json"])
def test_what_was_acted_on_or_is_no_telling_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hang.json"
    path.write_text(text)

    mark_over(str(path), 63.0)
    mark_over(str(tmp_path / "none.json"), 63.0)

    assert path.read_text() == text


@pytest.mark.parametrize(
    ("does", "within"),
    [
        ("time.sleep(60)", True),
        ("lock = threading.Lock(); lock.acquire(); lock.acquire()", True),
        ("os.read(os.pipe()[0], 1)", False),
        ("a, b = socket.socketpair(); a.recv(1)", False),
        ("os.mkfifo(sys.argv[1]); open(sys.argv[1], 'wb')", False),
    ],
)
def test_what_a_thread_waits_for(tmp_path: Path, does: str, within: bool) -> None:
    program = f"import os, socket, sys, threading, time; print(flush=True); {does}"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "fifo")], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            seen: set[bool] = set()
            end_s = time.monotonic() + 30
            while within not in seen and time.monotonic() < end_s:
                seen.add(proc.waits_within(process.pid, process.pid))
                time.sleep(0.1)
            time.sleep(0.3)
            assert proc.waits_within(process.pid, process.pid) is within
        finally:
            process.kill()
