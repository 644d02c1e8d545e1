"""Real programs with a fault in them, and their repaired twins: found, and worth what was said it would be.

The programs time themselves. What a finding promises per step is compared with what the repair saved by their clock.
Where the fault is that something waits, both run at the same time, so that what else goes on at the machine is the same
for both; where it is that the cores are full, one after the other.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from running import Program, Train, Trained, fairly

from gpulaunch.exporters.files.findings import read_findings

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]

PROGRAMS = Path(__file__).with_name("programs")
WITHIN = 0.30
"""Of what was saved, a prediction may be off by this much."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault, and where it is."""

    rule: str
    program: str
    line: str = ""
    """Words of the line that is to be named; empty: no line."""
    cause: str = ""
    """What is to be said in the evidence that it comes from; empty: nothing."""
    ranks: tuple[int, ...] = (0,)
    fills_the_cores: bool = False
    """Then it and its twin are no neighbours."""
    seconds: int = 24
    """Warmed up, and then two windows of 5 s or 20 steps, which end at the next look: on a slow machine, where looks
    are up to 5 s apart and steps take 0.2 s, that is as long. Alone on the cores it is half of that."""

    @property
    def path(self) -> Path:
        return PROGRAMS / f"{self.program}.py"

    def twins(self) -> tuple[Program, Program]:
        """With the fault, and repaired."""
        seconds = 14 if self.fills_the_cores else self.seconds
        args, ranks = ("--seconds", str(seconds)), max(self.ranks) + 1
        return (
            Program(path=self.path, args=args, ranks=ranks),
            Program(path=self.path, args=(*args, "--repaired"), ranks=ranks),
        )


PLANTED = (
    Planted(rule="dataloader-too-few-workers", program="too_few_workers", line="DataLoader("),
    Planted(rule="dataloader-too-few-workers", program="no_workers", line="DataLoader("),
    Planted(rule="dataloader-too-many-workers", program="too_many_workers", line="DataLoader(", fills_the_cores=True),
    Planted(rule="dataloader-slow-storage", program="slow_storage", line="DataLoader(", fills_the_cores=True),
    Planted(
        rule="dataloader-slow-transform",
        program="slow_transform",
        line="time.thread_time() < ends_s",
        fills_the_cores=True,
    ),
    Planted(rule="dataloader-head-of-line", program="head_of_line", line="DataLoader("),
    Planted(
        rule="dataloader-workers-restarted", program="workers_restarted", line="DataLoader(", fills_the_cores=True
    ),  # a worker needs a core to start
    Planted(rule="straggler", program="straggler", cause="compute", ranks=(1,)),
    Planted(rule="checkpoint-stall", program="checkpoint_stall", line="torch.save("),
    Planted(rule="gc-pauses", program="gc_pauses", line="gc.collect()"),
    Planted(rule="recompiles", program="recompiles"),
)


def storage_is_read_past_the_page_cache(directory: Path) -> bool:
    """Whether O_DIRECT works here: a tmpfs has no device below it."""
    file = directory / "probe"
    file.write_bytes(bytes(1 << 20))
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def judge(planted: Planted, faulty: Trained, repaired: Trained) -> None:
    """Found alone, where it is, and worth what the repair saved."""
    assert (faulty.rules, repaired.rules) == ([planted.rule], [])
    (found,) = faulty.findings
    assert tuple(found["ranks"]) == planted.ranks
    assert found["evidence"].get("cause", "") == planted.cause
    if planted.line:
        assert Path(found["file"]).name == planted.path.name
        assert planted.line in planted.path.read_text().splitlines()[found["line"] - 1]
    saved_ms = faulty.step_ms[0] - repaired.step_ms[0]
    assert 1e3 * found["seconds_per_step"] == pytest.approx(saved_ms, rel=WITHIN), (faulty, repaired)


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(each, id=each.program, marks=pytest.mark.alone if each.fills_the_cores else pytest.mark.light)
        for each in PLANTED
    ],
)
def test_a_planted_fault_is_found_and_worth_what_was_said(
    train: Train, two_cores: None, tmp_path: Path, planted: Planted
) -> None:
    if planted.rule == "dataloader-slow-storage" and not storage_is_read_past_the_page_cache(tmp_path):
        pytest.skip("the temporary directory is not on a device")
    faulty, repaired = planted.twins()

    def measure() -> list[Trained]:
        if planted.fills_the_cores:
            return [*train(faulty), *train(repaired)]
        return train(faulty, repaired)

    fairly(measure, lambda measured: judge(planted, *measured))


