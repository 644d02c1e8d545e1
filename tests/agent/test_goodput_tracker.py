"""What the agent makes of the ranks' segments when it says where the time of a run went."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpulaunch.launcher.agent.goodput_tracker import GoodputTracker
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.checkpoint.find import Checkpoint
from gpulaunch.profiler.channel import segment, segment_writer
from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.quantities import CheckpointState
from gpulaunch.profiler.channel.segment import SegmentSnapshot

T0 = 1000.0
Page = Callable[..., SegmentSnapshot]


@pytest.fixture
def page_of(tmp_path: Path) -> Page:
    """A rank's segment; its first step began 2 s after the launcher, times in seconds."""

    def made(
        rank: int = 0,
        *,
        attempt: int = 0,
        told: float = 0.0,
        phase: float = 0.0,
        saved: tuple[int, float] | None = None,
        resumed: int | None = None,
    ) -> SegmentSnapshot:
        path = str(tmp_path / f"rank-{rank}.bin")
        segment_writer.create(path, rank=rank, local_rank=rank, attempt=attempt)
        writer = segment_writer.SegmentWriter(path)
        writer.words[Word.FIRST_STEP_START_NS] = round((T0 + 2.0) * 1e9)
        writer.words[CheckpointState.stall_ns_total] = round(told * 1e9)
        writer.words[Word.CHECKPOINT_NS_TOTAL] = round(phase * 1e9)
        if saved is not None:
            writer.words[CheckpointState.step] = saved[0]
            writer.words[CheckpointState.captured_ns] = round((T0 + saved[1]) * 1e9)
        if resumed is not None:  # by gpulaunch.checkpoint; 0: from nothing
            writer.words[Word.LISTENS] = 1
            writer.words[CheckpointState.resumed_step] = resumed
        writer.close()
        return segment.read(path)

    return made


class Run:
    """A run that began at T0, and its goodput; ranks run from the first second on."""

    def __init__(self, *, named: tuple[str, ...] = ()) -> None:
        self.now_s = T0
        self.written: dict[str, Any] = {}
        self.events: list[str] = []
        context = SimpleNamespace(
            loop=SimpleNamespace(now=lambda: self.now_s),
            segments=SimpleNamespace(write_run=self.written.update),
            rundir=SimpleNamespace(event=lambda what, **_: self.events.append(what)),
            spec=SimpleNamespace(resume="auto", resume_arg=None, checkpoint_dirs=named, profile=True),
            base_env={"GPULAUNCH_RUN_ID": "aaaa"},
        )
        self.goodput = GoodputTracker(cast("RunContext", context), began_s=T0)
        self.now_s = T0 + 1.0
        self.goodput.attempt_began(0, None)
        self.goodput.attempt_started()

    def spent(self, at_s: float) -> dict[str, Any]:
        """The buckets with something in them; all of them are the time that has passed."""
        self.now_s = T0 + at_s
        seconds = self.goodput.seconds()
        known = {bucket: value for bucket, value in seconds.items() if value is not None}
        assert math.fsum(known.values()) == pytest.approx(at_s)
        return {bucket: pytest.approx(value) for bucket, value in known.items() if value > 1e-9} | {
            bucket: None for bucket in seconds if bucket not in known
        }


def test_a_program_that_saves_by_itself_is_not_told_that_saving_is_work(page_of: Page) -> None:
    """Nine and a half of seventeen seconds in torch.save: `gpulaunch.checkpoint` tells nothing, the phase has it."""
    run = Run()
    run.goodput.update([page_of(phase=4.0)])
    assert run.spent(10.0) == {"startup": 2.0, "productive": 4.0, "checkpoint_stall": 4.0}
    run.goodput.update([page_of(phase=9.5)])
    run.spent(19.0)
    run.goodput.stopped(None)
    run.goodput.ended(ok=True, newest=None)

    assert run.spent(19.0) == {"startup": 2.0, "productive": 7.5, "checkpoint_stall": 9.5}
    assert run.written["goodput_seconds"] == run.goodput.seconds()
    assert run.goodput.line() == "goodput 39.5 %: productive 7.5 s, checkpoint stall 9.5 s, startup 2.0 s"


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
    run.goodput.update([page_of(told=told, phase=phase)])

    assert run.spent(12.0) == {"startup": 2.0, "productive": 10.0 - stall, "checkpoint_stall": stall}


