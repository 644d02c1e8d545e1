"""The ledger of a run's time: stories with their sums, and what must hold for every story."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.policy.goodput import GoodputLedger, line, share
from gpulaunch.profiler.record import GOODPUT_BUCKETS

T0 = 1000.0  # a monotonic clock begins anywhere


def spent(ledger: GoodputLedger, now: float) -> dict[str, float | None]:
    """The buckets with something in them, or with nobody knows what, at `now` seconds after the start."""
    seconds = ledger.seconds(T0 + now)
    assert tuple(seconds) == GOODPUT_BUCKETS
    return {
        name: None if value is None else pytest.approx(value)
        for name, value in seconds.items()
        if value is None or value > 1e-9
    }


NOT_KNOWN: dict[str, float | None] = {"productive": None, "checkpoint_stall": None}


def begun(first_step: float | None = 5.0) -> GoodputLedger:
    """Called at 0, ranks asked for at 1, running at 2, first step at 5."""
    ledger = GoodputLedger()
    ledger.run_started(T0)
    ledger.attempt_began(T0 + 1.0)
    ledger.attempt_started(T0 + 2.0)
    if first_step is not None:
        ledger.first_step(T0 + first_step)
    return ledger


def failed_and_resumed(saved: float | None) -> GoodputLedger:
    """Fails at 20, seen at 22, gone at 23; the next attempt begins at 24 and steps at 26."""
    ledger = begun()
    ledger.failed(T0 + 20.0, T0 + 22.0)
    ledger.cleared(T0 + 23.0)
    ledger.resumed(None if saved is None else T0 + saved)
    ledger.attempt_began(T0 + 24.0)
    ledger.first_step(T0 + 26.0)
    return ledger


def test_a_run_that_goes_well() -> None:
    ledger = begun()
    assert spent(ledger, 3.0) == {"startup": 3.0}
    assert spent(ledger, 15.0) == {"startup": 5.0, "productive": 10.0}

    ledger.stopped(T0 + 20.0)
    ledger.cleared(T0 + 21.0)
    ledger.ended(T0 + 22.0, ok=True)

    assert spent(ledger, 99.0) == {"startup": 5.0, "productive": 15.0, "teardown": 2.0}


def test_nothing_has_happened_yet() -> None:
    ledger = GoodputLedger()
    ledger.run_started(T0)
    assert spent(ledger, 0.0) == {}
    assert spent(ledger, 2.0) == {"startup": 2.0}


def test_a_failure_and_what_was_kept_of_the_attempt() -> None:
    ledger = failed_and_resumed(saved=12.0)

    assert spent(ledger, 36.0) == {
        "startup": 5.0,
        "productive": 7.0 + 10.0,
        "lost_work": 8.0,
        "detection": 2.0,
        "teardown": 1.0,
        "restart": 3.0,
    }
    assert spent(failed_and_resumed(saved=None), 36.0)["lost_work"] == 15.0
    assert "lost_work" not in spent(failed_and_resumed(saved=30.0), 36.0), "saved after the failure: nothing is lost"
    assert spent(failed_and_resumed(saved=-500.0), 36.0)["lost_work"] == 15.0, "saved by an earlier run"


def test_until_it_is_known_what_the_next_attempt_goes_on_from_nothing_is_lost() -> None:
    ledger = begun()
    ledger.failed(T0 + 20.0, T0 + 22.0)
    assert spent(ledger, 22.5) == {"startup": 5.0, "productive": 15.0, "detection": 2.0, "teardown": 0.5}
    ledger.cleared(T0 + 23.0)
    assert spent(ledger, 24.0)["restart"] == 1.0

    ledger.attempt_began(T0 + 24.0)  # of a program of which nobody knows what it goes on from
    ledger.first_step(T0 + 26.0)

    assert spent(ledger, 36.0)["productive"] == 25.0


def test_what_was_made_again_is_not_known_where_nobody_saw_what_an_attempt_went_on_from() -> None:
    ledger = begun()
    ledger.failed(T0 + 20.0, T0 + 22.0)
    ledger.cleared(T0 + 23.0)
    ledger.resumed_unseen()
    ledger.attempt_began(T0 + 24.0)
    ledger.first_step(T0 + 26.0)

    assert spent(ledger, 36.0)["productive"] == 25.0
    assert spent(ledger, 36.0)["lost_work"] is None
    assert line(ledger.seconds(T0 + 36.0), 36.0, advice=": name it") == (
        "goodput at most 69.4 %: productive 25.0 s, detection 2.0 s, teardown 1.0 s, restart 3.0 s, startup 5.0 s; "
        "lost work is unknown: name it"
    )

    ledger.failed(T0 + 36.0, T0 + 36.0)
    ledger.cleared(T0 + 36.0)
    ledger.resumed(T0 + 30.0)
    assert spent(ledger, 36.0)["lost_work"] is None, "from the second, and that from nobody knows what"
    assert ledger.counted(T0 + 36.0)["lost_work"] == 6.0, "of the second, and the least that it can be"
    assert line(ledger.seconds(T0 + 36.0), 36.0).startswith("goodput at most 52.8 %: productive 19.0 s"), "of all time"
    ledger.resumed(T0 + 12.0)
    assert spent(ledger, 36.0)["lost_work"] == 8.0 + 10.0, "from the first: whatever came after that is lost"


def test_an_attempt_without_a_step_has_lost_nothing_whatever_the_next_one_goes_on_from() -> None:
    ledger = begun(first_step=None)
    ledger.failed(T0 + 4.0, T0 + 4.0)
    ledger.resumed_unseen()
    ledger.attempt_began(T0 + 5.0)
    ledger.first_step(T0 + 6.0)

    assert "lost_work" not in spent(ledger, 10.0)


def test_what_is_resumed_from_takes_nothing_from_the_attempt_that_resumes() -> None:
    ledger = begun()
    ledger.resumed(None)  # told when it had begun already

    assert spent(ledger, 15.0) == {"startup": 5.0, "productive": 10.0}


def test_a_step_that_only_the_survivors_began() -> None:
    """Another rank had died before its first one."""
    ledger = begun(first_step=12.0)
    ledger.failed(T0 + 10.0, T0 + 14.0)

    assert spent(ledger, 14.0) == {"startup": 10.0, "detection": 4.0}


def test_an_older_checkpoint_takes_more_away() -> None:
    """The newest one was damaged: the third attempt goes on from the first one's."""
    ledger = failed_and_resumed(saved=12.0)
    ledger.failed(T0 + 36.0, T0 + 36.0)
    ledger.cleared(T0 + 36.0)
    ledger.resumed(T0 + 8.0)
    ledger.attempt_began(T0 + 36.0)
    ledger.first_step(T0 + 36.0)

    assert spent(ledger, 40.0)["productive"] == 3.0 + 4.0
    assert spent(ledger, 40.0)["lost_work"] == 12.0 + 10.0


