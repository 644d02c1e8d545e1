"""Who hands work over never waits for it, gets the newest done, and learns what is late."""

from __future__ import annotations

import threading

import pytest

from gpulaunch.exporters.worker import Worker

WAIT_S = 30.0  # bounds every wait; nothing here takes it unless something is broken


class Hanging:
    """Work that does not come back before the test says so."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.goes_on = threading.Event()
        self.done: list[tuple[int | None, bool]] = []

    def __call__(self, newest: int | None, last: bool) -> None:
        self.began.set()
        assert self.goes_on.wait(WAIT_S)
        self.done.append((newest, last))


def test_work_that_hangs_holds_up_nobody_and_is_late_after_a_while() -> None:
    now_s = 100.0
    work = Hanging()
    worker = Worker("test", work, clock=lambda: now_s)
    assert worker.give(1)
    assert work.began.wait(WAIT_S)
    for number in range(2, 6):
        assert worker.give(number)  # comes back, though nothing of it can be done

    assert (worker.overtaken, worker.late_s) == (3, 0.0)
    now_s += 60.0
    assert worker.late_s == 60.0
    assert not worker.close(within_s=0.01)

    work.goes_on.set()
    assert worker.close(within_s=WAIT_S)
    assert worker.late_s == 0.0
    assert work.done == [(1, False), (5, True)]


def test_at_the_end_it_is_told_so_even_if_there_is_nothing_new_and_nothing_comes_after() -> None:
    work = Hanging()
    worker = Worker("test", work)
    worker.give(1)
    assert work.began.wait(WAIT_S)
    work.goes_on.set()
    assert worker.close(within_s=WAIT_S)
    worker.give(2)
    assert worker.close(within_s=WAIT_S)

    assert work.done == [(1, False), (None, True)]


def test_who_never_had_work_is_not_told_of_the_end() -> None:
    work = Hanging()

    assert Worker("test", work).close(within_s=WAIT_S)
    assert not work.began.is_set()


def test_where_no_thread_can_be_had_the_next_try_may_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    work = Hanging()
    work.goes_on.set()
    worker = Worker("test", work)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        assert not worker.give(1)

    assert worker.give(2)
    assert worker.close(within_s=WAIT_S)
    assert work.done[0][0] == 2
