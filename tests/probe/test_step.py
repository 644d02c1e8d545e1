"""Stories of training loops, told to the step machine by a fake clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.channel.layout import PHASES, REGION_BITS, Region, StepSource, Word
from gpulaunch.profiler.probe.account import (
    CHECKPOINT,
    COMM,
    DATA_WAIT,
    FORWARD,
    GC,
    H2D,
    MOST_NOTES,
    OTHER,
    SYNC,
    Record,
)
from gpulaunch.profiler.probe.noted import NotedSteps
from gpulaunch.profiler.probe.step import PATIENCE

PLAIN = ("data_wait", "forward", "backward", "optimizer")


@dataclass
class Step:
    """What the machine told of a step that ended."""

    count: int
    start: int
    duration: int
    data_wait: int
    forward: int
    backward: int
    optimizer: int
    samples: int
    rest: dict[str, int] = field(default_factory=dict)
    """The other phases that it had, but for "other"."""


def step_of(count: int, record: Record) -> Step:
    start, duration, *named, samples = record
    phases = dict(zip(PHASES[:-1], named, strict=True))
    rest = {phase: ns for phase, ns in phases.items() if ns and phase not in PLAIN}
    return Step(count, start, duration, *(phases[phase] for phase in PLAIN), samples, rest)


class Loop:
    """A training loop on a clock of its own: each verb takes as long as it is told."""

    def __init__(self) -> None:
        self.now = 1_000
        self.ended: list[Step] = []
        self.regions: list[int] = []
        self.machine = NotedSteps(self.end)
        self.machine.begin(self.now)

    def end(self, count: int, record: Record) -> None:
        self.ended.append(step_of(count, record))

    def pass_edge(self, region: int) -> None:
        self.regions.append(region)

    def work(self, ns: int) -> None:
        self.now += ns

    @contextmanager
    def nested(self, phase: int) -> Iterator[None]:
        """What is done in this block is one thing, as a tap around it sees it."""
        before, began = self.machine.nested_ns, self.now
        yield
        self.machine.nest(phase, began, self.now, before)
        self.machine.catch_up()

    def nest(self, phase: int, ns: int) -> None:
        with self.nested(phase):
            self.work(ns)

    def fetch(self, ns: int, samples: int = 8, trains: bool = True, dataset: int = 1) -> None:
        self.pass_edge(self.machine.loader_enter(self.now))
        self.now += ns
        self.pass_edge(self.machine.loader_exit(self.now, samples, trains, dataset))

    def exhaust(self) -> None:
        self.pass_edge(self.machine.loader_enter(self.now))
        self.pass_edge(self.machine.loader_end(self.now))

    def backward(self, ns: int, accumulates: bool = True) -> None:
        self.pass_edge(self.machine.backward_enter(self.now))
        self.now += ns
        self.pass_edge(self.machine.backward_exit(self.now, accumulates))

    def optimize(self, ns: int, identity: int = 1) -> None:
        self.pass_edge(self.machine.optimizer_enter(self.now, identity))
        self.now += ns
        self.pass_edge(self.machine.optimizer_exit(self.now, identity))

    def step(self) -> None:
        """A plain step: 10 waiting, 20 forward, 30 backward, 5 clipping, 3 optimizer, 2 logging."""
        self.fetch(10)
        self.work(20)
        self.backward(30)
        self.work(5)
        self.optimize(3)
        self.work(2)

    def total(self, word: Word) -> int:
        return self.machine.totals[word - Word.STEPS]

    @property
    def steps(self) -> int:
        return self.total(Word.STEPS)

    @property
    def samples(self) -> int:
        return self.total(Word.SAMPLES)

    @property
    def phases(self) -> dict[str, int]:
        """The total of each phase that there was."""
        totals = {phase: self.total(Word[f"{phase.upper()}_NS_TOTAL"]) for phase in PHASES}
        return {phase: ns for phase, ns in totals.items() if ns}


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_plain_loop(loop):
    for _ in range(3):
        loop.step()

    assert loop.ended[1] == Step(1, 1068, 70, 10, 20, 30, 3, 8)
    assert loop.phases == {"data_wait": 30, "forward": 60, "backward": 90, "optimizer": 9, "other": 3 * 5 + 2 * 2}
    machine = loop.machine
    assert (loop.steps, machine.microsteps, loop.samples, machine.skipped_steps) == (3, 3, 24, 0)
    assert machine.source is StepSource.OPTIMIZER


def test_gradients_accumulated_over_four_batches_are_one_step(loop):
    for _ in range(3):
        for _ in range(4):
            loop.fetch(10)
            loop.work(20)
            loop.backward(30)
        loop.optimize(3)

    assert loop.ended == [Step(1, 1000 + 243 * k, 243, 40, 80, 120, 3, 32) for k in range(3)]
    assert (loop.machine.microsteps, loop.machine.skipped_steps) == (12, 0)


def test_batches_fetched_in_advance_for_accumulation_are_waited_for(loop):
    """As the Hugging Face Trainer does: all batches of a step first, also at an epoch's end, where one is missing."""
    for batches in (4, 4, 3):
        for _ in range(batches):
            loop.fetch(10)
        if batches < 4:
            loop.exhaust()
        for _ in range(batches):
            loop.work(20)
            loop.backward(30)
        loop.optimize(3)

    assert [step.data_wait for step in loop.ended] == [40, 40, 30]
    assert loop.samples == 8 * 11