def test_saving_is_no_work() -> None:
    ledger = begun()
    ledger.stalled(1.0)
    assert spent(ledger, 15.0) == {"startup": 5.0, "productive": 9.0, "checkpoint_stall": 1.0}
    ledger.stalled(3.0)
    ledger.failed(T0 + 20.0, T0 + 20.0)
    ledger.cleared(T0 + 20.0)
    ledger.resumed(T0 + 7.0)

    assert spent(ledger, 20.0) == {"startup": 5.0, "checkpoint_stall": 3.0, "lost_work": 12.0}


def test_an_attempt_that_dies_before_its_first_step_was_start_up_or_restart() -> None:
    ledger = begun(first_step=None)
    ledger.failed(T0 + 4.0, T0 + 4.5)
    ledger.cleared(T0 + 5.0)
    ledger.resumed(None)
    ledger.attempt_began(T0 + 5.0)
    assert spent(ledger, 6.0) == {"startup": 4.0, "detection": 0.5, "teardown": 0.5, "restart": 1.0}

    ledger.failed(T0 + 7.0, T0 + 7.0)
    ledger.cleared(T0 + 7.0)
    ledger.armed()
    ledger.ended(T0 + 8.0, ok=False)

    assert spent(ledger, 9.0) == {"startup": 4.0, "detection": 0.5, "teardown": 1.5, "restart": 2.0}


