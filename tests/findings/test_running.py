"""A measurement is repeated some times, and given up only where others had the cores, which the kernel has counted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import running

WORK = "import time\nwhile time.process_time() < 1.0: pass"


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
        ((0.5, 0.5), (False, True), "well"),
        ((0.05, 0.05, 0.5), (False, False, True), "well"),
        ((*[0.5] * (running.ATTEMPTS - 1), 0.2), (False,) * running.ATTEMPTS, "fails"),
        ((*[0.05] * (running.ATTEMPTS - 1), 0.5), (False,) * running.ATTEMPTS, "skips"),
    ],
)
def test_only_others_excuse_a_measurement(
    monkeypatch: pytest.MonkeyPatch, taken: tuple[float, ...], held: tuple[bool, ...], ends: str
) -> None:
    shares = iter(taken)
    monkeypatch.setattr(running.Cores, "taken_by_others", lambda _: next(shares))
    monkeypatch.setattr(running, "wait_for_calm", lambda: None)
    measurements = iter(held)
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
