"""Real training programs, unchanged, seen from outside through their pages."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from gpulaunch.profiler.channel import ring, segment, segment_writer, workers
from gpulaunch.profiler.channel.layout import Hook, Region, StepSource
from gpulaunch.profiler.channel.segment import SegmentReader, Site

pytestmark = pytest.mark.torch

RANKS = str(Path(__file__).with_name("ranks.py"))
EDGES = Hook.DATALOADER | Hook.BACKWARD | Hook.OPTIMIZER
IN_SERVICE = EDGES | Hook.LOADER_QUEUE | Hook.SAMPLES | Hook.NESTED | Hook.WORKERS | Hook.FACTS
MS = 1_000_000
PLAIN = ("data_wait", "forward", "backward", "optimizer", "other")


def sites(directory: Path, kind: str) -> list[Site]:
    """The lines of the program that did this."""
    with SegmentReader(str(directory / "rank-3.bin")) as reader:
        return [site for site in reader.sites() if site.kind == kind]


def test_a_plain_program_is_seen_step_by_step(run, tmp_path):
    seen = run("plain")
    events = ring.recent(str(tmp_path / "rank-3.bin"))

    assert (seen.steps, seen.microsteps, seen.samples, seen.loader.batches) == (12, 12, 96, 12)
    assert (seen.step_source, seen.hooks_armed, seen.hooks_unavailable) == (StepSource.OPTIMIZER, IN_SERVICE, Hook(0))
    assert min(seen.phase_ns[phase] for phase in PLAIN) > 0
    assert sum(seen.phase_ns.values()) == seen.step_ns_total == sum(event.duration_ns for event in events)
    assert sum(seen.step_counts) == 12
    assert [event.samples for event in events] == [8] * 12
    assert events[-1].start_ns + events[-1].duration_ns == seen.last_step_monotonic_ns
    assert 0 < seen.probe_ns_total < seen.step_ns_total
    assert seen.fault == ""
    assert seen.region is Region.OTHER, "the dataloader has ended"
    assert seen.last_edge_ns >= seen.last_step_monotonic_ns
    assert seen.first_step_start_ns == events[0].start_ns
    assert seen.first_step_end_ns == events[0].start_ns + events[0].duration_ns


@pytest.mark.parametrize("program", ["steps_seen_from_beside", "late_steps_seen_from_beside"])
def test_how_many_steps_and_where_is_told_at_once_and_how_long_they_took_a_little_later(run, program):
    seen = run(program)

    assert seen.steps == seen.steps_made in (14, 60), "and all of it at the end"
    assert sum(seen.step_counts) == seen.steps
    assert seen.samples == 8 * seen.steps


def test_what_is_noted_is_taken_up_where_no_step_ever_ends(run):
    """A rank must not grow, whatever it does for hours."""
    seen = run("scores_with_gradients_on")

    assert (seen.steps, seen.fault) == (40, "")


@pytest.mark.parametrize("program", ["fork_workers", "spawn_workers"])
def test_dataloader_workers_leave_the_page_alone(run, program):
    seen = run(program)

    assert (seen.steps, seen.samples, seen.loader.batches, seen.loader.workers_configured) == (12, 96, 12, 2)
    assert seen.hooks_unavailable == Hook(0)


def test_a_batch_that_waits_for_an_earlier_one_is_seen(run):
    seen = run("late_batch")

    assert seen.loader.ready >= seen.loader.reorder_blocked >= 1
    assert seen.loader.outstanding >= 1


def test_what_a_signal_handler_raises_gets_to_the_program(run):
    """It may come within our code, where exceptions are ours as a rule."""
    seen = run("interrupted")

    assert EDGES in seen.hooks_armed
    assert (seen.hooks_unavailable, seen.fault) == (Hook(0), "")


def test_ddp(run):
    seen = run("ddp")

    assert (seen.steps, seen.microsteps, seen.samples) == (12, 12, 96)
    assert min(seen.phase_ns[phase] for phase in PLAIN) > 0


@pytest.mark.parametrize(
    ("program", "steps", "microsteps", "samples"),
    [
        ("accumulation_and_validation", 6, 12, 96),
        ("checkpoint_and_penalty", 5, 5, 0),
        ("dataset_raises", 12, 12, 96),
        ("two_threads", 12, 12, 96),
        ("helper_thread_reads", 12, 12, 96),
        ("forked_child_trains", 24, 24, 192),
        ("subprocess_trains", 12, 12, 96),
        ("armed_again", 12, 12, 96),
        ("marks", 4, 4, 0),
        ("taps_are_not_noticed", 24, 24, 192),
        ("gan", 12, 23, 96),  # the last backward is in a step that has not ended
    ],
)
def test_what_counts_as_a_step(run, program, steps, microsteps, samples):
    seen = run(program)

    assert (seen.steps, seen.microsteps, seen.samples) == (steps, microsteps, samples)
    assert seen.hooks_unavailable == Hook(0), seen.fault


@pytest.mark.parametrize(
    ("program", "fewest", "all_of_them"),
    [
        ("trains_elsewhere_later", 600, 601),
        ("each_epoch_in_a_thread", 590, 600),
        ("trains_elsewhere_from_a_bare_step_on", 560, 568),
        ("hooks_step_elsewhere", 12, 12),  # it has not moved
    ],
)
def test_training_that_moves_to_another_thread_is_followed(run, program, fewest, all_of_them):
    """The one step that shows it may be lost."""
    seen = run(program)

    assert fewest <= seen.steps <= all_of_them
    assert sum(seen.phase_ns.values()) == seen.step_ns_total
    assert sum(seen.step_counts) == seen.steps
    assert (seen.hooks_unavailable, seen.fault) == (Hook(0), "")


def test_a_thread_that_reads_ahead_is_told_of(run):
    seen = run("helper_thread_reads_for_long")

    assert (seen.steps, seen.samples, seen.hooks_unavailable) == (200, 1_600, Hook.DATALOADER)
    assert "prefetches batches" in seen.fault


def test_the_parts_sum_to_what_the_program_itself_measures(run):
    seen = run("tells_its_own_time")

    assert sum(seen.phase_ns.values()) == seen.step_ns_total
    assert seen.step_ns_total == pytest.approx(int(seen.note), rel=0.02)
    assert min(seen.phase_ns["forward"], seen.phase_ns["other"]) > 12 * 50 * MS, "it sleeps there"


def test_the_same_step_has_the_same_parts_whoever_compiles_it(run):
    """Compilation is a phase of its own, and what is left are steps as ever."""
    seen = run("compiled_eager")

    assert (seen.steps, seen.microsteps, seen.samples) == (24, 24, 192)
    assert seen.pauses.compiles >= 1
    assert 0 < seen.phase_ns["compile"] <= seen.pauses.compile_ns_total
    assert sum(seen.phase_ns.values()) == seen.step_ns_total
    assert min(seen.phase_ns[phase] for phase in PLAIN) > 0


def test_a_compiler_that_generates_code_takes_most_of_the_first_step(run, tmp_path):
    if not (shutil.which("cc") and shutil.which("g++")):
        pytest.skip("inductor needs a C++ compiler, and there is none here")
    seen = run("compiled_inductor", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), TORCHINDUCTOR_COMPILE_THREADS="1")
    first = ring.recent(str(tmp_path / "rank-3.bin"))[0]

    assert (seen.steps, seen.microsteps, seen.samples) == (24, 24, 192)
    assert first.phase_ns["compile"] > first.duration_ns / 2
    assert seen.phase_ns["compile"] <= seen.pauses.compile_ns_total


def test_garbage_is_a_part_of_the_step_it_is_collected_in(run, tmp_path):
    seen = run("collects_garbage")
    events = ring.recent(str(tmp_path / "rank-3.bin"))

    assert seen.pauses.gc_collections >= 12
    assert min(event.phase_ns["gc"] for event in events) >= 10 * MS
    assert seen.phase_ns["forward"] < seen.phase_ns["gc"], "it is no part of the forward"


def test_saves_are_a_part_of_the_steps_that_wait_for_them(run, tmp_path):
    seen = run("saves_now_and_then")
    events = ring.recent(str(tmp_path / "rank-3.bin"))
    (site,) = sites(tmp_path, "save")

    assert [event.step for event in events if event.phase_ns["checkpoint"]] == [4, 8]
    assert 20 * MS <= seen.phase_ns["checkpoint"] == site.blocked_ns
    assert (
        site.count,
        site.text.split(":")[0].endswith("led_loops.py"),
        site.text.endswith(" saves_now_and_then"),
    ) == (
        2,
        True,
        True,
    )


def test_distributed_saves_are_checkpoints_collectives_and_all(run, tmp_path):
    seen = run("saves_distributed")
    events = ring.recent(str(tmp_path / "rank-3.bin"))

    assert [event.step for event in events if event.phase_ns["checkpoint"]] == [4, 8]
    assert seen.phase_ns["comm"] == 0


@pytest.mark.alone
def test_waiting_for_other_ranks_is_communication(run, tmp_path):
    seen = run("waits_for_others")
    events = ring.recent(str(tmp_path / "rank-3.bin"))

    assert (seen.steps, seen.pauses.comm_calls) == (12, 12 + 12 + 6), (
        "a barrier, a collective, and for some to await it"
    )
    for turn in (events[0::2], events[1::2]):
        assert statistics.median(event.phase_ns["comm"] for event in turn) >= 9 * MS
    assert seen.phase_ns["comm"] == seen.pauses.comm_blocked_ns_total
    small = sites(tmp_path, "small_collective")
    assert {site.text.rpartition(" ")[2] for site in (*sites(tmp_path, "collective"), *small)} == {"waiting"}
    assert sum(site.count for site in small) == 12 + 12, "what is awaited later may be of any size"


def test_ddp_that_waits_in_its_backward_communicates(run, tmp_path):
    """Its logger has told how long, when a second was over; until then it is backward."""
    seen = run("ddp_waits_for_others")
    events = ring.recent(str(tmp_path / "rank-3.bin"))

    assert (seen.steps, seen.pauses.comm_calls) == (80, 0)
    assert seen.pauses.ddp_comm_ns > seen.pauses.ddp_overlap_ns > 0
    assert events[0].phase_ns["comm"] == 0
    assert max(event.phase_ns["comm"] for event in events[-10:]) > 5 * MS, "the other one comes 20 ms later"
    assert sum(seen.phase_ns.values()) == seen.step_ns_total


def test_ddp_that_reduces_in_every_backward_is_told_so(run, tmp_path):
    seen = run("ddp_accumulates")
    told = json.loads((tmp_path / "facts-3.json").read_text())
    ddp, reduced = told["ddp"], told["reduced"]
    parameters = 8 * 16 + 16 + 16 * 3 + 3

    assert (seen.steps, seen.microsteps) == (120, 360)
    assert (ddp["modules"], ddp["reductions_per_step"]) == (1, 3)
    assert (reduced["bytes"], reduced["same"]) == (pytest.approx(4 * parameters, rel=0.05), True)
    assert "led_loops.py:" in reduced["line"]


@pytest.mark.parametrize(("skips", "in_vain"), [("", True), ("1", False)])
def test_a_search_of_ddp_is_in_vain_if_no_rank_leaves_a_parameter_out(run, tmp_path, skips, in_vain):
    run("ddp_searches", SKIPS=skips)
    ddp = json.loads((tmp_path / "facts-3.json").read_text())["ddp"]

    assert (ddp["find_unused_parameters"], ddp["searched_in_vain"]) == (1, in_vain)
    assert "led_loops.py:" in ddp["site"]
    assert ddp["num_parameter_tensors"] == 4


def test_without_an_optimizer_each_backward_is_a_step(run):
    seen = run("no_optimizer")

    assert (seen.steps, seen.microsteps, seen.step_source) == (100, 100, StepSource.BACKWARD)


def test_steps_that_amp_leaves_out_are_counted_as_such(run):
    seen = run("amp_skips_steps")

    assert (seen.steps, seen.microsteps, seen.skipped_steps) == (9, 12, 3)


def test_validation_has_its_phase(run):
    seen = run("accumulation_and_validation")

    assert seen.phase_ns["validation"] > 0
    assert seen.loader.eval_batches == 12


def test_an_optimizer_with_closures_is_one_step_each_time(run):
    seen = run("lbfgs")

    assert seen.steps == 3
    assert seen.microsteps > 3
    assert min(seen.phase_ns["forward"], seen.phase_ns["backward"], seen.phase_ns["optimizer"]) > 0


def test_what_the_user_says_is_in_the_page(run):
    seen = run("marks")

    assert (seen.step_source, seen.note) == (StepSource.MARK, "step 3")
    assert seen.phase_ns["data_wait"] > 4 * 10_000_000


def test_the_page_tells_where_the_training_thread_is(run):
    assert run("looks_where_it_is").steps == 2


def test_what_is_saved_is_in_the_page(run):
    seen = run("saves_and_resumes")

    assert (seen.checkpoint.saves, seen.checkpoint.step, seen.checkpoint.bytes_total) == (1, 52, 100)
    assert (seen.checkpoint.stall_ns_total, seen.checkpoint.blocking_since_ns) == (7_000, 0)
    assert (seen.checkpoint.resumed_step, seen.listens) == (40, True)
    assert seen.last_edge_ns < seen.checkpoint.captured_ns


def test_a_batch_that_will_not_be_looked_into_costs_only_the_samples(run):
    seen = run("looks_in_vain")

    assert (seen.steps, seen.samples) == (12, 0)
    assert (seen.hooks_armed, seen.hooks_unavailable) == (IN_SERVICE & ~Hook.SAMPLES, Hook.SAMPLES)
    assert "do not look" in seen.fault


def test_a_fault_of_the_probe_ends_the_observing_and_not_the_training(run):
    seen = run("probe_breaks")

    assert seen.steps == 6
    assert seen.hooks_unavailable == EDGES
    assert "TypeError" in seen.fault


def test_taps_come_out_again(run):
    assert run("taps_come_out").hooks_unavailable == Hook(0)


def test_off_means_off(run):
    seen = run("plain", GPULAUNCH_PROFILE="off")

    assert (seen.armed, seen.steps) == (False, 0)


def test_a_gpu_memory_cap_is_queued_until_cuda_comes(run):
    seen = run("plain", GPULAUNCH_GPU_MEMORY_FRACTION="0.5")

    assert seen.hooks_armed == IN_SERVICE | Hook.GPU_MEMORY_FRACTION
    assert seen.steps == 12


def test_torchs_own_import_arms_a_spawned_rank(outside_a_run, tmp_path):
    segment_writer.create(str(tmp_path / "rank-3.bin"), rank=3, local_rank=1, attempt=0)
    workers.create(str(tmp_path / "workers-3.bin"))
    environ = outside_a_run | {"RANK": "3", "GPULAUNCH_CHANNEL_DIR": str(tmp_path)}
    program = "import torch; p = torch.zeros(1, requires_grad=True); p.sum().backward(); torch.optim.SGD([p]).step()"
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=120)
    seen = segment.read(str(tmp_path / "rank-3.bin"))

    assert (seen.steps, seen.microsteps, seen.hooks_armed) == (1, 1, IN_SERVICE)


STRANGE_TORCH = """
import importlib, os, sys, torch
os.environ.update(RANK="3", GPULAUNCH_CHANNEL_DIR=sys.argv[1])
torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = lambda outputs: None
del importlib.import_module("torch.optim.optimizer").register_optimizer_step_pre_hook
del torch.save
all_reduce, wait = torch.distributed.all_reduce, torch.distributed.Work.wait
from gpulaunch.profiler.probe.inject import arm
arm()
batches = list(torch.utils.data.DataLoader(torch.zeros(8, 2), batch_size=4))
assert len(batches) == 2
assert torch.distributed.all_reduce is all_reduce and torch.distributed.Work.wait is wait, "half placed"
"""


def test_a_torch_that_looks_different_is_observed_as_far_as_it_is_known(outside_a_run, tmp_path):
    segment_writer.create(str(tmp_path / "rank-3.bin"), rank=3, local_rank=1, attempt=0)
    workers.create(str(tmp_path / "workers-3.bin"))
    subprocess.run([sys.executable, "-c", STRANGE_TORCH, str(tmp_path)], env=outside_a_run, check=True, timeout=120)
    seen = segment.read(str(tmp_path / "rank-3.bin"))

    assert seen.hooks_unavailable == Hook.BACKWARD | Hook.OPTIMIZER | Hook.NESTED
    assert Hook.DATALOADER in seen.hooks_armed
    assert seen.loader.batches == 2
    assert "has no attribute 'save'" in seen.fault, "the last one that could not be placed"
