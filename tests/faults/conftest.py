"""What the tests of faults share: the harness beside them, and what an undisturbed job does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_harness import STEPS, Around, Job

Result = dict[int, list[tuple[str, list[int]]]]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Result]:
    """Loss and samples of every step of a job with so many ranks that nothing happened to; made once."""
    known: dict[int, Result] = {}

    def result(ranks: int) -> Result:
        if ranks not in known:
            directory = tmp_path_factory.mktemp(f"undisturbed-{ranks}")
            job = Job(directory, ranks=ranks, program=["--steps", str(STEPS), "--pace", "0"], around=Around())
            job.start()
            try:
                assert job.wait() == 0, f"{job}"
            finally:
                job.close()
            known[ranks] = job.result()
        return known[ranks]

    return result
