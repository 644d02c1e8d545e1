"""GPU time by events, with a stand-in for torch.cuda: a GPU that is behind, and catches up when it is told to."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.quantities import GpuTime
from gpulaunch.profiler.probe.account import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, OTHER
from gpulaunch.profiler.probe.gpu_time import TIMED_EVERY, Events, GpuClock

FIRST_TIMED = TIMED_EVERY // 2


class Event:
    """When it was put into the stream, in the GPU's milliseconds."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.at_ms = -1.0

    def record(self) -> None:
        self.cuda.asked.append("record")
        self.at_ms = self.cuda.queued_ms

    def query(self) -> bool:
        self.cuda.asked.append("query")
        return self.at_ms <= self.cuda.done_ms

    def elapsed_time(self, end: Event) -> float:
        assert max(self.at_ms, end.at_ms) <= self.cuda.done_ms, "torch raises: the GPU has not got there"
        return end.at_ms - self.at_ms


@dataclass
class Cuda:
    """Just enough of torch.cuda. Work is queued, and done when the test says so."""

    initialized: bool = True
    capturing: bool = False
    device: int = 0
    queued_ms: float = 0.0
    done_ms: float = 0.0
    made: int = 0
    asked: list[str] = field(default_factory=list)

    def is_initialized(self) -> bool:
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_device(self) -> int:
        assert self.initialized, "asking would initialise CUDA"
        return self.device

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        self.made += 1
        return Event(self)

    def catch_up(self) -> None:
        self.done_ms = self.queued_ms


