"""What the agent makes of the ranks' pages when it says where the time of a run went."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpulaunch.launcher.agent.account import Account
from gpulaunch.launcher.agent.surroundings import Surroundings
from gpulaunch.profiler.channel import page
from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.page import PageSnapshot

T0 = 1000.0
Page = Callable[..., PageSnapshot]


@pytest.fixture
def page_of(tmp_path: Path) -> Page:
    """A rank's page; its first step began 2 s after the launcher, times in seconds."""

    def made(rank: int = 0, *, attempt: int = 0, told: float = 0.0, phase: float = 0.0) -> PageSnapshot:
        path = str(tmp_path / f"rank-{rank}.bin")
        page.create(path, rank=rank, local_rank=rank, attempt=attempt)
        writer = page.PageWriter(path)
        writer.words[Word.FIRST_STEP_START_NS] = round((T0 + 2.0) * 1e9)
        writer.words[Word.CHECKPOINT_STALL_NS_TOTAL] = round(told * 1e9)
        writer.words[Word.CHECKPOINT_NS_TOTAL] = round(phase * 1e9)
        writer.close()
        return page.read(path)

    return made


class Run:
    """A run that began at T0, and its account; ranks run from the first second on."""

    def __init__(self) -> None:
        self.now_s = T0
        self.written: dict[str, Any] = {}
        around = SimpleNamespace(
            loop=SimpleNamespace(now=lambda: self.now_s),
            pages=SimpleNamespace(account=self.written.update),
            spec=SimpleNamespace(resume_arg=None, checkpoint_dirs=()),
            base_env={"GPULAUNCH_RUN_ID": "aaaa"},
        )
        self.account = Account(cast("Surroundings", around), began_s=T0)
        self.now_s = T0 + 1.0
        self.account.attempt_began(0, None)
        self.account.attempt_started()

    def spent(self, at_s: float) -> dict[str, Any]:
        """The buckets with something in them; all of them are the time that has passed."""
        self.now_s = T0 + at_s
        seconds = self.account.seconds()
        assert math.fsum(seconds.values()) == pytest.approx(at_s)
        return {bucket: pytest.approx(value) for bucket, value in seconds.items() if value > 1e-9}


def test_a_program_that_saves_by_itself_is_not_told_that_saving_is_work(page_of: Page) -> None:
    """Nine and a half of seventeen seconds in torch.save: `gpulaunch.checkpoint` tells nothing, the phase has it."""
    run = Run()
    run.account.looked([page_of(phase=4.0)])
    assert run.spent(10.0) == {"startup": 2.0, "productive": 4.0, "checkpoint_stall": 4.0}
    run.account.looked([page_of(phase=9.5)])
    run.spent(19.0)
    run.account.stopped(None)
    run.account.ended(ok=True, newest=None)

    assert run.spent(19.0) == {"startup": 2.0, "productive": 7.5, "checkpoint_stall": 9.5}
    assert run.written["goodput_seconds"] == run.account.seconds()
    assert run.account.line() == "goodput 39.5 %: productive 7.5 s, checkpoint stall 9.5 s, startup 2.0 s"


@pytest.mark.parametrize(
    ("told", "phase", "stall"),
    [
        (3.0, 2.9, 3.0),  # gpulaunch.checkpoint, with a garbage collection inside
        (3.0, 0.0, 3.0),  # its step has not ended yet, or nobody observes it
        (3.0, 5.0, 5.0),  # the program saves something of its own besides
    ],
)
def test_what_is_told_and_what_was_seen_are_the_same_saves(
    page_of: Page, told: float, phase: float, stall: float
) -> None:
    run = Run()
    run.account.looked([page_of(told=told, phase=phase)])

    assert run.spent(12.0) == {"startup": 2.0, "productive": 10.0 - stall, "checkpoint_stall": stall}


def test_ranks_stand_still_together_and_attempts_one_after_the_other(page_of: Page) -> None:
    """The rank that stood longest counts; the page of the attempt before says nothing of this one."""
    run = Run()
    run.account.looked([page_of(0, told=2.0, phase=1.0), page_of(1, phase=3.0), page_of(2)])
    assert run.spent(12.0)["checkpoint_stall"] == 3.0
    run.account.failed(T0 + 12.0, T0 + 12.0)
    run.account.attempt_began(1, None)
    run.account.attempt_started()
    run.account.looked([page_of(1, phase=3.0), page_of(0, attempt=1, phase=0.5)])

    assert run.spent(20.0) == {"startup": 2.0, "productive": 7.0 + 7.5, "checkpoint_stall": 3.0 + 0.5}