def test_a_batch_fetched_before_the_optimizer_steps_belongs_to_the_step_it_was_waited_for_in(loop):
    """A loop that prefetches: next(loader) between backward and optimizer."""
    loop.fetch(10)
    for _ in range(3):
        loop.work(20)
        loop.backward(30)
        loop.fetch(10)
        loop.optimize(3)

    assert [(step.duration, step.data_wait) for step in loop.ended] == [(73, 20), (63, 10), (63, 10)]
    assert loop.samples == 24


def test_two_loaders_read_side_by_side(loop):
    """zip(labelled, unlabelled): both waits count, both batches count."""
    for _ in range(2):
        loop.fetch(10)
        loop.fetch(15)
        loop.work(20)
        loop.backward(30)
        loop.optimize(3)

    assert loop.ended[1] == Step(1, 1078, 78, 25, 20, 30, 3, 16)


def test_a_gan_steps_two_optimizers_and_makes_one_step(loop):
    for _ in range(4):
        loop.fetch(10)
        loop.work(20)
        loop.backward(30)
        loop.optimize(3, identity=1)
        loop.work(20)
        loop.backward(30)
        loop.optimize(3, identity=2)

    assert loop.steps == 4
    assert [step.duration for step in loop.ended[1:]] == [116] * 3
    assert loop.phases["optimizer"] == 3 * 7, "the last step of the second optimizer is in a step not yet ended"


def test_of_two_optimizers_the_busier_one_counts(loop):
    """A WGAN's generator steps once in five batches; here it even comes first."""
    for batch in range(20):
        loop.fetch(10)
        if batch % 5 == 0:
            loop.backward(30)
            loop.optimize(3, identity=2)
        loop.backward(30)
        loop.optimize(3, identity=1)

    assert 19 <= loop.steps <= 20


def test_optimizers_that_have_batches_of_their_own_each_make_steps(loop):
    """Two take turns, and each time there is a new batch."""
    for batch in range(6):
        loop.fetch(10)
        loop.backward(30)
        loop.optimize(3, identity=1 + batch % 2)

    assert [(step.count, step.duration) for step in loop.ended] == [(1, 43)] * 6


def test_an_optimizer_in_place_of_another_makes_the_next_step(loop):
    for identity in (1, 1, 2, 2):
        loop.fetch(10)
        loop.backward(30)
        loop.optimize(3, identity=identity)

    assert loop.steps == 4


@pytest.mark.parametrize("each", [2, 3])
def test_federated_clients_have_an_optimizer_each(loop, each):
    for client in range(50):
        loop.machine.optimizer_made(100 + client)
        for _ in range(each):
            loop.backward(30)
            loop.optimize(3, identity=100 + client)

    assert loop.steps == 50 * each


@pytest.mark.parametrize("places", [3, 1000], ids=["whose places are taken again", "kept"])
def test_optimizers_that_step_once_make_a_step_each(loop, places):
    """It takes a while to tell them from those that share a step; none of theirs is lost."""
    for client in range(100):
        loop.machine.optimizer_made(100 + client % places)
        loop.backward(30)
        loop.optimize(3, identity=100 + client % places)

    assert 100 - 16 <= loop.steps <= 100
    assert sum(step.duration * step.count for step in loop.ended) == loop.steps * 33


def test_one_optimizer_per_layer_stepping_from_gradient_hooks(loop):
    """Optimizer-in-backward: the optimizers' time is not the backward's, and four of them make one step."""
    for _ in range(3):
        loop.fetch(10)
        loop.work(20)
        loop.machine.backward_enter(loop.now)
        for identity in (1, 2, 3, 4):
            loop.work(5)
            loop.optimize(2, identity=identity)
        loop.work(1)
        loop.machine.backward_exit(loop.now, True)

    assert (loop.steps, loop.machine.microsteps) == (3, 3)
    assert loop.ended[1] == Step(1, 1037, 59, 10, 20, 3 * 5 + 1 + 5, 8, 8)


def test_an_optimizer_that_wraps_another_steps_once(loop):
    for _ in range(2):
        loop.backward(30)
        loop.machine.optimizer_enter(loop.now, 1)
        loop.work(4)
        loop.optimize(3, identity=2)
        loop.machine.optimizer_exit(loop.now, 1)

    assert [(step.duration, step.optimizer) for step in loop.ended] == [(37, 7), (37, 7)]


def test_an_optimizer_hooked_in_class_and_base_class_steps_once(loop):
    loop.backward(30)
    loop.machine.optimizer_enter(loop.now, 1)
    loop.optimize(3, identity=1)
    loop.machine.optimizer_exit(loop.now, 1)

    assert loop.steps == 1


