"""Real training programs, unchanged, seen from outside through their pages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulaunch.profiler.channel import page, ring
from gpulaunch.profiler.channel.layout import Hook, Region, StepSource
from gpulaunch.profiler.channel.page import PageSnapshot

pytestmark = pytest.mark.torch

RANKS = str(Path(__file__).with_name("ranks.py"))
ALL_HOOKS = Hook.DATALOADER | Hook.BACKWARD | Hook.OPTIMIZER | Hook.LOADER_QUEUE | Hook.SAMPLES | Hook.GPU_MEMORY

Run = Callable[..., PageSnapshot]


def outside_a_run() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """One process with torch in it, from which ranks are forked."""
    process = subprocess.Popen(
        [sys.executable, RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=outside_a_run()
    )
    yield process
    process.communicate(timeout=60)


@pytest.fixture
def run(nursery: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Run a program of `ranks` to its end and read the page it leaves."""

    def run_program(program: str, **environ: str) -> PageSnapshot:
        path = str(tmp_path / "rank-3.bin")
        page.create(path, rank=3, local_rank=1, attempt=0)
        extra = " ".join(f"{name}={value}" for name, value in environ.items())
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(f"{program}\t{tmp_path}\t{extra}\n")
        nursery.stdin.flush()
        code = nursery.stdout.readline().strip()
        assert code == "0", (tmp_path / "out").read_text()
        assert (tmp_path / "out").read_text() == "", "a rank that is well says nothing"
        return page.read(path)

    return run_program


def test_a_plain_program_is_seen_step_by_step(run, tmp_path):
    seen = run("plain")
    events = ring.recent(str(tmp_path / "rank-3.bin"))

    assert (seen.steps, seen.microsteps, seen.samples, seen.loader_batches) == (12, 12, 96, 12)
    assert (seen.step_source, seen.hooks_armed, seen.hooks_unavailable) == (StepSource.OPTIMIZER, ALL_HOOKS, Hook(0))
    assert min(seen.phase_ns.values()) > 0
    assert sum(seen.phase_ns.values()) == seen.step_ns_total == sum(event.duration_ns for event in events)
    assert sum(seen.step_histogram_counts) == 12
    assert [event.samples for event in events] == [8] * 12
    assert events[-1].start_ns + events[-1].duration_ns == seen.last_step_monotonic_ns
    assert 0 < seen.probe_ns_total < seen.step_ns_total
    assert seen.fault == ""
    assert seen.region is Region.OTHER, "the dataloader has ended"
    assert seen.last_edge_ns >= seen.last_step_monotonic_ns
    assert seen.first_step_start_ns == events[0].start_ns
    assert seen.first_step_end_ns == events[0].start_ns + events[0].duration_ns


@pytest.mark.parametrize("program", ["fork_workers", "spawn_workers"])
def test_dataloader_workers_leave_the_page_alone(run, program):
    seen = run(program)

    assert (seen.steps, seen.samples, seen.loader_batches, seen.loader_workers_configured) == (12, 96, 12, 2)
    assert seen.hooks_unavailable == Hook(0)


def test_a_batch_that_waits_for_an_earlier_one_is_seen(run):
    seen = run("late_batch")

    assert seen.loader_ready >= seen.loader_reorder_blocked >= 1
    assert seen.loader_outstanding >= 1


def test_ddp(run):
    seen = run("ddp")

    assert (seen.steps, seen.microsteps, seen.samples) == (12, 12, 96)
    assert min(seen.phase_ns.values()) > 0


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
    ],
)
def test_what_counts_as_a_step(run, program, steps, microsteps, samples):
    seen = run(program)

    assert (seen.steps, seen.microsteps, seen.samples) == (steps, microsteps, samples)
    assert seen.hooks_unavailable == Hook(0), seen.fault


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

    assert (seen.checkpoint_saves, seen.checkpoint_step, seen.checkpoint_bytes_total) == (1, 52, 100)
    assert (seen.checkpoint_stall_ns_total, seen.checkpoint_blocking_since_ns) == (7_000, 0)
    assert (seen.resumed_step, seen.listens) == (40, True)
    assert seen.last_edge_ns < seen.checkpoint_captured_ns


def test_a_batch_that_will_not_be_looked_into_costs_only_the_samples(run):
    seen = run("looks_in_vain")

    assert (seen.steps, seen.samples) == (12, 0)
    assert (seen.hooks_armed, seen.hooks_unavailable) == (ALL_HOOKS & ~Hook.SAMPLES, Hook.SAMPLES)
    assert "do not look" in seen.fault


def test_a_fault_of_the_probe_ends_the_observing_and_not_the_training(run):
    seen = run("probe_breaks")

    assert seen.steps == 6
    assert seen.hooks_unavailable == Hook.DATALOADER | Hook.BACKWARD | Hook.OPTIMIZER
    assert "TypeError" in seen.fault


def test_off_means_off(run):
    seen = run("plain", GPULAUNCH_PROFILE="off")

    assert (seen.armed, seen.steps) == (False, 0)


def test_a_gpu_memory_cap_is_queued_until_cuda_comes(run):
    seen = run("plain", GPULAUNCH_GPU_MEMORY_FRACTION="0.5")

    assert seen.hooks_armed == ALL_HOOKS | Hook.GPU_MEMORY_FRACTION
    assert seen.steps == 12


def test_torchs_own_import_arms_a_spawned_rank(tmp_path):
    page.create(str(tmp_path / "rank-3.bin"), rank=3, local_rank=1, attempt=0)
    environ = outside_a_run() | {"RANK": "3", "GPULAUNCH_CHANNEL_DIR": str(tmp_path)}
    program = "import torch; p = torch.zeros(1, requires_grad=True); p.sum().backward(); torch.optim.SGD([p]).step()"
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=120)
    seen = page.read(str(tmp_path / "rank-3.bin"))

    assert (seen.steps, seen.microsteps, seen.hooks_armed) == (1, 1, ALL_HOOKS)


STRANGE_TORCH = """
import importlib, os, sys, torch
os.environ.update(RANK="3", GPULAUNCH_CHANNEL_DIR=sys.argv[1])
torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = lambda outputs: None
del importlib.import_module("torch.optim.optimizer").register_optimizer_step_pre_hook
from gpulaunch.profiler.probe.inject import arm
arm()
batches = list(torch.utils.data.DataLoader(torch.zeros(8, 2), batch_size=4))
assert len(batches) == 2
"""


def test_a_torch_that_looks_different_is_observed_as_far_as_it_is_known(tmp_path):
    page.create(str(tmp_path / "rank-3.bin"), rank=3, local_rank=1, attempt=0)
    subprocess.run([sys.executable, "-c", STRANGE_TORCH, str(tmp_path)], env=outside_a_run(), check=True, timeout=120)
    seen = page.read(str(tmp_path / "rank-3.bin"))

    assert seen.hooks_unavailable == Hook.BACKWARD | Hook.OPTIMIZER
    assert Hook.DATALOADER in seen.hooks_armed
    assert seen.loader_batches == 2
    assert "register_optimizer_step_pre_hook" in seen.fault
