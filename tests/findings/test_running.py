"""A measurement is repeated some times, and given up only where others had the cores, which the kernel has counted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import running

WORK = "import time\nwhile time.process_time() < 1.0: pass"
CALM, DISTURBED = running.OTHERS / 2, 0.5
LAST = running.ATTEMPTS - 1


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are about a test that runs alone, however many run beside this one."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)


def test_what_we_have_started_is_not_others() -> None:
    """As long as nobody has waited for a child, what it used could be anybody's."""
    cores = running.Cores()
    child = subprocess.Popen([sys.executable, "-c", WORK])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    before = cores.taken_by_others()
    child.wait()

    assert before > cores.taken_by_others()


@pytest.mark.parametrize(
    ("taken", "held", "ends"),
    [
        ((0.9,), (True,), "well"),
        ((CALM, CALM), (False, True), "well"),
        ((*[DISTURBED] * LAST, CALM), (*[False] * LAST, True), "well"),
        ((DISTURBED, CALM, DISTURBED, DISTURBED), (False, False, False, True), "well"),
        ((*[DISTURBED] * LAST, 0.2), (False,) * running.ATTEMPTS, "fails"),
        ((CALM, CALM), (False, False), "fails"),
        ((CALM, DISTURBED, CALM), (False, False, False), "fails"),
        ((CALM, *[DISTURBED] * LAST), (False,) * running.ATTEMPTS, "skips"),
    ],
)
def test_only_others_excuse_a_measurement(
    monkeypatch: pytest.MonkeyPatch, taken: tuple[float, ...], held: tuple[bool, ...], ends: str
) -> None:
    """And then it is done again, to an end; what was measured without them may fail once. Another time it would hold:
    nobody asks it any more."""
    shares = iter(taken)
    monkeypatch.setattr(running.Cores, "taken_by_others", lambda _: next(shares))
    monkeypatch.setattr(running, "wait_for_calm", lambda: None)
    measurements = iter((*held, True))
    judged: list[bool] = []

    def judge(holds: bool) -> None:
        judged.append(holds)
        assert holds

    def end() -> str:
        try:
            running.fairly(lambda: next(measurements), judge)
        except AssertionError:
            return "fails"
        except pytest.skip.Exception:
            return "skips"
        return "well"

    assert (end(), tuple(judged)) == (ends, held)


def test_a_theft_that_is_little_of_the_whole_excuses_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds of a minute and a half, say."""
    stolen_s = iter((0.0, 0.0, 4.0 * (os.cpu_count() or 1), *[4.0 * (os.cpu_count() or 1)] * 1000))
    monkeypatch.setattr(running, "stolen_s", lambda: next(stolen_s))
    thefts = running.Thefts()
    monkeypatch.setattr(thefts.over, "wait", lambda _: thefts.worst > 0)

    with thefts:
        thefts.thread.join()

    assert thefts.worst > running.CROWDED


def test_what_is_wrong_four_times_in_five_does_not_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of five measurements it is right in, but for the first two."""
    monkeypatch.setattr(running.Cores, "taken_by_others", lambda _: CALM)
    monkeypatch.setattr(running, "wait_for_calm", lambda: None)

    def got_through(right: int) -> bool:
        measurements = iter(number == right for number in range(running.ATTEMPTS))
        try:
            running.fairly(lambda: next(measurements), judge)
        except AssertionError:
            return False
        return True

    def judge(holds: bool) -> None:
        assert holds

    assert [got_through(right) for right in range(running.ATTEMPTS)] == [True, True, False, False, False]


def test_measuring_again_has_an_end_for_all_tests_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """When they have waited often enough, the first failure is the last."""
    monkeypatch.setattr(running.Cores, "taken_by_others", lambda _: 0.2)
    monkeypatch.setattr(running, "waited_s", [0.0] * running.MOST_AGAIN)
    measured: list[bool] = []

    def judge(_: None) -> None:
        raise AssertionError

    with pytest.raises(AssertionError):
        running.fairly(lambda: measured.append(True), judge)
    assert measured == [True]


@pytest.mark.parametrize(("workers", "measured"), [("3", 1), ("1", 2)])
def test_beside_other_tests_the_first_failure_counts(
    monkeypatch: pytest.MonkeyPatch, workers: str, measured: int
) -> None:
    """Whatever else used the cores: it is asked again where it is alone."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", workers)
    monkeypatch.setattr(running.Cores, "taken_by_others", lambda _: CALM)
    monkeypatch.setattr(running, "wait_for_calm", lambda: None)
    measurements: list[bool] = []

    def judge(_: None) -> None:
        raise AssertionError

    with pytest.raises(AssertionError):
        running.fairly(lambda: measurements.append(True), judge)
    assert len(measurements) == measured