def test_of_ranks_without_steps_it_is_not_known_what_they_did() -> None:
    """They may have worked, saved, or waited: once it has ended well, or at once where nobody looks for steps."""
    ledger = begun(first_step=None)
    assert spent(ledger, 10.0) == {"startup": 10.0}
    ledger.ended(T0 + 10.0, ok=True)
    assert spent(ledger, 10.0) == {"startup": 2.0, **NOT_KNOWN}
    for armed, ended in ((True, {"startup": 10.0}), (False, {"startup": 2.0, **NOT_KNOWN})):
        ledger = begun(first_step=None)
        if armed:
            ledger.armed()
        ledger.failed(T0 + 10.0, T0 + 10.0)
        ledger.cleared(T0 + 10.0)
        ledger.ended(T0 + 10.0, ok=False)
        assert spent(ledger, 10.0) == ended, "a probe would have seen steps"

    unseen = GoodputLedger(steps_are_seen=False)
    unseen.run_started(T0)
    unseen.attempt_began(T0 + 1.0)
    unseen.attempt_started(T0 + 2.0)
    assert spent(unseen, 2.0) == {"startup": 2.0}, "no rank has run yet"
    unseen.failed(T0 + 10.0, T0 + 11.0)
    unseen.cleared(T0 + 12.0)
    unseen.attempt_began(T0 + 12.0)
    unseen.attempt_started(T0 + 15.0)

    told = unseen.seconds(T0 + 20.0)
    assert told == {
        **dict.fromkeys(GOODPUT_BUCKETS, 0.0),
        "startup": 2.0,
        "detection": 1.0,
        "teardown": 1.0,
        "restart": 3.0,
        "productive": None,
        "checkpoint_stall": None,
    }
    assert share(told, 20.0) is None
    assert line(told, 20.0) == (
        "goodput unknown, no steps were observed: detection 1.0 s, teardown 1.0 s, restart 3.0 s, startup 2.0 s"
    )
    assert line(told, 20.0, why_unknown="nobody looked").startswith("goodput unknown, nobody looked: ")


def test_a_first_step_that_is_known_late() -> None:
    ledger = begun(first_step=None)
    assert spent(ledger, 6.0) == {"startup": 6.0}

    ledger.first_step(T0 + 5.0)

    assert spent(ledger, 6.0) == {"startup": 5.0, "productive": 1.0}


def test_what_a_run_that_did_not_end_well_leaves_to_the_next_one() -> None:
    """With a checkpoint somebody goes on from there; without one nobody is known to do it again."""
    for saved, lost in ((None, None), (T0 + 12.0, 8.0)):
        ledger = begun()
        ledger.stopped(T0 + 20.0)
        ledger.cleared(T0 + 21.0)
        ledger.ended(T0 + 21.0, ok=False, saved_s=saved)
        assert spent(ledger, 21.0).get("lost_work") == lost

    ledger = begun()
    ledger.ended(T0 + 20.0, ok=True, saved_s=T0 + 12.0)
    assert "lost_work" not in spent(ledger, 20.0)


def test_facts_that_were_never_told_cost_no_sense() -> None:
    """An attempt that could not be started, one of which nobody said that it was cleared."""
    ledger = begun()
    ledger.attempt_began(T0 + 10.0)
    ledger.failed(T0 + 11.0, T0 + 12.0)
    ledger.attempt_began(T0 + 15.0)

    assert spent(ledger, 16.0) == {
        "startup": 5.0,
        "productive": 5.0,
        "restart": 1.0 + 1.0,
        "detection": 1.0,
        "teardown": 3.0,
    }


# -- for every story


@dataclass
class Story:
    """Facts with the moment at which each is told."""

    facts: list[tuple[float, Callable[[GoodputLedger], None]]] = field(default_factory=list)
    now_s: float = T0
    ended: bool = False

    def then(self, after_s: float, fact: Callable[[GoodputLedger], None]) -> None:
        self.now_s += after_s
        self.facts.append((self.now_s, fact))


GAP = st.floats(0.0, 100.0)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    story = Story()
    start = story.now_s
    story.then(0.0, lambda ledger: ledger.run_started(start))
    for _ in range(draw(st.integers(0, 5))):
        _attempt(draw, story)
    if draw(st.booleans()):
        story.then(draw(GAP), lambda _: None)
        end, ok = story.now_s, draw(st.booleans())
        saved = draw(st.none() | st.floats(T0 - 50.0, end))
        story.then(0.0, lambda ledger: ledger.ended(end, ok=ok, saved_s=saved))
        story.ended = True
    return story


def _attempt(draw: st.DrawFn, story: Story) -> None:
    story.then(draw(GAP), lambda _: None)
    began = story.now_s
    story.then(0.0, lambda ledger: ledger.attempt_began(began))
    running = began + draw(GAP)
    story.then(running - began, lambda ledger: ledger.attempt_started(running))
    first = running + draw(GAP)
    cause = first + draw(GAP)
    if draw(st.booleans()):  # it stepped, which may be known a moment later
        late = draw(st.floats(0.0, cause - first))
        story.then(first + late - story.now_s, lambda ledger: ledger.first_step(first))
        stall = draw(st.floats(0.0, 1.0)) * (cause - first)
        story.then(0.0, lambda ledger: ledger.stalled(min(stall, late)))
        story.then(max(0.0, cause - story.now_s), lambda ledger: ledger.stalled(stall))
    else:
        cause = running + draw(GAP)
    seen = max(story.now_s, cause) + draw(GAP)
    story.then(seen - story.now_s, lambda ledger: ledger.failed(cause, seen))
    story.then(draw(GAP), lambda _: None)
    gone = story.now_s
    story.then(0.0, lambda ledger: ledger.cleared(gone))
    if draw(st.booleans()):
        saved = draw(st.none() | st.floats(T0 - 50.0, gone))
        story.then(0.0, lambda ledger: ledger.resumed(saved))
    elif draw(st.booleans()):
        story.then(0.0, lambda ledger: ledger.resumed_unseen())