def test_an_optimizer_that_raised_does_not_stop_the_count(loop):
    loop.step()
    loop.fetch(10)
    loop.backward(30)
    loop.machine.optimizer_enter(loop.now, 7)  # raises: no exit
    loop.step()
    loop.step()

    assert loop.steps == 3


def test_a_step_skipped_for_inf_gradients_is_counted_as_skipped(loop):
    """GradScaler leaves the optimizer out: at the start, where the scale is still too large, and now and then later."""
    for optimizes in (False, True, True, True, False, True, True, False, False, True, True):
        loop.fetch(10)
        loop.backward(30)
        if optimizes:
            loop.optimize(3)
        else:
            loop.machine.left_out(1)

    assert (loop.steps, loop.machine.skipped_steps, loop.machine.microsteps) == (7, 4, 11)


def test_of_two_optimizers_that_are_left_out_one_is_counted(loop):
    for _ in range(3):
        for identity in (1, 2):
            loop.backward(30)
            loop.machine.left_out(identity)

    assert loop.machine.skipped_steps == 3


def test_a_short_last_accumulation_is_no_skipped_step(loop):
    for backwards in (4, 2, 4, 2, 4, 4, 2, 4):
        for _ in range(backwards):
            loop.backward(30)
        loop.optimize(3)

    assert loop.machine.skipped_steps == 0


def test_lbfgs_evaluates_its_closure_as_often_as_it_likes(loop):
    for evaluations in (5, 7, 5, 20):
        loop.fetch(10)
        loop.machine.optimizer_enter(loop.now, 1)
        for _ in range(evaluations):
            loop.work(20)
            loop.backward(30)
        loop.work(4)
        loop.machine.optimizer_exit(loop.now, 1)

    assert [(step.data_wait, step.forward, step.backward, step.optimizer) for step in loop.ended] == [
        (10, 20 * n, 30 * n, 4) for n in (5, 7, 5, 20)
    ]
    assert (loop.machine.microsteps, loop.machine.skipped_steps) == (37, 0)


def test_validation_under_no_grad_between_steps_is_validation(loop):
    loop.step()
    for _ in range(100):
        loop.fetch(50, trains=False)
        loop.work(50)
    loop.exhaust()
    loop.step()
    loop.step()

    assert loop.ended[1] == Step(1, 1068, 10_070, 10, 20, 30, 3, 8, {"validation": 10_000})
    assert loop.ended[2].duration == 70


def test_validation_that_only_the_forward_knows_of_is_validation_too(loop):
    """`for batch in loader: with no_grad(): ...`: gradients are on while the batch is fetched."""
    loop.step()
    for _ in range(30):
        loop.fetch(50)
        loop.work(50)
    loop.exhaust()
    loop.step()

    assert loop.ended[1] == Step(1, 1068, 3_070, 10, 20, 30, 3, 8, {"validation": 3_000})
    assert loop.samples == 16


def test_a_validation_that_is_broken_off_is_no_training(loop):
    """`for number, batch in enumerate(loader): with no_grad(): ...; if number == 20: break`."""
    for _ in range(3):
        loop.step()
        loop.step()
        for _ in range(20):
            loop.fetch(50, dataset=2)
            loop.work(50)
    loop.step()

    assert loop.samples == 7 * 8
    assert [step.data_wait for step in loop.ended] == [10] * 7
    assert [step.rest for step in loop.ended] == [{}, {}, *[{"validation": 2_000}, {}] * 2, {"validation": 2_000}]


def test_batches_of_two_datasets_that_are_always_trained_on_together_are_no_validation(loop):
    """Three without labels, then one with, and one backward for all of them."""
    for _ in range(5):
        for _ in range(3):
            loop.fetch(10, dataset=2)
        loop.fetch(10)
        loop.backward(30)
        loop.optimize(3)

    assert loop.samples == 5 * 4 * 8
    assert [(step.data_wait, step.rest) for step in loop.ended] == [(40, {})] * 5


def test_a_long_validation_without_end_does_not_become_data_wait(loop):
    loop.step()
    for _ in range(PATIENCE + 1):
        loop.fetch(50, dataset=2)
    loop.step()

    assert loop.machine.source is StepSource.OPTIMIZER
    assert loop.ended[1].data_wait == 50 + 10, "only what was fetched after patience ran out may be taken for training"
    assert loop.ended[1].rest == {"validation": 50 * PATIENCE}


def test_a_checkpointed_backward_enters_autograd_again(loop):
    loop.fetch(10)
    loop.work(20)
    loop.machine.backward_enter(loop.now)
    loop.work(10)
    loop.backward(15)
    loop.work(5)
    loop.machine.backward_exit(loop.now, True)
    loop.optimize(3)

    assert loop.ended == [Step(1, 1000, 63, 10, 20, 30, 3, 8)]
    assert loop.machine.microsteps == 1


