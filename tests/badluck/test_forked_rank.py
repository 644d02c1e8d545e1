"""A rank that forks without exec and trains on in the child: its page, its facts and its figures stay its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from bad_node import WAIT_S

from gpulaunch.profiler.channel import segment_writer, workers
from gpulaunch.profiler.channel.segment import SegmentReader, SegmentSnapshot

pytestmark = pytest.mark.torch

RANKS = str(Path(__file__).with_name("forking_ranks.py"))
STORIES = ("alone", "between_steps", "within_a_step", "within_a_save", "grandchild", "by_multiprocessing",
           "with_a_ledger", "orphan", "impostor")  # fmt: skip
STEPS, BATCH = 7, 8


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a rank has left behind."""

    page: SegmentSnapshot
    kinds: tuple[str, ...]
    """What its lines did."""
    pid: int
    facts: str
    workers: tuple[workers.WorkerSlot, ...]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Left]:
    """Run every story, once."""
    directory = tmp_path_factory.mktemp("forking")
    for rank in range(len(STORIES)):
        segment_writer.create(str(directory / f"rank-{rank}.bin"), rank=rank, local_rank=rank, attempt=0)
        workers.create(str(directory / f"workers-{rank}.bin"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}
    argv = [sys.executable, RANKS, str(directory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=clean, start_new_session=True) as process:
        try:
            said, _ = process.communicate(timeout=2 * WAIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # those that it has forked, too
            raise
    ended = [line.split() for line in said.splitlines()]
    assert [(name, code) for name, _, code in ended] == [(story, "0") for story in STORIES]
    until_s = time.monotonic() + WAIT_S
    while not (directory / "orphan").exists():
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return {name: look(directory, rank, int(pid)) for rank, (name, pid, _) in enumerate(ended)}


def look(directory: Path, rank: int, pid: int) -> Left:
    facts = directory / f"facts-{rank}.json"
    with SegmentReader(str(directory / f"rank-{rank}.bin")) as reader:
        return Left(
            page=reader.read(),
            kinds=tuple(sorted(site.kind for site in reader.sites())),
            pid=pid,
            facts=facts.read_text() if facts.exists() else "",
            workers=workers.read(str(directory / f"workers-{rank}.bin")),
        )


def figures(seen: SegmentSnapshot) -> dict[str, object]:
    """What a rank counts, without the times, which differ from rank to rank."""
    return {
        "steps": seen.steps,
        "microsteps": seen.microsteps,
        "skipped": seen.skipped_steps,
        "samples": seen.samples,
        "batches": seen.loader.batches,
        "step histogram": sum(seen.step_counts),
        "collections": seen.pauses.gc_collections,
        "saves": seen.checkpoint.saves,
        "resumed": seen.checkpoint.resumed_step,
        "note": seen.note,
        "fault": seen.fault,
        "off": seen.hooks_unavailable,
        "sums": sum(seen.phase_ns.values()) == seen.step_ns_total,
    }


@pytest.mark.parametrize("story", [name for name in STORIES if name not in ("alone", "impostor")])
def test_what_a_forked_child_does_is_not_the_ranks(left: dict[str, Left], story: str) -> None:
    rank, alone = left[story], left["alone"]

    assert rank.page.pid == rank.pid
    assert figures(rank.page) == figures(alone.page)
    assert (rank.page.steps, rank.page.samples) == (STEPS, STEPS * BATCH)
    assert rank.workers == (), "its child's dataloader is not its own"


def test_only_the_rank_tells_of_its_surroundings(left: dict[str, Left]) -> None:
    loaders = {name: [each["num_workers"] for each in json.loads(rank.facts)["loaders"]] for name, rank in left.items()}

    assert {name: counts for name, counts in loaders.items() if counts != [0] and name != "impostor"} == {}


def test_a_save_in_which_a_rank_forks_is_one_save(left: dict[str, Left]) -> None:
    assert left["within_a_save"].kinds.count("save") == 1
    assert left["between_steps"].kinds.count("save") == 0
    assert left["within_a_save"].page.phase_ns["checkpoint"] > 0


def test_of_a_rank_and_its_child_only_the_ranks_copies_count(left: dict[str, Left]) -> None:
    copied = left["with_a_ledger"].page.copies["h2d", "pageable"]

    assert (copied.count, copied.size_bytes) == (1, 8)


def test_a_child_that_took_itself_for_the_rank_would_be_seen(left: dict[str, Left]) -> None:
    rank, alone = left["impostor"], left["alone"]
    ours, theirs = figures(alone.page), figures(rank.page)

    assert {name for name in ours if ours[name] != theirs[name]} >= {"collections", "saves", "note"}
    assert rank.kinds.count("save") == 1