class Loop:
    """Steps of which each takes the GPU 2 ms forward, 4 ms backward, 1 ms optimizer and 0.5 ms of the rest."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.words = memoryview(bytearray(8 * 512)).cast("Q")
        self.clock = GpuClock(self.words, cuda)
        self.steps = 0

    def phase(self, phase: int, ms: float) -> None:
        if self.clock.timing:
            self.clock.edge(phase)
        self.cuda.queued_ms += ms

    def step(self, micro_steps: int = 1) -> None:
        for _ in range(micro_steps):
            self.phase(DATA_WAIT, 0)
            self.phase(FORWARD, 2)
            self.phase(BACKWARD, 4)
            self.phase(OTHER, 0)
        self.phase(OPTIMIZER, 1)
        self.phase(OTHER, 0.5)
        self.steps += 1
        self.clock.step(self.steps)

    def run(self, steps: int, *, catches_up: bool = True) -> None:
        for _ in range(steps):
            self.step()
            if catches_up:
                self.cuda.catch_up()

    def ms(self, word: Word) -> float:
        return self.words[word] / 1e6

    @property
    def timed(self) -> int:
        return self.words[GpuTime.steps]


def test_one_step_of_sixteen_is_timed() -> None:
    loop = Loop(Cuda())
    loop.run(4 * TIMED_EVERY)

    assert loop.timed == 4
    assert loop.ms(GpuTime.forward_ns_total) == pytest.approx(4 * 2)
    assert loop.ms(GpuTime.backward_ns_total) == pytest.approx(4 * 4)
    assert loop.ms(GpuTime.optimizer_ns_total) == pytest.approx(4 * 1)
    assert loop.ms(GpuTime.step_ns_total) == pytest.approx(4 * 7.5)


def test_the_first_step_is_like_no_other_and_is_not_timed() -> None:
    loop = Loop(Cuda())
    loop.run(FIRST_TIMED)

    assert loop.cuda.asked == ["record"], "the beginning of the one that comes now"


def test_gradients_accumulated_over_four_batches_are_added_up() -> None:
    loop = Loop(Cuda())
    for _ in range(TIMED_EVERY):
        loop.step(micro_steps=4)
        loop.cuda.catch_up()

    assert (loop.timed, loop.ms(GpuTime.forward_ns_total)) == (1, pytest.approx(4 * 2))


def test_a_gpu_that_is_behind_is_not_waited_for() -> None:
    loop = Loop(Cuda())
    loop.run(3 * TIMED_EVERY, catches_up=False)
    assert loop.timed == 0

    loop.cuda.catch_up()
    loop.step()

    assert loop.timed == 3
    assert loop.ms(GpuTime.step_ns_total) == pytest.approx(3 * 7.5)


def test_events_are_used_again_and_again() -> None:
    loop = Loop(Cuda())
    loop.run(100 * TIMED_EVERY)

    assert loop.timed == 100
    assert loop.cuda.made <= 16


def test_a_gpu_that_never_gets_there_costs_a_bounded_number_of_events() -> None:
    loop = Loop(Cuda())
    loop.run(1000 * TIMED_EVERY, catches_up=False)

    assert loop.timed == 0
    assert loop.cuda.made == 128


def test_a_step_with_more_edges_than_events_is_left_out() -> None:
    loop = Loop(Cuda())
    for micro_steps in (*[1] * FIRST_TIMED, 100, *[1] * (2 * TIMED_EVERY + 1)):
        loop.step(micro_steps)
        loop.cuda.catch_up()

    assert loop.timed == 2, "of three; the events of the first have been given back"


def test_nothing_is_asked_of_a_gpu_that_is_not_in_use() -> None:
    loop = Loop(Cuda(initialized=False))
    loop.run(4 * TIMED_EVERY)

    assert (loop.cuda.asked, loop.cuda.made) == ([], 0)


def test_a_step_that_captures_a_graph_is_left_alone() -> None:
    loop = Loop(Cuda())
    loop.run(FIRST_TIMED)
    loop.cuda.asked.clear()
    loop.cuda.capturing = True
    loop.step()
    assert loop.cuda.asked == []

    loop.cuda.capturing = False
    loop.run(2 * TIMED_EVERY + 1)

    assert loop.timed == 2, "and later ones are timed again"


def test_what_is_done_is_not_asked_for_during_a_capture() -> None:
    loop = Loop(Cuda())
    loop.run(FIRST_TIMED + 1, catches_up=False)
    loop.cuda.catch_up()
    loop.cuda.asked.clear()
    loop.cuda.capturing = True
    loop.step()
    assert loop.cuda.asked == []

    loop.cuda.capturing = False
    loop.step()

    assert loop.timed == 1


def test_a_step_on_another_gpu_is_left_out() -> None:
    """An event belongs to the GPU that it was first recorded on."""
    loop = Loop(Cuda(device=1))
    loop.run(FIRST_TIMED + 1)
    loop.cuda.device = 0
    loop.run(TIMED_EVERY)
    loop.cuda.device = 1
    loop.run(TIMED_EVERY + 1)

    assert loop.timed == 2


# --- copies ---------------------------------------------------------------------------------------------------------


def a_timed_step(cuda: Cuda) -> Loop:
    loop = Loop(cuda)
    loop.run(FIRST_TIMED)
    assert loop.clock.timing
    return loop


def test_a_copy_is_told_when_the_gpu_has_done_it() -> None:
    cuda = Cuda()
    loop = a_timed_step(cuda)
    told: list[int] = []
    began = loop.clock.copy_begins()
    cuda.queued_ms += 3
    loop.clock.copy_ended(began, 0, told.append)
    loop.step()
    assert told == []

    cuda.catch_up()
    loop.step()

    assert told == [3_000_000]


def test_a_call_that_was_no_copy_gives_its_event_back() -> None:
    cuda = Cuda()
    loop = a_timed_step(cuda)
    for _ in range(1000):
        began = loop.clock.copy_begins()
        assert began is not None
        loop.clock.no_copy(began)

    assert cuda.made <= 3


def test_a_copy_to_another_gpu_is_not_timed() -> None:
    cuda = Cuda()
    loop = a_timed_step(cuda)
    told: list[int] = []
    loop.clock.copy_ended(loop.clock.copy_begins(), 1, told.append)
    cuda.catch_up()
    loop.run(2)

    assert told == []


def test_copies_are_not_timed_in_other_steps() -> None:
    loop = Loop(Cuda())

    assert loop.clock.copy_begins() is None


def test_streams_that_pass_events_the_other_way_round_give_no_negative_time() -> None:
    cuda = Cuda()
    loop = a_timed_step(cuda)
    told: list[int] = []
    cuda.queued_ms += 5
    began = loop.clock.copy_begins()
    cuda.queued_ms -= 4  # the stream that is current now is less far
    loop.clock.copy_ended(began, 0, told.append)
    cuda.queued_ms += 10
    cuda.catch_up()
    loop.step()

    assert told == [0]


def test_events_know_their_gpu() -> None:
    events = Events(Cuda(device=2))
    assert not events.is_here(2), "not before the first one"
    events.record()

    assert events.is_here(2)
