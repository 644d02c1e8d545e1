"""A torch older or newer than any that is known: each hook looks before it is placed, says why it is off, and leaves
training and the other hooks alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bad_node import WAIT_S

from gpulaunch.profiler.channel.layout import Hook

pytestmark = pytest.mark.torch

PROGRAM = str(Path(__file__).with_name("strange_torch.py"))
LEDGER = Hook.COPIES | Hook.SYNCS
LOADER = Hook.DATALOADER | Hook.LOADER_QUEUE | Hook.SAMPLES
PLACED = LOADER | Hook.BACKWARD | Hook.OPTIMIZER | Hook.NESTED | Hook.WORKERS | Hook.FACTS | LEDGER
ASKED = PLACED | Hook.GPU_MEMORY  # which is neither on nor off here: there is no GPU

# What is off then, and the words that tell it.
OFF: dict[str, tuple[Hook, str]] = {
    "as_it_is": (Hook(0), ""),
    "newer": (Hook(0), ""),
    "no_switch_of_dynamo": (Hook(0), ""),
    "next_takes_more": (LOADER, "takes ('self', 'timeout'), not ('self',)"),
    "next_is_in_c": (LOADER, "is not a function"),
    "backward_takes_more": (Hook.BACKWARD, "takes ('outputs',), not ('t_outputs',)"),
    "backward_is_twofold": (Hook.BACKWARD, "torch.autograd and torch.autograd.graph differ"),
    "no_pre_hook": (Hook.OPTIMIZER, "has no attribute 'register_optimizer_step_pre_hook'"),
    "no_post_hook": (Hook.OPTIMIZER, "has no attribute 'register_optimizer_step_post_hook'"),
    "no_save": (Hook.NESTED, "has no attribute 'save'"),
    "no_all_reduce": (Hook.NESTED, "torch.distributed has no all_reduce"),
    "no_work": (Hook.NESTED, "has no attribute 'Work'"),
    "no_ddp": (Hook.NESTED, "has no attribute 'DistributedDataParallel'"),
    "fetch_takes_more": (Hook.WORKERS, "takes ('self', 'index', 'device')"),
    "no_worker_info": (Hook.WORKERS, "has no _worker_info"),
    "loader_is_made_in_c": (Hook.FACTS, "DataLoader.__init__ is not a function"),
    "no_data_parallel": (Hook.FACTS, "has no attribute 'DataParallel'"),
    "no_autocast": (Hook.FACTS, "autocast.__enter__ is not a function"),
    "no_tolist": (LEDGER, "torch.Tensor has no tolist"),
    "no_synchronize": (LEDGER, "has no attribute 'synchronize'"),
    "older": (ASKED, "torch 2.5.1+cu124 is older than 2.6"),
    "much_older": (ASKED, "torch 1.13.1 is older than 2.6"),
    "unnumbered": (ASKED, ""),
}
TAPS = {
    "_BaseDataLoaderIter.__next__": Hook.DATALOADER,
    "DataLoader._get_iterator": Hook.DATALOADER,
    "_MultiProcessingDataLoaderIter._reset": Hook.DATALOADER,
    "_MultiProcessingDataLoaderIter._shutdown_workers": Hook.DATALOADER,
    "torch.autograd._engine_run_backward": Hook.BACKWARD,
    "torch.autograd.graph._engine_run_backward": Hook.BACKWARD,
    "optimizer hook after_step": Hook.OPTIMIZER,
    "optimizer hook before_step": Hook.OPTIMIZER,
    "GradScaler.step": Hook.OPTIMIZER,
    "_MapDatasetFetcher.fetch": Hook.WORKERS,
    "_IterableDatasetFetcher.fetch": Hook.WORKERS,
    "DataLoader.__init__": Hook.FACTS,
    "DataParallel.__init__": Hook.FACTS,
    "Optimizer.__init__": Hook.FACTS,
    "autocast.__enter__": Hook.FACTS,
    "DistributedDataParallel.__init__": Hook.NESTED,
    "Work.wait": Hook.NESTED,
}


def hook_of(tap: str) -> Hook:
    """Which hook has placed a tap."""
    if tap.startswith(("Tensor.", "Module.")) or tap.endswith(".synchronize"):
        return LEDGER
    if tap.startswith("torch.distributed") or tap.endswith(".save"):
        return Hook.NESTED
    return TAPS[tap]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What every case has said."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}
    argv = [sys.executable, PROGRAM, str(tmp_path_factory.mktemp("strange"))]
    done = subprocess.run(argv, capture_output=True, text=True, env=clean, timeout=3 * WAIT_S, check=True)
    assert done.stderr == "", "nobody is told but the page"
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_every_case_was_trained_to_its_end_and_to_the_same(told: dict[str, dict[str, Any]]) -> None:
    assert told.keys() == OFF.keys()
    assert {tuple(case["losses"]) for case in told.values()} == {tuple(told["as_it_is"]["losses"])}


@pytest.mark.parametrize("case", OFF)
def test_what_does_not_fit_is_off_with_a_reason_and_the_rest_is_on(told: dict[str, dict[str, Any]], case: str) -> None:
    off, why = OFF[case]
    armed, unavailable = map(Hook, told[case]["hooks"])

    assert (unavailable, armed & ASKED) == (off, PLACED & ~off)
    assert why in told[case]["fault"]
    assert bool(told[case]["fault"]) == bool(off)


@pytest.mark.parametrize("case", OFF)
def test_nothing_is_left_half_placed(told: dict[str, dict[str, Any]], case: str) -> None:
    off, _ = OFF[case]
    whole = told["as_it_is"]["taps"]

    assert {hook_of(tap) for tap in whole} == {*TAPS.values(), LEDGER}
    assert told[case]["taps"] == [tap for tap in whole if not hook_of(tap) & off]


def test_steps_are_told_whatever_is_missing(told: dict[str, dict[str, Any]]) -> None:
    """By another edge, if the optimizer's is not to be had: late, but within the first minute of a training."""
    whole = told["as_it_is"]["steps"]
    off = {case for case, (hooks, _) in OFF.items() if hooks & Hook.OPTIMIZER}
    blind = {case for case in off if OFF[case][0] & (Hook.BACKWARD | Hook.DATALOADER)}

    assert whole == told["no_tolist"]["steps"] > 64
    assert off - blind == {"no_pre_hook", "no_post_hook"}
    assert all(0 < told[case]["steps"] <= whole for case in off - blind)