def test_a_gradient_penalty_is_backward_time_but_no_micro_step(loop):
    loop.fetch(10)
    loop.work(20)
    loop.backward(7, accumulates=False)
    loop.work(5)
    loop.backward(30)
    loop.optimize(3)

    assert loop.ended == [Step(1, 1000, 75, 10, 25, 37, 3, 8)]
    assert loop.machine.microsteps == 1


def test_gradients_by_autograd_grad_alone_make_micro_steps(loop):
    for _ in range(3):
        loop.fetch(10)
        loop.backward(30, accumulates=False)
        loop.optimize(3)

    assert (loop.steps, loop.machine.microsteps) == (3, 3)


def test_without_a_dataloader_the_rest_is_still_there(loop):
    for _ in range(3):
        loop.work(20)
        loop.backward(30)
        loop.optimize(3)

    assert loop.ended[1:] == [Step(1, 1053 + 53 * k, 53, 0, 20, 30, 3, 0) for k in range(2)]


def test_without_an_optimizer_each_backward_ends_a_step(loop):
    """The first ones are entered together, at their mean, when it is clear that no optimizer will come."""
    for _ in range(PATIENCE + 10):
        loop.fetch(10)
        loop.work(20)
        loop.backward(30)

    assert loop.machine.source is StepSource.BACKWARD
    assert (loop.steps, loop.samples) == (PATIENCE + 10, 8 * (PATIENCE + 10))
    assert loop.ended[0] == Step(PATIENCE, 1000 + 60 * (PATIENCE - 1), 60, 10, 20, 30, 0, 8)
    assert loop.ended[1] == Step(1, 1000 + 60 * PATIENCE, 60, 10, 20, 30, 0, 8)


def test_an_optimizer_that_comes_late_takes_over(loop):
    for _ in range(PATIENCE):
        loop.backward(30)
    before = loop.steps
    for _ in range(10):
        loop.step()

    assert loop.machine.source is StepSource.OPTIMIZER
    assert before + 10 <= loop.steps <= before + 11
    assert loop.ended[-1] == Step(1, loop.ended[-1].start, 70, 10, 20, 30, 3, 8)


def test_much_accumulation_is_not_taken_for_a_missing_optimizer(loop):
    for _ in range(3):
        for _ in range(PATIENCE - 1):
            loop.backward(30)
        loop.optimize(3)

    assert (loop.steps, loop.machine.source) == (3, StepSource.OPTIMIZER)


def test_an_optimizer_that_was_made_is_waited_for(loop):
    """The Hugging Face Trainer reads all the batches of a step before the first backward."""
    loop.machine.optimizer_made(1)
    for _ in range(3):
        for _ in range(2 * PATIENCE):
            loop.fetch(10)
        for _ in range(2 * PATIENCE):
            loop.backward(30)
        loop.optimize(3)

    assert (loop.steps, loop.machine.microsteps, loop.samples) == (3, 6 * PATIENCE, 8 * 6 * PATIENCE)
    assert loop.phases["data_wait"] == 10 * 6 * PATIENCE


def test_what_is_compiled_may_be_the_optimizer(loop):
    loop.machine.optimizer_made(1)
    loop.machine.compiled()
    loop.machine.optimizer_made(1)
    for _ in range(PATIENCE):
        loop.backward(30)

    assert (loop.steps, loop.machine.source) == (PATIENCE, StepSource.BACKWARD)


def test_batches_without_gradients_inside_that_were_not_trained_on_are_told(loop):
    told: list[tuple[int, bool]] = []
    loop.machine.on_evaluated = lambda batches, trains: told.append((batches, trains))
    loop.step()
    for dataset in (2, 1):
        for _ in range(3):
            loop.fetch(10, dataset=dataset)
        loop.exhaust()
    loop.step()

    assert told == [(3, False), (3, True)]
    assert loop.samples == 16


def test_without_backward_each_batch_ends_a_step(loop):
    """A wholly compiled step shows nothing but its batches."""
    for _ in range(PATIENCE + 10):
        loop.fetch(10)
        loop.work(90)
    loop.exhaust()

    assert loop.machine.source is StepSource.DATALOADER
    assert (loop.steps, loop.samples) == (PATIENCE + 10, 8 * (PATIENCE + 10))
    assert loop.ended[-1] == Step(1, loop.ended[-1].start, 100, 10, 0, 0, 0, 8)


def test_where_no_backward_can_be_seen_batches_are_trained_on_by_the_optimizer(loop):
    """A torch whose autograd looks different: its hook is not placed, and no batch is taken for an evaluation's."""
    evaluated = []
    loop.machine.on_evaluated = lambda *told: evaluated.append(told)
    for _ in range(2 * PATIENCE):
        loop.fetch(5)
        loop.work(20)
        loop.optimize(3)

    assert (loop.steps, loop.samples, evaluated) == (2 * PATIENCE, 16 * PATIENCE, [])
    assert loop.phases == {"data_wait": 10 * PATIENCE, "optimizer": 6 * PATIENCE, "other": 40 * PATIENCE}