@pytest.mark.light
@pytest.mark.waits
def test_what_takes_a_minute_to_be_found(train: Train) -> None:
    """Beside each other, as they mostly sleep: lines that log or write, which are sampled, and memory that grows.

    A quarter of a megabyte more at every step; the twin reads as much of a file, which stays in the page cache.
    """
    logs = Planted(rule="logging-stall", program="logging_stall", line="logger.info(", seconds=60)
    writes = Planted(rule="hot-line", program="hot_line", line="json.dump(", seconds=60)
    grows = Planted(rule="host-memory-growth", program="memory_growth", seconds=60)

    def judge_both(measured: list[Trained]) -> None:
        judge(logs, *measured[:2])
        judge(writes, *measured[2:4])
        faulty, repaired = measured[4:]
        assert (faulty.rules, repaired.rules) == ([grows.rule], [])
        (found,) = faulty.findings
        assert found["evidence"]["bytes_per_step"] == pytest.approx(1 << 18, rel=WITHIN)
        ((grown, _), (filled, files)) = (statm(each) for each in (faulty, repaired))
        assert filled > grown / 2, "the twin shows nothing"
        assert files > filled / 2

    fairly(lambda: train(*logs.twins(), *writes.twins(), *grows.twins()), judge_both)


def statm(trained: Trained) -> tuple[int, int]:
    """Resident and shared pages in the end, as the program has printed them."""
    ((resident, shared),) = re.findall(r"resident (\d+) shared (\d+)", trained.output)
    return int(resident), int(shared)


@pytest.mark.alone
@pytest.mark.root
def test_shared_memory_that_is_nearly_full_is_found(tmp_path: Path) -> None:
    """Each of the two has a /dev/shm of its own, as a container has, of the 64 MB that it gets if nobody says more."""
    program = PROGRAMS / "shm_nearly_full.py"
    command = str(Path(sysconfig.get_path("scripts"), "gpulaunch"))
    mounted = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    in_little = ("unshare", "--mount", "sh", "-c", mounted, "sh", command, "--nproc", "1", "--job-dir")
    turns = itertools.count()

    def measure() -> list[Path]:
        one = tmp_path / str(next(turns))
        one.mkdir()
        runs = {
            one / name: subprocess.Popen([*in_little, one / name, program, *args], cwd=tmp_path)
            for name, args in (("faulty", ()), ("repaired", ("--repaired",)))
        }
        assert [run.wait(120) for run in runs.values()] == [0, 0]
        return list(runs)

    def judge_both(measured: list[Path]) -> None:
        found, nothing = (read_findings(directory / "findings.jsonl") for directory in measured)
        assert [(each["rule"], each["ranks"], Path(each["file"]).name) for each in found] == [
            ("shm-nearly-full", [0], program.name)
        ]
        assert "DataLoader(" in program.read_text().splitlines()[found[0]["line"] - 1]
        seen = found[0]["evidence"]
        assert 0 < seen["most_of_a_worker_bytes"] <= seen["in_flight_bytes"] <= seen["size_bytes"], seen
        assert nothing == []
        assert all((directory / "findings.jsonl").exists() for directory in measured)

    fairly(measure, judge_both)  # where the cores are others', workers do not fill what is to be full


@pytest.mark.alone
def test_more_threads_than_cores_are_found_and_worth_what_was_said(train: Train, two_cores: None) -> None:
    """Both fill the cores, and how fast these are changes with the host: there and back, and mean shares are compared.

    A finding is of a window, and a window's step is up to a third off the run's: the share of the step is compared.
    """
    program = PROGRAMS / "omp_threads.py"
    faulty = Program(path=program, args=("--seconds", "14"), ranks=2, env={"OMP_NUM_THREADS": "4"})
    repaired = Program(path=program, args=("--seconds", "14"), ranks=2)

    def measure() -> list[Trained]:
        return [train(each)[0] for each in (faulty, repaired, repaired, faulty)]

    def judge(measured: list[Trained]) -> None:
        first, without, without_again, again = measured
        assert [each.rules for each in measured] == [["omp-oversubscribed"], [], [], ["omp-oversubscribed"]]
        told = [each.findings[0]["seconds_per_hour"] / 3600 for each in (first, again)]
        saved = [1 - alone.step_ms[0] / with_.step_ms[0] for with_, alone in ((first, without), (again, without_again))]
        assert statistics.fmean(told) == pytest.approx(statistics.fmean(saved), rel=WITHIN), measured

    fairly(measure, judge)
