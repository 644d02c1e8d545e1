"""Copies and waits that cost, planted in a real run: `meta` is the accelerator, and takes its time as one would.

Real are the run, the taps, the ledger with its lines, the pages, the sidecar, the report, and that the program stands
still; made up is for how long (programs/accelerator.py). So what is predicted is compared with what the program's own
clock says. Without NVML nobody knows how long a GPU idles: losses are bounds then, and the stand-in is one whose
program has more to do than it has, so that the bound is reached. An unpinned copy is expected to win a quarter of what
it blocks; how much pinned memory wins on this accelerator is made up, so that is not compared.

What cannot be reached so: `dataparallel` and `fp32-on-tensor-cores` want NVML to show two GPUs, or the counters of a
Hopper. Their other half, what a real program says of itself, is taken from this run and shown to a sidecar whose NVML
is recorded. `gpu-memory-growth`, `gpu-memory-fragmented`, `throttled` and `numa-mismatch` live by CUDA's allocator and
the card alone: test_fed.py has them from the page, NVML, /proc and /sys on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Program, Train, Trained, fairly

pytestmark = [pytest.mark.torch, pytest.mark.alone, pytest.mark.timeout(1800)]

COPIES = Path(__file__).with_name("programs") / "copies.py"
RANKS = {"unpinned-copies": 0, "blocking-copies": 1, "sync-every-step": 2, "tensor-built-on-cpu": 3}
PARALLEL, WELL = 4, 5
WITHIN = 0.30
LASTS_S = "44"
"""The smallest of the losses, 8 % of a step, is not told of a run that was too short for two windows; six ranks begin
several seconds apart on a slow machine, and 24 s was too short there."""


def line_of(rule: str) -> int:
    """The line that is marked with it."""
    lines = COPIES.read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.endswith(f"# {rule}"))


def judge_copies(trained: Trained) -> None:
    found = {each["rule"]: each for each in trained.findings}
    assert {rule: each["ranks"] for rule, each in found.items()} == {rule: [rank] for rule, rank in RANKS.items()}
    assert len(trained.findings) == len(RANKS)
    for rule, rank in RANKS.items():
        assert (Path(found[rule]["file"]).name, found[rule]["line"]) == (COPIES.name, line_of(rule))
        saved_ms = trained.step_ms[rank] - trained.step_ms[WELL]
        told_s = found[rule]["seconds_per_step"]
        blocked_s = found[rule]["evidence"]["blocked_seconds_per_step"]
        assert 1e3 * blocked_s == pytest.approx(saved_ms, rel=WITHIN), (rule, trained)
        assert told_s == pytest.approx(blocked_s * (0.25 if rule == "unpinned-copies" else 1.0), rel=0.1)


def test_what_is_done_wrong_with_copies_is_found_at_its_line(train: Train, recorded: Callable[..., Any]) -> None:
    program = Program(path=COPIES, args=("--seconds", LASTS_S), ranks=6, env={"GPULAUNCH_DEVICE_TYPES": "meta"})
    runs: list[Trained] = []

    def measure() -> Trained:
        runs.extend(train(program))
        return runs[-1]

    fairly(measure, judge_copies)

    told = re.findall(r"rank (\d+) facts (\{.*\})", runs[-1].output)
    facts = {int(rank): json.loads(text) for rank, text in told}
    for rule, key in (("dataparallel", "dataparallel"), ("fp32-on-tensor-cores", "precision")):
        assert findings_on_two_gpus(recorded(), {key: facts[PARALLEL][key]}) == [rule]
        assert findings_on_two_gpus(recorded(), {key: facts[WELL][key]}) == []
    assert re.fullmatch(rf".*copies\.py:{line_of('dataparallel')} parallel", facts[PARALLEL]["dataparallel"])


def findings_on_two_gpus(node: Any, said: dict[str, Any]) -> list[str]:
    """The rules that find something where this is said on a node whose tensor cores idle."""
    node.ranks[0].facts |= {"precision": {"parameters": "float32", "autocast": "bfloat16", "matmul": "high"}, **said}
    node.gpus[0].gpm |= {5: 0.0, 12: 60.0}
    return [found.rule for found in node.watch(20)]