def test_a_backward_shows_that_batches_are_not_the_steps(loop):
    for _ in range(PATIENCE + 10):
        loop.fetch(10)
    for _ in range(3):
        loop.step()

    assert loop.machine.source is StepSource.OPTIMIZER
    assert loop.ended[-1].duration == 70


def test_the_users_own_steps_are_the_only_ones(loop):
    for _ in range(3):
        loop.step()
        loop.step()
        loop.machine.mark_step(loop.now)

    assert loop.machine.source is StepSource.MARK
    assert loop.steps == 1 + 1 + 1 + 2, "two before the first mark, then one for each mark"
    assert [step.duration for step in loop.ended[-2:]] == [140, 140]


def test_the_users_own_phases_hold_until_their_block_ends(loop):
    """Data by hand: the block is data_wait, whatever happens in it; a block within it holds for itself."""
    for _ in range(2):
        outer = loop.machine.mark_phase(loop.now, DATA_WAIT)
        loop.work(40)
        inner = loop.machine.mark_phase(loop.now, OTHER)
        loop.fetch(6)
        loop.machine.mark_phase(loop.now, inner)
        loop.work(1)
        loop.machine.mark_phase(loop.now, outer)
        loop.work(20)
        loop.backward(30)
        loop.optimize(3)

    assert loop.ended[1] == Step(1, 1100, 100, 41, 20, 30, 3, 8)


def test_a_helper_threads_batches_count_as_samples_only(loop):
    for _ in range(2):
        loop.machine.add_samples(8)
        loop.work(20)
        loop.backward(30)
        loop.optimize(3)

    assert [(step.data_wait, step.forward) for step in loop.ended] == [(0, 20), (0, 20)]
    assert loop.samples == 16


REGIONS = {
    "L": "LOADER",
    "F": "FORWARD",
    "B": "BACKWARD",
    "S": "STEPPING",
    "O": "OPTIMIZER",
    ".": "OTHER",
    "V": "VALIDATION",
}


def regions(loop: Loop) -> str:
    """The region after each edge, one letter each."""
    names = {Region[name]: letter for letter, name in REGIONS.items()}
    return "".join(names[Region(region)] for region in loop.regions)


def test_each_edge_tells_where_the_thread_is_from_there_on(loop):
    loop.step()
    loop.fetch(10, trains=False)  # validation
    loop.exhaust()

    assert regions(loop) == "LFBSO." + "LV" + "L."


def test_accumulated_gradients_leave_the_thread_before_the_optimizer(loop):
    for _ in range(2):
        loop.fetch(10)
        loop.backward(30)
    loop.optimize(3)

    assert regions(loop) == "LFBS" + "LFBS" + "O."


def test_an_edge_within_another_goes_back_to_where_it_came_from(loop):
    """A checkpointed backward, optimizers that step from gradient hooks, one within another, and a closure."""
    loop.pass_edge(loop.machine.backward_enter(loop.now))
    loop.backward(5)
    loop.optimize(2, identity=1)
    loop.pass_edge(loop.machine.backward_exit(loop.now, True))
    nested_backward, loop.regions = regions(loop), []

    loop.pass_edge(loop.machine.optimizer_enter(loop.now, 1))
    loop.optimize(2, identity=2)
    loop.backward(5)
    loop.backward(5, accumulates=False)
    loop.pass_edge(loop.machine.optimizer_exit(loop.now, 1))

    assert nested_backward == "B" + "BB" + "OB" + "S"
    assert regions(loop) == "O" + "OO" + "BO" + "BO" + "."


# --- what lies inside ---------------------------------------------------------------------------------------------


def test_what_is_nested_is_taken_out_of_the_phase_around_it(loop):
    """A copy and a sync in the forward, a collection in the wait, in the backward, and between the phases."""
    for _ in range(2):
        loop.pass_edge(loop.machine.loader_enter(loop.now))
        loop.work(8)
        loop.nest(GC, 2)
        loop.pass_edge(loop.machine.loader_exit(loop.now, 8, True))
        loop.work(5)
        loop.nest(H2D, 7)
        loop.work(6)
        loop.nest(SYNC, 4)
        loop.pass_edge(loop.machine.backward_enter(loop.now))
        loop.nest(GC, 3)
        loop.work(30)
        loop.pass_edge(loop.machine.backward_exit(loop.now, True))
        loop.nest(GC, 1)
        loop.work(2)
        loop.optimize(3)

    assert loop.ended[1] == Step(1, 1071, 71, 8, 11, 30, 3, 8, {"gc": 6, "h2d": 7, "sync": 4})
    assert loop.phases["other"] == 2 * 2