def test_ranks_stand_still_together_and_attempts_one_after_the_other(page_of: Page) -> None:
    """The rank that stood longest counts; the segment of the attempt before says nothing of this one."""
    run = Run()
    run.goodput.update([page_of(0, told=2.0, phase=1.0), page_of(1, phase=3.0), page_of(2)])
    assert run.spent(12.0)["checkpoint_stall"] == 3.0
    run.goodput.failed(T0 + 12.0, T0 + 12.0)
    run.goodput.attempt_began(1, None)
    run.goodput.attempt_started()
    run.goodput.update([page_of(1, phase=3.0), page_of(0, attempt=1, phase=0.5)])

    assert run.spent(20.0) == {
        "startup": 2.0,
        "productive": 7.0 + 7.5,
        "checkpoint_stall": 3.0 + 0.5,
        "lost_work": None,
    }


def test_what_nobody_knows_is_no_number_for_the_sidecar() -> None:
    """A program that ended well and was never seen to step: the last run.json is without what may have been work."""
    run = Run()
    run.now_s = T0 + 9.0
    run.goodput.stopped(None)
    run.goodput.ended(ok=True, newest=None)

    told = run.goodput.as_json()["goodput_seconds"]
    assert (told["productive"], told["checkpoint_stall"], told["startup"]) == (None, None, pytest.approx(1.0))
    assert run.written["goodput_seconds"] == {bucket: value for bucket, value in told.items() if value is not None}


def failed_and_restarted(run: Run, resumed: Checkpoint | None = None) -> None:
    """The first attempt dies ten seconds after its first step, and the second one begins to run."""
    run.now_s = T0 + 12.0
    run.goodput.failed(T0 + 12.0, T0 + 12.0)
    run.goodput.attempt_began(1, resumed)
    run.goodput.attempt_started()


def test_what_a_program_resumes_by_itself_is_not_told_as_if_nothing_had_been_lost(page_of: Page) -> None:
    """Nor before it works: then it has made nothing again."""
    run = Run()
    run.goodput.update([page_of()])
    failed_and_restarted(run)
    assert run.spent(12.0) == {"startup": 2.0, "productive": 10.0}

    run.goodput.update([page_of(attempt=1)])
    run.goodput.update([page_of(attempt=1)])
    run.goodput.write()

    assert run.spent(12.0) == {"startup": 2.0, "productive": 10.0, "lost_work": None}
    assert run.events == ["lost_work_unknown"]
    assert run.written["goodput_seconds"]["lost_work"] == 0.0, "the sidecar knows of numbers only"


@pytest.mark.parametrize(("resumed", "lost"), [(0, 10.0), (30, 4.0), (20, None)])
def test_what_gpulaunch_checkpoint_resumes_in_a_place_of_its_own_is_known(
    page_of: Page, resumed: int, lost: float | None
) -> None:
    """From nothing; from the newest one, saved six seconds after the first step; from one of which nobody told when."""
    run = Run()
    run.goodput.update([page_of(saved=(30, 8.0), resumed=0)])
    failed_and_restarted(run)
    run.goodput.update([page_of(attempt=1, saved=(35, 12.0), resumed=resumed)])

    spent = run.spent(12.0)
    assert (spent["lost_work"], spent.get("productive", 0.0)) == (lost, 10.0 - (lost or 0.0))
    assert bool(run.events) == (lost is None)


@pytest.mark.parametrize(("resumed", "lost"), [(None, 10.0), (30, 4.0)])
def test_what_a_rank_says_counts_before_what_was_not_found(page_of: Page, resumed: int | None, lost: float) -> None:
    """The directory that was named is empty: then the program goes on from nothing, unless it says from what."""
    run = Run(named=("empty",))
    run.goodput.update([page_of(saved=(30, 8.0))])
    failed_and_restarted(run)
    run.goodput.update([page_of(attempt=1, saved=(30, 8.0), resumed=resumed)])

    assert run.spent(12.0)["lost_work"] == lost
    assert run.events == []


def test_what_is_from_before_this_run_keeps_nothing_of_it(page_of: Page) -> None:
    """Both attempts go on from a checkpoint of an earlier run in the directory; nothing was saved since."""
    run = Run()
    run.goodput.update([page_of(resumed=10)])
    failed_and_restarted(run)
    run.goodput.update([page_of(attempt=1, resumed=10)])

    assert run.spent(12.0) == {"startup": 2.0, "lost_work": 10.0}


def test_a_checkpoint_that_was_gone_on_from_is_one_that_is_known_of(page_of: Page) -> None:
    """The program's own: no segment tells of it."""
    run = Run()
    assert run.goodput.as_json()["checkpoint_step"] is None
    own = Checkpoint(path="ckpt_40.pt", format="torch", step=40, saved_s=0.0, size_bytes=1, key="ckpt_40.pt")
    failed_and_restarted(run, own)

    told = run.goodput.as_json()
    assert (told["resumed_step"], told["checkpoint_step"]) == (40, 40)
    run.goodput.ended(ok=False, newest=replace(own, step=90))
    assert run.goodput.as_json()["checkpoint_step"] == 90
