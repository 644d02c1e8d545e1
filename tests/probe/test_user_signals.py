"""Whose an exception is that comes up within our code."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import Any

import pytest

from gpulaunch.profiler.probe.user_signals import raised_by_program


def rings(*_: object) -> None:
    raise TimeoutError("it takes too long")


class Alarm:
    def rings(self, *_: object) -> None:
        rings()

    def __call__(self, *_: object) -> None:
        rings()


@pytest.mark.parametrize(
    "handler",
    [rings, Alarm().rings, Alarm(), functools.partial(rings), lambda *_: rings()],
    ids=["function", "method", "object", "partial", "lambda"],
)
def test_what_a_handler_raises_is_the_programs(handler: Callable[..., Any]) -> None:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError) as raised:
            signal.raise_signal(signal.SIGALRM)
        assert raised_by_program(raised.value)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_same_function_called_otherwise_is_not() -> None:
    """Nor is what any other code raises."""
    with pytest.raises(TimeoutError) as raised:
        rings()
    assert not raised_by_program(raised.value)
    assert not raised_by_program(ValueError("never raised"))


def test_pythons_own_handlers_are_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIG_IGN, SIG_DFL, one that C has installed (None), and Python's own for Ctrl-C."""
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    with pytest.raises(KeyError) as raised:
        {}["x"]  # type: ignore[index]

    assert not raised_by_program(raised.value)