def test_what_is_nested_within_nested_is_not_counted_twice(loop):
    """A checkpoint that waits for another rank and collects garbage meanwhile."""
    for _ in range(2):
        loop.backward(30)
        loop.optimize(3)
        with loop.nested(CHECKPOINT):
            loop.work(10)
            with loop.nested(COMM):
                loop.work(5)
                loop.nest(GC, 2)
            loop.work(1)

    assert loop.ended[1] == Step(1, 1033, 51, 0, 0, 30, 3, 0, {"checkpoint": 11, "comm": 5, "gc": 2})


def test_nest_tells_how_long_it_was_without_what_was_nested_inside(loop):
    before, began = loop.machine.nested_ns, loop.now
    loop.work(10)
    loop.nest(GC, 4)

    assert loop.machine.nest(COMM, began, loop.now, before) == 10
    assert loop.machine.nest(COMM, began, loop.now, before) == 0, "told twice, counted once"


def test_an_edge_passed_within_something_nested_leaves_it_what_comes_after(loop):
    """A save whose hook of the user's own reads a batch: the time before that edge has its phase already."""
    loop.fetch(10)
    loop.work(20)
    with loop.nested(CHECKPOINT):
        loop.work(4)
        loop.backward(30)
        loop.work(6)
    loop.optimize(3)

    assert loop.ended == [Step(1, 1000, 73, 10, 24, 30, 3, 8, {"checkpoint": 6})]


def test_garbage_collected_between_the_clock_and_the_machine_is_not_counted_twice(loop):
    """An edge comes with a time from before the collection; up to the collection's end the time has its phase."""
    loop.fetch(10)
    loop.work(20)
    read = loop.now
    loop.nest(GC, 50)
    loop.machine.backward_enter(read)
    loop.work(30)
    loop.machine.backward_exit(loop.now, True)
    loop.optimize(3)

    assert loop.ended == [Step(1, 1000, 113, 10, 0, 50, 3, 8, {"gc": 50})], "20 of the forward are taken for backward"


def test_garbage_collected_while_a_step_is_entered_belongs_to_the_next_one():
    class Collecting(Loop):
        def end(self, count: int, record: Record) -> None:
            super().end(count, record)
            self.nest(GC, 7)

    loop = Collecting()
    for _ in range(2):
        loop.backward(30)
        loop.optimize(3)

    assert [step.rest for step in loop.ended] == [{}, {"gc": 7}]
    assert [step.duration for step in loop.ended] == [33, 40]


def test_what_the_user_has_named_keeps_what_is_nested_in_it(loop):
    outer = loop.machine.mark_phase(loop.now, FORWARD)
    loop.work(5)
    loop.nest(GC, 4)
    loop.machine.mark_phase(loop.now, outer)
    loop.backward(30)
    loop.optimize(3)

    assert loop.ended == [Step(1, 1000, 42, 0, 9, 30, 3, 0)]


def test_garbage_collected_in_a_validation_is_not_validation(loop):
    loop.step()
    for _ in range(3):  # gradients are on while the batch is fetched
        loop.fetch(50)
        loop.work(40)
        loop.nest(GC, 10)
    loop.exhaust()
    loop.step()

    assert loop.ended[1].rest == {"validation": 270, "gc": 30}


def test_a_validation_left_early_ends_where_training_goes_on(loop):
    """`break`: its dataloader never ends, and nothing tells the end of it from what follows."""
    loop.step()
    for _ in range(3):
        loop.fetch(50, trains=False)
        loop.work(40)
    loop.work(7)
    loop.step()

    assert loop.ended[1] == Step(1, 1068, 70 + 277, 10, 20, 30, 3, 8, {"validation": 277})


def test_what_follows_a_validation_is_not_validation(loop):
    loop.step()
    loop.fetch(50, trains=False)
    loop.exhaust()
    loop.work(1_000)
    loop.step()

    assert loop.ended[1].rest == {"validation": 50}
    assert loop.phases["other"] == 2 * 5 + 2 + 1_000


def test_a_batch_fetched_before_a_validation_is_still_trained_on(loop):
    """A loop that prefetches: the next batch is there, then it validates, then it trains on that batch."""
    loop.fetch(10)
    for _ in range(2):
        loop.work(20)
        loop.backward(30)
        loop.fetch(10)
        loop.optimize(3)
        loop.fetch(50, trains=False)
        loop.exhaust()

    assert loop.samples == 16
    assert loop.ended[1] == Step(1, 1073, 113, 10, 20, 30, 3, 8, {"validation": 50})


def test_waiting_for_gradients_of_other_ranks_is_taken_out_of_the_backward(loop):
    """What the reducer has logged, but never more than there was of backward."""
    loop.backward(30)
    loop.optimize(3)
    loop.machine.exposed_ns = 12
    loop.backward(30)
    loop.optimize(3)
    loop.machine.exposed_ns = 1_000
    loop.backward(30)
    loop.optimize(3)

    assert [(step.backward, step.rest) for step in loop.ended] == [(30, {}), (18, {"comm": 12}), (0, {"comm": 30})]


EDGES = (
    "loader_enter",
    "loader_exit",
    "loader_end",
    "backward_enter",
    "backward_exit",
    "optimizer_enter",
    "optimizer_exit",
    "mark_step",
    "mark_phase",
    "nest",
)


