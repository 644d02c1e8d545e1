"""Stories of training loops, told to the step machine by a fake clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.channel.layout import PHASES, Region, StepSource, Word
from gpulaunch.profiler.probe.step import PATIENCE, StepMachine


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


class Loop:
    """A training loop on a clock of its own: each verb takes as long as it is told."""

    def __init__(self) -> None:
        self.now = 1_000
        self.ended: list[Step] = []
        self.regions: list[int] = []
        self.machine = StepMachine(lambda count, record: self.ended.append(Step(count, *record)))
        self.machine.begin(self.now)

    def pass_edge(self, region: int) -> None:
        self.regions.append(region)

    def work(self, ns: int) -> None:
        self.now += ns

    def fetch(self, ns: int, samples: int = 8, trains: bool = True) -> None:
        self.pass_edge(self.machine.loader_enter(self.now))
        self.now += ns
        self.pass_edge(self.machine.loader_exit(self.now, samples, trains))

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
        return {phase: self.total(Word[f"{phase.upper()}_NS_TOTAL"]) for phase in PHASES}


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

    assert (loop.steps, loop.machine.skipped_steps, loop.machine.microsteps) == (7, 4, 11)


def test_a_short_last_accumulation_is_no_skipped_step(loop):
    for backwards in (4, 4, 2, 4, 4, 2, 4):
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


def test_validation_under_no_grad_between_steps_is_other(loop):
    loop.step()
    for _ in range(100):
        loop.fetch(50, trains=False)
        loop.work(50)
    loop.exhaust()
    loop.step()
    loop.step()

    assert loop.ended[1] == Step(1, 1068, 10_070, 10, 20, 30, 3, 8)
    assert loop.ended[2].duration == 70


def test_validation_that_only_the_forward_knows_of_is_other_too(loop):
    """`for batch in loader: with no_grad(): ...`: gradients are on while the batch is fetched."""
    loop.step()
    for _ in range(30):
        loop.fetch(50)
        loop.work(50)
    loop.exhaust()
    loop.step()

    assert loop.ended[1] == Step(1, 1068, 3_070, 10, 20, 30, 3, 8)
    assert loop.samples == 16


def test_a_long_validation_without_end_does_not_become_data_wait(loop):
    loop.step()
    for _ in range(PATIENCE + 1):
        loop.fetch(50)
    loop.step()

    assert loop.machine.source is StepSource.OPTIMIZER
    assert loop.ended[1].data_wait == 50 + 10, "only what was fetched after patience ran out may be taken for training"


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


def test_without_backward_each_batch_ends_a_step(loop):
    """A wholly compiled step shows nothing but its batches."""
    for _ in range(PATIENCE + 10):
        loop.fetch(10)
        loop.work(90)
    loop.exhaust()

    assert loop.machine.source is StepSource.DATALOADER
    assert (loop.steps, loop.samples) == (PATIENCE + 10, 8 * (PATIENCE + 10))
    assert loop.ended[-1] == Step(1, loop.ended[-1].start, 100, 10, 0, 0, 0, 8)


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
        outer = loop.machine.mark_phase(loop.now, 1)
        loop.work(40)
        inner = loop.machine.mark_phase(loop.now, 5)
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


REGIONS = {"L": "LOADER", "F": "FORWARD", "B": "BACKWARD", "S": "STEPPING", "O": "OPTIMIZER", ".": "OTHER"}


def regions(loop: Loop) -> str:
    """The region after each edge, one letter each."""
    names = {Region[name]: letter for letter, name in REGIONS.items()}
    return "".join(names[Region(region)] for region in loop.regions)


def test_each_edge_tells_where_the_thread_is_from_there_on(loop):
    loop.step()
    loop.fetch(10, trains=False)  # validation
    loop.exhaust()

    assert regions(loop) == "LFBSO." + "L." + "L."


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
)


@given(
    st.lists(st.tuples(st.sampled_from(EDGES), st.integers(0, 10**9), st.integers(0, 3), st.booleans()), max_size=400)
)
def test_any_sequence_of_edges_gives_parts_that_sum_to_the_step(edges):
    """Exceptions, threads and new versions of torch may leave out or repeat any edge: numbers only grow, and add up."""
    loop = Loop()
    machine = loop.machine
    for name, ns, number, flag in edges:
        loop.now += ns
        before = (loop.steps, machine.microsteps, machine.skipped_steps, loop.samples)
        if name == "loader_exit":
            region = machine.loader_exit(loop.now, number, flag)
        elif name == "backward_exit":
            region = machine.backward_exit(loop.now, flag)
        elif name.startswith("optimizer"):
            region = getattr(machine, name)(loop.now, 1 + number)
        elif name == "mark_phase":
            machine.mark_phase(loop.now, number)
        else:
            region = getattr(machine, name)(loop.now)  # None for a mark

        assert sum(loop.phases.values()) == loop.total(Word.STEP_NS_TOTAL)
        assert min(loop.phases.values()) >= 0
        assert name.startswith("mark") or region in tuple(Region)[1:]
        after = (loop.steps, machine.microsteps, machine.skipped_steps, loop.samples)
        assert all(old <= new for old, new in zip(before, after, strict=True))
    for step in loop.ended:
        assert step.data_wait + step.forward + step.backward + step.optimizer <= step.duration
    assert sum(step.count for step in loop.ended) == loop.steps
