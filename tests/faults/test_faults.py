"""Every fault of the table, made on a small DDP job: `pytest tests/faults -k <name of the row>`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_harness import AROUND, SEEN_STEPS, STEPS, Job, wait_until
from fault_page import PAGE, page
from fault_rows import ROWS, TOLD_S, Row

Ran = tuple[Job, int]
"""A job that has ended, and its exit code."""
TIMES = 3
"""So many times what it needs and what the settings allow may pass between the last step before and the first after."""


def waits_long(row: Row) -> bool:
    """All that its test does is to wait."""
    return row.kind == "hang" or row.told


def marks(row: Row) -> list[pytest.MarkDecorator]:
    more = (pytest.mark.root, row.root), (pytest.mark.waits, waits_long(row))
    return [pytest.mark.torch, *(mark for mark, is_so in more if is_so)]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=marks(row)) for row in ROWS])
def test_fault(row: Row, tmp_path: Path, undisturbed: Callable, hung: Callable[[Row], Ran]) -> None:
    expected = undisturbed(row.ranks)
    job, code = hung(row) if waits_long(row) else go_through(row, tmp_path)

    assert code == row.code, f"{job}"
    check_what_it_said(row, job)
    if code == 0:
        assert job.result() == expected, f"other losses or samples than a job without a fault\n{job}"
    if code != 69:
        assert job.attempts == row.restarts + len(job.started_s), f"{job}"
    if row.save_every and job.attempts > 1:
        assert resumed_at(job) > 1, f"began again at the first step\n{job}"
    if row.restarts and code == 0:
        check_time(row, job)
    if row.told:
        check_what_it_told(row, job)
    if row.name == "teardown":
        (ended,) = job.events("run_ended")
        spent_s = ended["goodput_seconds"]
        assert spent_s["detection"] == spent_s["lost_work"] == 0, f"{job}"
        assert spent_s["teardown"] > 20, f"{job}"
    check_nothing_left(job)


def go_through(row: Row, directory: Path) -> Ran:
    """A job to its end, through its fault."""
    program = ["--steps", str(STEPS), "--plant", row.plant, "--rank", str(row.rank), *row.program]
    program += ["--save-every", str(row.save_every)] + (["--hold"] if row.acts else [])
    with AROUND[row.around](directory) as around:
        allowed = row.restarts + 1 if row.allowed is None else row.allowed
        options = ["--max-restarts", str(allowed), *row.options]
        job = Job(directory, ranks=row.ranks, options=options, program=program, around=around)
        job.start()
        try:
            act(row, job)
            return job, job.wait()
        finally:
            job.close()


@pytest.fixture(scope="module")
def hung(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Ran]:
    """What became of a job that hangs. All that is done with one is to wait for the verdict, 15 to 130 seconds: so
    those of all tests to come go through it at once, in the first that asks, and the census of that test is of all."""
    told = [item.callspec.params.get("row") for item in request.session.items if hasattr(item, "callspec")]
    hanging = [row for row in told if isinstance(row, Row) and waits_long(row)]
    ran: dict[str, Future[Ran]] = {}

    def of(row: Row) -> Ran:
        if not ran:
            with ThreadPoolExecutor(len(hanging)) as pool:
                for one in hanging:
                    ran[one.name] = pool.submit(go_through, one, tmp_path_factory.mktemp(one.name))
        return ran[row.name].result()

    return of


def act(row: Row, job: Job) -> None:
    """Do what is done from outside, and let the job go on to its end."""
    if not row.acts:
        return
    job.wait_for_steps(SEEN_STEPS)
    if any(what.endswith("-checkpoint") for what in row.acts):
        # It is held before its last step, so that the checkpoint that is damaged stays the newest.
        job.wait_for_steps(STEPS - 1)
        last = (STEPS - 1) // row.save_every * row.save_every
        wait_until(lambda: any(int(path.name.removeprefix("step-")) == last for path in job.checkpoints()), f"{job}")
    for what in row.acts:
        job.act(what, row.rank)
    job.release()


def check_what_it_said(row: Row, job: Job) -> None:
    if row.kind:
        failure = job.failure(0)
        assert failure["first"]["kind"] == row.kind, f"{job}"
        assert row.of_all_ranks or failure["first"]["rank"] == row.rank, f"{job}"
        assert row.cause in (None, failure["exit_code"]), f"{job}"
    else:
        assert not (job.run_dir / "attempts/0/failure.json").exists(), f"{job}"
    assert re.search(row.says, job.stderr), f"did not say {row.says!r}\n{job}"
    assert "internal error" not in job.stderr, f"{job}"


def resumed_at(job: Job) -> int:
    """The first step that the last attempt made."""
    made = job.trace(0)
    return next(each["step"] for each in made if each["attempt"] == made[-1]["attempt"])


def check_time(row: Row, job: Job) -> None:
    """How long no rank made a step, as a multiple of how long it took to the first one."""
    made = sorted((each["at_s"], each["attempt"]) for rank in range(row.ranks) for each in job.trace(rank))
    after_s = next(at_s for at_s, attempt in made if attempt != made[0][1])
    before_s = max(at_s for at_s, attempt in made if attempt == made[0][1] and at_s < after_s)
    start_s = made[0][0] - job.started_s[0]
    lost_s = after_s - max([before_s, *job.acted_s])
    assert lost_s <= TIMES * (start_s + row.allowed_s), f"{lost_s:.1f} s lost, the start took {start_s:.1f} s\n{job}"


def check_what_it_told(row: Row, job: Job) -> None:
    """Once, in time, with the rank; and where it went on by itself, taken back."""
    told, *again = job.events("hang_suspected")
    assert len(again) <= 2 * (row.allowed_s > 2 * TOLD_S), f"{job}"
    assert told["ranks"] == [row.rank], f"{job}"
    assert told["quiet_s"] <= TOLD_S, f"{job}"
    evidence = json.loads((job.run_dir / "attempts/0/hang.json").read_text())
    over = [event["ranks"] for event in job.events("hang_over")]
    assert (over, evidence["state"]) == (([], "acted") if row.kind == "hang" else ([[row.rank]], "over")), f"{job}"


def check_nothing_left(job: Job) -> None:
    """Beyond what the census of every test looks for."""
    grandchild = job.out / "grandchild"
    if grandchild.exists():
        wait_until(lambda: not os.path.exists(f"/proc/{grandchild.read_text()}"), "the grandchild has ended", 5.0)
    assert not list(job.run_dir.rglob("*.tmp"))
    assert not list(job.run_dir.rglob(".saving-*")), "a half-written checkpoint"


def test_the_page_of_the_faults_is_made_from_this_table() -> None:
    assert PAGE.read_text() == page(), "python tests/faults/fault_page.py"


def test_every_row_has_a_name_of_its_own_that_selects_it_alone() -> None:
    names = [row.name for row in ROWS]

    assert [(a, b) for a in names for b in names if a != b and a in b] == []
