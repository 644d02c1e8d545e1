"""Real programs, of whose steps some are made without the probe: nothing is lost, and what it costs is told."""

from __future__ import annotations

import pytest

from gpulaunch.profiler.channel import ring
from gpulaunch.profiler.channel.layout import Hook, StepSource
from gpulaunch.profiler.channel.segment import SegmentReader

pytestmark = pytest.mark.torch

MS = 1_000_000


@pytest.mark.parametrize(
    ("program", "source"), [("many_steps", StepSource.OPTIMIZER), ("many_steps_marked", StepSource.MARK)]
)
def test_bare_steps_are_steps(run, tmp_path, program, source):
    seen = run(program)
    events = ring.recent(str(tmp_path / "rank-3.bin"))

    assert 8 <= seen.probe.unobserved_steps <= 0.05 * 2_000
    assert seen.probe.unobserved_steps % 8 == 0
    assert (seen.steps, seen.microsteps, seen.samples, seen.loader.batches) == (2_000, 2_000, 16_000, 2_000)
    assert (seen.step_source, seen.skipped_steps, seen.hooks_shed, seen.fault) == (source, 0, Hook(0), "")
    assert sum(seen.step_counts) == 2_000
    assert sum(seen.phase_ns.values()) == seen.step_ns_total
    assert all(event.duration_ns == sum(event.phase_ns.values()) for event in events)
    assert seen.priced_pairs == 0, "too few to say"


def test_what_is_done_now_and_then_is_seen_all_the_same(run, tmp_path):
    """A bare block would be in an evaluation sooner or later: that ends it."""
    seen = run("many_steps_and_evaluations")

    assert (seen.steps, seen.samples, seen.fault) == (2_000, 16_000, "")
    assert (seen.loader.batches, seen.loader.eval_batches) == (2_000 + 2 * 181, 2 * 181)
    assert seen.phase_ns["validation"] >= 2 * 181 * MS
    with SegmentReader(str(tmp_path / "rank-3.bin")) as reader:
        assert sum(site.count for site in reader.sites() if site.kind == "save") == 40
    assert sum(seen.phase_ns.values()) == seen.step_ns_total


def test_past_the_budget_parts_are_switched_off_one_by_one(run):
    """Steps of a quarter of a millisecond: no probe is within half a percent of that."""
    seen = run("many_steps_that_cost_much")

    assert seen.budget_ppm == 5_000
    assert seen.hooks_shed
    assert not seen.hooks_shed & ~(Hook.COPIES | Hook.SYNCS | Hook.EVERY_STEP)
    assert Hook.LOADER_QUEUE in seen.hooks_armed, "the rules about the dataloader need it"
    assert seen.samples == 2_000 * 8, "how many samples were trained on is told all the same"
    assert not seen.hooks_armed & seen.hooks_shed
    assert seen.hooks_unavailable == Hook(0), "they are well, only dear"
    assert Hook.BACKWARD in seen.hooks_armed
    assert (seen.steps, seen.loader.batches) == (2_000, 2_000)


def test_past_that_only_some_steps_are_observed(run):
    """Steps are counted all the same, their batches too, and evaluations are seen."""
    seen = run("many_steps_of_which_few_are_observed")

    assert Hook.EVERY_STEP in seen.hooks_shed
    assert Hook.EVERY_STEP not in seen.hooks_armed
    assert Hook.LOADER_QUEUE in seen.hooks_armed, "the rules about the dataloader need it"
    assert Hook.BACKWARD in seen.hooks_armed
    assert 0.5 * 2_500 < seen.probe.unobserved_steps < 2_500
    assert (seen.steps, seen.microsteps, seen.fault) == (2_500, 2_500, "")
    assert (seen.loader.batches, seen.loader.eval_batches) == (2_500 + 2 * 8, 2 * 8)
    assert sum(seen.phase_ns.values()) == seen.step_ns_total
    assert sum(seen.step_counts) == 2_500


def test_within_the_budget_nothing_is_switched_off(run):
    seen = run("many_steps_that_cost_much", GPULAUNCH_PROFILE_BUDGET="100")

    assert (seen.budget_ppm, seen.hooks_shed) == (1_000_000, Hook(0))


def test_steps_whose_end_would_not_be_seen_are_all_observed(run):
    seen = run("many_steps_without_an_optimizer")

    assert (seen.step_source, seen.steps, seen.probe.unobserved_steps) == (StepSource.BACKWARD, 2_000, 0)


def test_a_step_that_is_told_twice_is_one(run):
    seen = run("many_steps_told_twice")

    assert (seen.steps, seen.samples) == (2_000, 16_000)
    assert seen.probe.unobserved_steps


def test_an_optimizer_that_is_made_anew_is_followed(run):
    """A block may begin under the one before; some steps are then part of the next."""
    seen = run("many_optimizers")

    assert 1_900 <= seen.steps <= 2_000
    assert seen.samples == 16_000
    assert sum(seen.phase_ns.values()) == seen.step_ns_total


def test_bare_steps_count_when_the_program_ends_in_them(run):
    seen = run("many_steps_left")

    assert (seen.steps, seen.probe.unobserved_steps, seen.loader.batches) == (268, 4, 268)
