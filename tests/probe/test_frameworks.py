"""Plain loops, Accelerate, the Hugging Face Trainer and Lightning: what they say of a training, and what its page says.

The programs are `led_by_*.py`; each tells how many steps it has taken by the framework's own count, and how long it was
at what by its own clock (`diary.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.profiler.channel import segment, segment_writer, workers
from gpulaunch.profiler.channel.layout import Hook, StepSource
from gpulaunch.profiler.channel.segment import SegmentSnapshot

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent
PACKAGES = {"hand": "torch", "accelerate": "accelerate", "trainer": "transformers", "lightning": "lightning"}
PLAIN = ("data_wait", "forward", "backward", "optimizer", "other")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
LOST = 0.01
"""Of its time: what others have had of it when they have had nothing to speak of. The host's share comes in hundredths
of a second, of which one is more than that."""


@dataclass(frozen=True, kw_only=True)
class Led:
    """One training: what it tells of itself, what its page says, and what its probe wrote beside the page."""

    told: dict[str, Any]
    seen: SegmentSnapshot
    facts: dict[str, Any]


Lead = Callable[..., Led]


def needs(leader: str) -> None:
    if importlib.util.find_spec(PACKAGES[leader]) is None:
        pytest.skip(f"{PACKAGES[leader]} is not installed here")


def outside_a_run() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "leaders.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=outside_a_run() | OFFLINE,
    )
    yield process
    process.communicate(timeout=60)


@pytest.fixture
def lead(nursery: subprocess.Popen[str], tmp_path: Path) -> Lead:
    """Have a program led to its end, in a directory of its own."""

    def lead_program(leader: str, program: str, backend: str = "", **environ: str) -> Led:
        needs(leader)
        directory = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        path = str(directory / "rank-3.bin")
        segment_writer.create(path, rank=3, local_rank=1, attempt=0)
        workers.create(str(directory / "workers-3.bin"))
        extra = " ".join(f"{name}={value}" for name, value in environ.items())
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(f"led_by_{leader}\t{program}\t{backend}\t{directory}\t{extra}\n")
        nursery.stdin.flush()
        code = nursery.stdout.readline().strip()
        assert code == "0", (directory / "out").read_text()
        told = json.loads((directory / "told.json").read_text())
        facts = directory / "facts-3.json"
        return Led(told=told, seen=segment.read(path), facts=json.loads(facts.read_text()) if facts.exists() else {})

    return lead_program


def assert_well(seen: SegmentSnapshot) -> None:
    """Every tap was there to the end, and the parts are the steps."""
    assert (seen.hooks_unavailable, seen.fault) == (Hook(0), "")
    assert sum(seen.phase_ns.values()) == seen.step_ns_total


def assert_times_are_the_programs(told: dict[str, Any], seen: SegmentSnapshot) -> None:
    """All of it, and the parts that it knows the size of."""
    took, phase = told["took_ns"], seen.phase_ns
    assert seen.step_ns_total == pytest.approx(told["wall_ns"], rel=0.02)
    assert took["train"] <= phase["data_wait"] <= 2 * took["train"]
    assert took["eval"] <= phase["validation"] <= 1.1 * took["evaluation"]
    assert 0.8 * took["save"] <= phase["checkpoint"] <= took["save"]


@pytest.mark.parametrize("backend", ["", "eager"])
@pytest.mark.parametrize("leader", PACKAGES)
def test_a_whole_training(lead: Lead, leader: str, backend: str) -> None:
    """Gradients accumulated over 8 batches and then over the 4 that an epoch has left; evaluated, saved, compiled.

    By the program's own clock half a second. Where others had the cores meanwhile, which the kernel has counted, its
    times are judged again; where nobody had, they may be wrong once.
    """
    calm = 0
    for turns_left in (2, 1, 0):
        led = lead(leader, "whole", backend)
        told, seen = led.told, led.seen
        try:
            assert_times_are_the_programs(told, seen)
        except AssertionError:
            calm += told["lost_ns"] <= LOST * told["wall_ns"]
            if not turns_left or calm == 2:
                raise
        else:
            break

    assert_well(seen)
    assert told["steps"] == told["optimizer_steps"] == 6
    assert (seen.steps, seen.microsteps, seen.samples) == (6, 36, 288)
    assert (seen.step_source, seen.skipped_steps) == (StepSource.OPTIMIZER, 0)

    assert min(seen.phase_ns[name] for name in PLAIN) > 0
    assert (seen.phase_ns["compile"] > 0) == bool(backend)

    # Which of its loaders is which.
    assert [loader["split"] for loader in led.facts["loaders"]] == ["train", "eval"]
    assert 36 <= seen.loader.batches - seen.loader.eval_batches <= 39, "nothing comes after the last evaluation"

    if backend:  # with the probe as without it: the same graphs, breaks and recompiles, and the same numbers
        without = lead(leader, "whole", backend, GPULAUNCH_PROFILE="off")
        assert not without.seen.armed
        assert without.told["compiled"]["graphs"] > 0
        assert told["compiled"] == without.told["compiled"]
        assert told["losses"] == without.told["losses"]


@pytest.mark.parametrize("leader", ["accelerate", "lightning"])
def test_steps_that_a_gradient_scaler_leaves_out(lead: Lead, leader: str) -> None:
    led = lead(leader, "scaled")

    assert_well(led.seen)
    assert (led.told["steps"], led.told["skipped"]) == (12, 5)
    assert (led.seen.steps, led.seen.skipped_steps, led.seen.microsteps) == (7, 5, 12)


@pytest.mark.parametrize("leader", ["accelerate", "lightning"])
def test_two_optimizers_make_one_step(lead: Lead, leader: str) -> None:
    led = lead(leader, "two_optimizers")

    assert_well(led.seen)
    assert led.told["steps"] == led.told["optimizer_steps"] == 24
    assert (led.seen.steps, led.seen.samples) == (12, 96)
    assert led.seen.microsteps == 23, "the last backward is in a step that has not ended"


@pytest.mark.parametrize("leader", ["accelerate", "lightning"])
def test_an_optimizer_with_closures_is_one_step_each_time(lead: Lead, leader: str) -> None:
    led = lead(leader, "closures")

    assert_well(led.seen)
    assert led.told["steps"] == led.told["optimizer_steps"] == led.seen.steps == 12
    assert led.told["evaluated"] == led.seen.microsteps > 12
    assert led.seen.samples == 96
    assert min(led.seen.phase_ns[phase] for phase in ("forward", "backward", "optimizer")) > 0


def test_lightning_without_an_optimizer(lead: Lead) -> None:
    """It has one that does nothing, and counts its steps."""
    led = lead("lightning", "no_optimizer")

    assert_well(led.seen)
    assert (led.told["steps"], led.seen.steps, led.seen.microsteps, led.seen.samples) == (12, 12, 12, 96)


def test_more_microsteps_than_patience_is_waited_for(lead: Lead) -> None:
    """The Trainer reads all the batches of a step before it begins."""
    led = lead("trainer", "many_microsteps")

    assert_well(led.seen)
    assert led.told["steps"] == led.seen.steps == 6
    assert (led.seen.microsteps, led.seen.samples) == (288, 288)
    assert (led.seen.phase_ns["validation"], led.seen.loader.eval_batches) == (0, 0)


def test_steps_that_are_not_observed_are_counted_too(lead: Lead) -> None:
    """An evaluation is observed in any case."""
    led = lead("hand", "many_steps")

    assert_well(led.seen)
    assert led.seen.unobserved_steps > 0
    assert led.seen.steps == led.seen.microsteps == led.told["steps"] == 640
    assert (led.seen.samples, led.seen.loader.eval_batches) == (8 * 640, led.told["evaluated"])


@pytest.mark.parametrize("leader", ["accelerate", "trainer", "lightning"])
def test_on_two_ranks(gpulaunch: Any, tmp_path: Path, leader: str) -> None:
    """The script as it is, with DDP: the ranks are the launcher's, and each is observed."""
    needs(leader)
    ended = gpulaunch("--nproc", "2", HERE / f"led_by_{leader}.py", env=OFFLINE)
    assert ended.code == 0, ended
    ranks = [
        [json.loads((tmp_path / f"{what}-{rank}.json").read_text()) for what in ("told", "seen")] for rank in (0, 1)
    ]

    assert len({seen["pid"] for _, seen in ranks}) == 2
    for told, seen in ranks:
        assert (told["ranks"], told["steps"]) == (2, 6)
        assert (seen["steps"], seen["microsteps"], seen["samples"], seen["skipped_steps"]) == (6, 18, 144, 0)
        assert seen["fault"] == ""
        assert seen["phase_ns"]["validation"] > 0
    assert ranks[0][1]["phase_ns"]["checkpoint"] > 0
    if leader == "lightning":
        assert [told["environment"] for told, _ in ranks] == ["TorchElasticEnvironment"] * 2
        assert [told["started"] for told, _ in ranks] == [0, 0], "it leaves that to the launcher"
