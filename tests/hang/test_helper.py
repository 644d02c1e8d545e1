"""What the helper process answers, line for line."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.hang.helper import serve
from gpulaunch.launcher.hang.values import Limits, Standing, standing_from, to_json, verdict_from
from gpulaunch.profiler.channel.layout import Region

NOBODY = Standing(
    rank=3, pid=2**22 - 7, region=Region.LOADER, steps=1, armed=True, begun=True, saving=False, quiet_s=9.0,
    allowed_s=10.0, stopped_s=0.0,
)  # fmt: skip


def exchange(*requests: object, path: str = "/nonexistent/hang.json", **limits: float) -> list[dict[str, Any]]:
    first = {"limits": to_json(Limits(sample_s=0.0, **limits)), "whole": True, "path": path}
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(one) + "\n" for one in [first, *requests])), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_what_is_said_survives_json() -> None:
    assert standing_from(json.loads(json.dumps(to_json(NOBODY)))) == NOBODY


def test_a_request_is_answered_with_a_verdict() -> None:
    (answer,) = exchange({"standings": [to_json(NOBODY)], "dirs": {"3": "/nonexistent"}})

    verdict = verdict_from(answer["verdict"])
    assert (verdict.hung, verdict.sentence) == (False, "rank 3 has ended")


def test_a_bad_request_is_answered_and_the_next_one_too() -> None:
    good = {"standings": [to_json(NOBODY)], "dirs": {}}

    bad, nonsense, after = exchange({"standings": [{"rank": 0}]}, [], good)

    assert "error" in bad
    assert "error" in nonsense
    assert "verdict" in after


def test_nothing_said_is_nothing_answered() -> None:
    answers = io.StringIO()
    serve(io.StringIO(""), answers)

    assert answers.getvalue() == ""


@pytest.mark.parametrize("writable", [True, False])
def test_a_verdict_stands_without_its_evidence(tmp_path: Path, writable: bool) -> None:
    """A full disk or a directory that is gone takes the file, not the verdict."""
    path = str(tmp_path / "hang.json") if writable else "/nonexistent/hang.json"
    me = to_json(Standing(**{**vars(NOBODY), "pid": os.getpid(), "quiet_s": 2000.0}))

    (answer,) = exchange({"standings": [me], "dirs": {}}, path=path)

    assert answer["verdict"]["rule"] == "cap"
    assert os.path.exists(path) is writable
    assert os.listdir(tmp_path) == (["hang.json"] if writable else [])