@given(stories(), st.booleans(), GAP)
def test_every_second_is_in_exactly_one_bucket(story: Story, steps_are_seen: bool, more: float) -> None:
    ledger = GoodputLedger(steps_are_seen=steps_are_seen)
    for now_s, fact in story.facts:
        fact(ledger)
        _adds_up(ledger, now_s, now_s - T0)
    _adds_up(ledger, story.now_s + more, story.now_s + (0.0 if story.ended else more) - T0)


def _adds_up(ledger: GoodputLedger, now_s: float, elapsed_s: float) -> None:
    """What is known is as it was counted, and what was counted is all the time."""
    counted, seconds = ledger.counted(now_s), ledger.seconds(now_s)
    assert all(value >= -1e-9 for value in counted.values()), counted
    assert math.fsum(counted.values()) == pytest.approx(elapsed_s, abs=1e-6), counted
    assert {bucket: value for bucket, value in seconds.items() if value is not None}.items() <= counted.items()


@given(stories(), GAP)
def test_no_bucket_shrinks_but_for_what_becomes_known(story: Story, wait_s: float) -> None:
    """Between two facts none does; at a fact only time that was taken for work or for waiting changes its bucket."""
    ledger = GoodputLedger()
    ledger.run_started(T0)
    before = ledger.seconds(T0)
    for now_s, fact in story.facts:
        still = ledger.seconds(now_s)
        assert not _shrunk(GOODPUT_BUCKETS, before, still), (before, still)
        fact(ledger)
        after = ledger.seconds(now_s)
        assert not _shrunk(("checkpoint_stall", "detection", "teardown", "lost_work"), still, after), (still, after)
        before = after
    assert not _shrunk(GOODPUT_BUCKETS, before, ledger.seconds(story.now_s + wait_s))


def _shrunk(names: Iterable[str], before: dict[str, float | None], after: dict[str, float | None]) -> list[str]:
    """Those with less in them than before, as far as is known."""
    told = [(name, before[name], after[name]) for name in names]
    return [name for name, one, other in told if one is not None and other is not None and other < one - 1e-6]


@given(st.lists(st.tuples(st.integers(0, 7), st.floats(-100.0, 5000.0), st.floats(-100.0, 5000.0)), max_size=30))
def test_facts_in_any_order_never_break_the_sum(facts: list[tuple[int, float, float]]) -> None:
    ledger = begun()
    for which, one, other in facts:
        tell: list[Callable[[], None]] = [
            lambda one=one: ledger.attempt_began(one),
            lambda one=one: ledger.attempt_started(one),
            lambda one=one: ledger.first_step(one),
            lambda one=one: ledger.stalled(abs(one)),
            lambda one=one, other=other: ledger.failed(one, other),
            lambda one=one: ledger.cleared(one),
            lambda one=one: ledger.resumed(one),
            lambda one=one: ledger.stopped(one),
        ]
        tell[which]()
        seconds = [value for value in ledger.seconds(T0 + 3000.0).values() if value is not None]
        assert all(value >= 0.0 for value in seconds)
        assert math.fsum(seconds) == pytest.approx(3000.0)


# -- the line


def test_the_line_at_the_end() -> None:
    nothing: dict[str, float | None] = dict.fromkeys(GOODPUT_BUCKETS, 0.0)
    seconds = nothing | {"productive": 41.2, "lost_work": 1.1, "startup": 2.0, "restart": 0.01}

    assert line(seconds, 44.31) == "goodput 93.0 %: productive 41.2 s, lost work 1.1 s, startup 2.0 s"
    assert share(seconds, 44.31) == pytest.approx(41.2 / 44.31)
    assert line(nothing, 0.0) == "goodput 0.0 %"
    hours = nothing | {"productive": 7_322.0, "checkpoint_stall": 61.0}
    assert line(hours, 7_383.0) == "goodput 99.2 %: productive 2 h 02 min, checkpoint stall 1 min 01 s"
