"""What a signal to the launcher asks of the ranks, and for how long it is asked."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpulaunch.launcher.agent import events
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.agent.signals import Signals
from gpulaunch.profiler.channel.control import ControlReader, ControlWriter, create

ASKED_S = 100.0


@pytest.mark.parametrize(
    ("captured_s", "asked"), [(0.0, True), (99.0, True), (101.0, False)], ids=["none", "before", "after"]
)
def test_the_next_attempt_is_asked_for_a_save_only_if_none_was_made_since(
    tmp_path: Path, captured_s: float, asked: bool
) -> None:
    """`captured_s`: when the state in the newest checkpoint was taken."""
    path = str(tmp_path / "control.bin")
    create(path)
    on_signal: dict[int, Callable[[int], None]] = {}
    context = SimpleNamespace(
        spec=SimpleNamespace(signals=(), preempt_signals=(), notify_signals=("SIGUSR2",)),
        loop=SimpleNamespace(now=lambda: ASKED_S, on_signal=on_signal.__setitem__),
        rundir=SimpleNamespace(event=lambda *_, **__: None),
    )
    signals = Signals(
        cast("RunContext", context),
        control=ControlWriter(path),
        say=lambda _: None,
        state=lambda: cast("events.State", None),
        group=lambda: None,
        listening=lambda: True,
        happened=cast("Any", None),
    )
    reader = ControlReader(path)

    on_signal[signal.SIGUSR2](signal.SIGUSR2)
    assert reader.save_requests == 1
    signals.attempt_began(captured_s)

    assert bool(reader.save_requests) == asked