class AnyLoop(Loop):
    """A loop in which garbage is collected at the worst of times: after the clock was read, and within the machine."""

    collects_ns = 0

    def end(self, count: int, record: Record) -> None:
        super().end(count, record)
        self.nest(GC, self.collects_ns)

    def pass_any(self, name: str, number: int, flag: bool) -> int | None:
        machine, read = self.machine, self.now
        self.nest(GC, self.collects_ns)
        if name == "loader_exit":
            return machine.loader_exit(read, number, flag)
        if name == "backward_exit":
            return machine.backward_exit(read, flag)
        if name.startswith("optimizer"):
            return getattr(machine, name)(read, 1 + number)
        if name == "mark_phase":
            machine.mark_phase(read, number)
        elif name == "nest":
            machine.nest(1 + number, read - 5 * self.collects_ns, self.now, machine.nested_ns if flag else 0)
            machine.catch_up()
        else:
            return getattr(machine, name)(read)  # None for a mark
        return None


# --- noted, and taken up later ------------------------------------------------------------------------------------


class NotedLoop(Loop):
    """A loop that notes what it passes, and has it taken up after so many notes."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self.together = together
        self.machine.pivot, self.machine.samples, self.machine.dataset = 1, 8, 1

    def note(self, region: Region) -> None:
        self.machine.notes.append(self.now << REGION_BITS | region)
        if len(self.machine.notes) >= self.together:
            self.pass_edge(self.machine.catch_up())

    def nest(self, phase: int, ns: int) -> None:
        self.now += ns
        self.machine.nest(phase, self.now - ns, self.now, self.machine.nested_ns)

    def fetch(self, ns: int, samples: int = 8, trains: bool = True, dataset: int = 1) -> None:
        self.note(Region.LOADER)
        self.now += ns
        self.note(Region.FORWARD)

    def backward(self, ns: int, accumulates: bool = True) -> None:
        self.note(Region.BACKWARD)
        self.now += ns
        self.note(Region.STEPPING)

    def optimize(self, ns: int, identity: int = 1) -> None:
        self.note(Region.OPTIMIZER)
        self.now += ns
        self.note(Region.OTHER)


WORK = {
    "fetch": lambda loop, ns: loop.fetch(ns),
    "work": lambda loop, ns: loop.work(ns),
    "backward": lambda loop, ns: loop.backward(ns),
    "optimize": lambda loop, ns: loop.optimize(ns),
    "collect": lambda loop, ns: loop.nest(GC, ns),
    "copy": lambda loop, ns: loop.nest(H2D, ns),
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(WORK)), st.integers(1, 1000)), max_size=200),
    st.integers(1, 60),
)
def test_what_is_noted_and_taken_up_later_comes_to_the_same(work, together):
    at_once, noted = Loop(), NotedLoop(together)
    for loop in (at_once, noted):
        for what, ns in work:
            WORK[what](loop, ns)
    noted.machine.catch_up()

    assert noted.ended == at_once.ended
    assert noted.machine.totals == at_once.machine.totals
    assert noted.machine.notes == []


def test_the_region_after_the_last_edge_is_told():
    loop = NotedLoop(100)
    assert loop.machine.catch_up() == 0, "there was none"
    loop.fetch(10)
    assert loop.machine.catch_up() == Region.FORWARD


def test_what_a_signal_handler_raises_meanwhile_loses_the_edge_it_hit_and_no_other():
    loop = NotedLoop(100)
    for _ in range(3):
        loop.step()
    told = iter([None, TimeoutError("it takes too long")])
    end = loop.machine.on_step

    def interrupted(count: int, record: Record) -> None:
        end(count, record)
        if isinstance(error := next(told, None), TimeoutError):
            raise error

    loop.machine.on_step = interrupted
    with pytest.raises(TimeoutError):
        loop.machine.catch_up()
    assert loop.steps == 2
    loop.machine.catch_up()

    assert loop.steps == 3
    assert [step.duration for step in loop.ended] == [68, 70, 70]


def test_a_helper_thread_may_note_the_batches_that_it_fetches():
    loop = NotedLoop(100)
    for _ in range(2):
        loop.machine.note_samples(8)
        loop.backward(30)
        loop.optimize(3)
    assert loop.samples == 0
    loop.machine.catch_up()

    assert [step.samples for step in loop.ended] == [8, 8]


def test_notes_that_nobody_takes_up_are_bounded_and_no_sample_is_lost(loop):
    for _ in range(MOST_NOTES):
        loop.machine.note_samples(1)
        loop.machine.nest(GC, loop.now, loop.now + 1, loop.machine.nested_ns)
    assert len(loop.machine.notes) < MOST_NOTES + 3
    loop.machine.catch_up()
    loop.backward(30)
    loop.optimize(3)

    assert loop.samples == MOST_NOTES


# What 8 steps took: in all, and by phase.
EIGHT_STEPS = [800, 80, 0, 160, 240, 0, 120, 0, 0, 0, 0, 0, 200]


@pytest.mark.parametrize(
    ("took", "data_wait", "forward", "backward", "optimizer", "other"),
    [(800, 80, 160, 240, 120, 200), (400, 40, 80, 120, 60, 100), (1000, 80, 160, 240, 120, 400)],
    ids=["as long", "half as long", "longer: nobody knows by what"],
)
def test_steps_that_were_not_observed_are_taken_to_be_like_others(took, data_wait, forward, backward, optimizer, other):
    loop = Loop()
    loop.step()
    loop.step()
    before = loop.phases
    end_ns = loop.machine.totals[Word.LAST_STEP_MONOTONIC_NS - Word.STEPS] + took
    loop.machine.unobserved(end_ns, 8, 64, 8, EIGHT_STEPS)
    after = loop.phases

    grown = {phase: after[phase] - before.get(phase, 0) for phase in after}
    assert grown == {
        "data_wait": data_wait,
        "forward": forward,
        "backward": backward,
        "optimizer": optimizer,
        "other": other,
    }
    assert (loop.steps, loop.total(Word.MICROSTEPS), loop.total(Word.SAMPLES)) == (10, 10, 80)
    assert loop.ended[-1].count == 8
    assert sum(loop.phases.values()) == loop.total(Word.STEP_NS_TOTAL)


def test_which_optimizer_ends_steps():
    loop = Loop()
    assert not loop.machine.ends_step(1)
    loop.step()

    assert loop.machine.ends_step(1)
    assert not loop.machine.ends_step(2)
    assert not loop.machine.ends_step(0), "the user has not said so"
    loop.machine.mark_step(loop.now)
    assert loop.machine.ends_step(0)
    assert not loop.machine.ends_step(1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(EDGES),
            st.integers(0, 10**9),
            st.integers(0, len(PHASES) - 1),
            st.booleans(),
            st.integers(0, 10**9),
        ),
        max_size=400,
    ),
    st.integers(0, 10**9),
)
def test_any_sequence_of_edges_gives_parts_that_sum_to_the_step(edges, exposed_ns):
    """Exceptions, threads and new versions of torch may leave out or repeat any edge: numbers only grow, and add up."""
    loop = AnyLoop()
    machine = loop.machine
    machine.exposed_ns = exposed_ns
    for name, ns, number, flag, collects_ns in edges:
        loop.now += ns
        loop.collects_ns = collects_ns
        before = (*machine.totals[:-3], machine.microsteps, machine.skipped_steps)
        region = loop.pass_any(name, number, flag)

        assert sum(loop.phases.values()) == loop.total(Word.STEP_NS_TOTAL)
        assert region is None or region in tuple(Region)[1:]
        after = (*machine.totals[:-3], machine.microsteps, machine.skipped_steps)
        assert all(old <= new for old, new in zip(before, after, strict=True))
        assert loop.total(Word.LAST_STEP_MONOTONIC_NS) <= loop.now
    for step in loop.ended:
        named = step.data_wait + step.forward + step.backward + step.optimizer + sum(step.rest.values())
        assert named <= step.duration
    assert sum(step.count for step in loop.ended) == loop.steps


UNDER_WAY = {
    "nothing": lambda _: None,
    "a batch": lambda loop: loop.fetch(10),
    "a batch of another dataset": lambda loop: loop.fetch(10, dataset=2),
    "a batch that is not for training": lambda loop: loop.fetch(10, trains=False),
    "the end of a loader": lambda loop: (loop.fetch(10), loop.exhaust()),
    "gradients": lambda loop: (loop.fetch(10), loop.backward(30)),
    "gradients of autograd.grad": lambda loop: loop.backward(30, accumulates=False),
    "a backward": lambda loop: loop.machine.backward_enter(loop.now),
    "an optimizer": lambda loop: loop.machine.optimizer_enter(loop.now, 1),
    "another optimizer": lambda loop: loop.optimize(3, identity=2),
    "a phase of the user's": lambda loop: loop.machine.mark_phase(loop.now, CHECKPOINT),
    "a note": lambda loop: loop.machine.nest(GC, loop.now - 5, loop.now, loop.machine.nested_ns),
}


@pytest.mark.parametrize("under_way", UNDER_WAY.values(), ids=UNDER_WAY)
def test_what_another_thread_had_under_way_stays_there(under_way):
    """The next thread's steps are what they would be without it."""
    moved, other = Loop(), Loop()
    for loop in (moved, other):
        for _ in range(3):
            loop.step()
        if loop is moved:
            under_way(loop)
        before = loop.machine.microsteps
        loop.now = 2_000
        loop.machine.start_over(loop.now)
        loop.fetch(10)
        loop.optimize(3)  # without gradients, it could take those of the other thread for its own
        for _ in range(3):
            loop.step()

        assert loop.machine.microsteps - before == 3
    assert moved.ended[3:] == other.ended[3:]
