"""Real programs, of whose steps some are not observed: nothing is lost."""

from __future__ import annotations

import pytest

from gpulaunch.profiler.channel import ring
from gpulaunch.profiler.channel.layout import Hook, StepSource
from gpulaunch.profiler.channel.segment import SegmentReader

pytestmark = pytest.mark.torch

MS = 1_000_000


def test_within_the_budget_all_steps_are_observed(run):
    seen = run("many_steps")

    assert (seen.steps, seen.unobserved_steps, seen.fault) == (2_000, 0, "")
    assert seen.probe_ns_total > 0


@pytest.mark.parametrize(
    ("program", "source"),
    [("many_steps_some_unobserved", StepSource.OPTIMIZER), ("many_steps_marked", StepSource.MARK)],
)
def test_unobserved_steps_are_steps(run, tmp_path, program, source):
    seen = run(program)
    events = ring.recent(str(tmp_path / "rank-3.bin"))

    assert seen.unobserved_steps == pytest.approx(2_000 * 3 / 4, abs=32)
    assert seen.unobserved_steps % 8 == 0
    assert (seen.steps, seen.microsteps, seen.samples, seen.loader.batches) == (2_000, 2_000, 16_000, 2_000)
    assert (seen.step_source, seen.skipped_steps, seen.fault) == (source, 0, "")
    assert sum(seen.step_counts) == 2_000
    assert sum(seen.phase_ns.values()) == seen.step_ns_total
    assert all(event.duration_ns == sum(event.phase_ns.values()) for event in events)


def test_what_is_done_now_and_then_is_seen_all_the_same(run, tmp_path):
    """An unobserved block would be in an evaluation sooner or later: that ends it."""
    seen = run("many_steps_and_evaluations")

    assert seen.unobserved_steps
    assert (seen.steps, seen.samples, seen.fault) == (2_000, 16_000, "")
    assert (seen.loader.batches, seen.loader.eval_batches) == (2_000 + 2 * 181, 2 * 181)
    assert seen.phase_ns["validation"] >= 2 * 181 * MS
    with SegmentReader(str(tmp_path / "rank-3.bin")) as reader:
        assert sum(site.count for site in reader.sites() if site.kind == "save") == 40
    assert sum(seen.phase_ns.values()) == seen.step_ns_total


def test_past_the_budget_only_some_steps_are_observed(run):
    """Steps of a quarter of a millisecond: no probe is within half a percent of that. Steps are counted all the same,
    their batches too, and evaluations are seen."""
    seen = run("many_steps_past_the_budget")

    assert seen.budget_ppm == 5_000
    assert 0.3 * 2_500 < seen.unobserved_steps < 2_500  # 48 % where others had the cores
    assert Hook.LOADER_QUEUE in seen.hooks_armed, "the rules about the dataloader need it"
    assert Hook.BACKWARD in seen.hooks_armed
    assert (seen.steps, seen.microsteps, seen.hooks_unavailable, seen.fault) == (2_500, 2_500, Hook(0), "")
    assert seen.samples == 2_500 * 8, "how many samples were trained on is told all the same"
    assert (seen.loader.batches, seen.loader.eval_batches) == (2_500 + 2 * 8, 2 * 8)
    assert sum(seen.phase_ns.values()) == seen.step_ns_total
    assert sum(seen.step_counts) == 2_500


@pytest.mark.alone  # on a crowded machine its own cost is more than the step
@pytest.mark.parametrize("percent", ["100", "0"])
def test_within_a_larger_budget_or_without_one_they_are_all_observed(run, percent):
    seen = run("many_steps_past_the_budget", GPULAUNCH_PROFILE_BUDGET=percent)

    assert (seen.budget_ppm, seen.steps, seen.unobserved_steps) == (10_000 * int(percent), 2_500, 0)


def test_steps_whose_end_would_not_be_seen_are_all_observed(run):
    seen = run("many_steps_without_an_optimizer")

    assert (seen.step_source, seen.steps, seen.unobserved_steps) == (StepSource.BACKWARD, 2_000, 0)


def test_a_step_that_is_told_twice_is_one(run):
    seen = run("many_steps_told_twice")

    assert (seen.steps, seen.samples) == (2_000, 16_000)
    assert seen.unobserved_steps


def test_an_optimizer_that_is_made_anew_is_followed(run):
    """A block may begin under the one before; some steps are then part of the next."""
    seen = run("many_optimizers")

    assert 1_900 <= seen.steps <= 2_000
    assert seen.unobserved_steps
    assert seen.samples == 16_000
    assert sum(seen.phase_ns.values()) == seen.step_ns_total


def test_unobserved_steps_count_when_the_program_ends_in_them(run):
    seen = run("many_steps_left")

    assert (seen.steps, seen.unobserved_steps, seen.loader.batches) == (268, 8 * 24 + 4, 268)
