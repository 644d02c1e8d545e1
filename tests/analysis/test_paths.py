"""One line of a program has one name, whichever rule finds it and whoever has seen it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import pytest
from healthy_node import site
from hypothesis import given
from hypothesis import strategies as st
from made_up_node import Node
from rule_cases import CASES

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.daemon.findings import Findings
from gpulaunch.profiler.probe import sites
from gpulaunch.profiler.record import Finding, RankPlace
from gpulaunch.profiler.samplers.paths import shown_path, working_directory
from gpulaunch.profiler.samplers.pyspy import Look
from gpulaunch.profiler.stack import Frame

LOGGING = Frame(name="info", file="/usr/lib/python3.12/logging/__init__.py", line=1489)
FILES = (
    *("job/train.py", "job/src/train.py", "elsewhere/train.py", "job-2/train.py"),
    *("job/env/lib/python3.12/site-packages/lightning/loops.py", "usr/lib/python3/dist-packages/accelerate/log.py"),
)


def test_in_all_planted_windows_a_file_has_the_programs_own_name() -> None:
    files = {found.file for case in CASES.values() for found in advise(case.fault)}

    assert files == {"train.py", None}


def frame_in(path: Path) -> FrameType:
    """A frame of a program that lies there."""
    found: list[FrameType] = []
    program = "def logs():\n    note(here())\nlogs()\n"
    exec(compile(program, str(path), "exec"), {"note": found.append, "here": lambda: sys._getframe(1)})
    return found[0]


@pytest.mark.parametrize("file", FILES)
def test_the_rank_and_the_stack_sampler_name_a_line_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """A program waits for the GPU on a line, and logs on it: that is told from inside, this from outside."""
    path = tmp_path / file
    frame = frame_in(path)
    job = tmp_path / "job"
    job.mkdir()
    monkeypatch.chdir(job)
    of_rank = sites.place_of(frame)
    (tmp_path / "proc/100").mkdir(parents=True)
    (tmp_path / "proc/100/cwd").symlink_to(job)

    found = standing(tmp_path, of_rank, Frame(name="logs", file=frame.f_code.co_filename, line=frame.f_lineno))

    assert set(found) == {"sync-every-step", "logging-stall"}
    assert found["logging-stall"].file == found["sync-every-step"].file
    assert found["logging-stall"].line == found["sync-every-step"].line == 2


def standing(root: Path, of_rank: str, caller: Frame) -> dict[str, Finding]:
    findings, node = Findings(root=root), Node()
    place = RankPlace(rank=0, local_rank=0, pid=100)
    for second in range(30):
        node.ranks[0].sites = (site("item", of_rank, count=10 * second, blocked_ns=10 * second * 50_000_000),)
        findings.add_stack(place, "other", Look(frames=(LOGGING, caller), holds_gil=True))
        told = findings.look(node.train(1.0, sync=50.0).state)
    return {each.rule: each for each in told}


def test_a_process_that_may_not_be_asked_has_whole_paths(tmp_path: Path) -> None:
    assert working_directory(100, root=str(tmp_path)) == ""
    assert shown_path("/home/me/train.py", "") == "/home/me/train.py"


def test_this_process_says_where_it_works() -> None:
    assert working_directory(os.getpid()) == os.path.realpath(os.getcwd())


parts = st.sampled_from(["home", "site-packages", "dist-packages", "lib", "train.py", "<stdin>", "job", ""])


@given(st.lists(parts, max_size=6).map("/".join))
def test_both_spell_any_path_alike(path: str) -> None:
    code = compile("pass", path, "exec")

    assert shown_path(path, os.getcwd()) == sites.path_of(code)
    here = code.replace(co_filename=os.path.join(os.getcwd(), path))
    assert shown_path(here.co_filename, os.getcwd()) == sites.path_of(here)
