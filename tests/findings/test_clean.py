"""Programs that are well: nothing is found in them. The examples, and programs of different kinds.

Three run at a time, each under a command of its own: neighbours who take their share of the cores are no fault of a
program's.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import Program, Train, Trained, fairly

from gpulaunch.profiler.analysis.thresholds import GROWN_BYTES

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]

CLEAN = Path(__file__).with_name("programs") / "clean.py"
EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = {"distributed": 2}
KINDS = (
    ("in_memory", "with_workers", "accumulating"),
    ("compiled", "adversarial", "with_closures"),
    ("streaming", "mapped", "distributed"),
)


@pytest.mark.light
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_nothing_is_found_in_a_program_that_is_well(train: Train, kinds: tuple[str, ...]) -> None:
    programs = [Program(path=CLEAN, args=(kind,), ranks=RANKS.get(kind, 1)) for kind in kinds]

    def judge(measured: list[Trained]) -> None:
        found = {kind: trained.findings for kind, trained in zip(kinds, measured, strict=True)}
        assert found == {kind: [] for kind in kinds}

    fairly(lambda: train(*programs), judge)


@pytest.mark.alone
@pytest.mark.parametrize(
    "example", [("digits_ddp.py", "--epochs", "40"), ("gpt_fsdp.py", "--steps", "200")], ids=lambda example: example[0]
)
def test_nothing_is_found_in_the_examples(train: Train, example: tuple[str, ...]) -> None:
    name, *args = example
    program = Program(path=EXAMPLES / name, args=tuple(args), ranks=2)

    def judge(measured: list[Trained]) -> None:
        assert [trained.findings for trained in measured] == [[]]

    fairly(lambda: train(program), judge)


@pytest.mark.light
@pytest.mark.waits
def test_nothing_is_found_in_a_program_that_is_well_for_longer(train: Train) -> None:
    """As long as it takes to find memory that grows, and lines that log, which are sampled: six windows, a minute.

    Its memory does grow, by three times as much as is a fault; and then it has all that it wants.
    """
    program = Program(path=CLEAN, args=("for_longer",))

    def judge(measured: list[Trained]) -> None:
        (trained,) = measured
        ((epochs, kept),) = re.findall(r"epochs (\d+) kept (\d+)", trained.output)
        assert int(epochs) >= 2, "it has not got beyond what it keeps"
        assert int(kept) * 100_000 > 3 * GROWN_BYTES.value, "it has kept too little to be taken for a fault"
        assert trained.findings == []

    fairly(lambda: train(program), judge)
