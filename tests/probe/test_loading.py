"""Real programs that load data: where the time goes in a rank and its workers, and what a program says of itself."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.profiler.channel import segment, segment_writer, workers
from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.channel.segment import SegmentSnapshot, Site
from gpulaunch.profiler.channel.workers import WorkerSlot

pytestmark = pytest.mark.torch

LOADING = str(Path(__file__).with_name("loading.py"))


@dataclass
class Left:
    """What a program has left behind."""

    page: SegmentSnapshot
    sites: tuple[Site, ...]
    slots: tuple[WorkerSlot, ...]
    facts: dict[str, Any]

    def total(self, name: str) -> int:
        return sum(getattr(slot, name) for slot in self.slots)


Run = Callable[..., Left]


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """One process with torch in it, from which ranks are forked."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}
    process = subprocess.Popen(
        [sys.executable, LOADING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    yield process
    process.communicate(timeout=60)


@pytest.fixture
def run(nursery: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Run a program of `loading` to its end, quietly, and read what it leaves."""

    def run_program(program: str, *, with_workers_file: bool = True, **environ: str) -> Left:
        of_rank = str(tmp_path / "rank-3.bin")
        of_workers = str(tmp_path / "workers-3.bin")
        segment_writer.create(of_rank, rank=3, local_rank=1, attempt=0)
        if with_workers_file:
            workers.create(of_workers)
        extra = " ".join(f"{name}={value}" for name, value in environ.items())
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(f"{program}\t{tmp_path}\t{extra}\n")
        nursery.stdin.flush()
        code = nursery.stdout.readline().strip()
        assert code == "0", (tmp_path / "out").read_text()
        assert (tmp_path / "out").read_text() == "", "a rank that is well says nothing"
        facts = tmp_path / "facts-3.json"
        with segment.SegmentReader(of_rank) as reader:
            return Left(
                page=reader.read(),
                sites=reader.sites(),
                slots=workers.read(of_workers) if with_workers_file else (),
                facts=json.loads(facts.read_text()) if facts.exists() else {},
            )

    return run_program


# --- the workers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "kept"),
    [
        *itertools.product(("fork",), ("map", "iterable"), ("no", "yes")),
        # Each worker of these imports torch, which costs 2 s of a core: all values, not all combinations.
        *(("spawn", "map", "no"), ("spawn", "iterable", "yes")),
        *(("forkserver", "map", "yes"), ("forkserver", "iterable", "no")),
    ],
)
def test_every_worker_counts_what_it_fetches_however_it_is_started(run, how, kind, kept):
    """24 batches of 8 samples, by two workers at a time: four in all where they are not kept, in the same two slots."""
    left = run("two_epochs", HOW=how, KIND=kind, KEPT=kept)

    assert (left.total("batches"), left.total("samples")) == (24, 192)
    assert [slot.worker for slot in left.slots] in ([0, 1], [1, 0])
    assert all(slot.batches for slot in left.slots)
    assert not any(slot.alive for slot in left.slots)
    assert left.total("wall_ns") == left.total("cpu_ns") + left.total("runqueue_ns") + left.total("blocked_ns") > 0
    assert (left.page.loader.batches, left.page.hooks_unavailable) == (24, Hook(0)), left.page.fault
    assert [(loader["kind"], loader["start_method"]) for loader in left.facts["loaders"]] == [(kind, how)]


def stolen_ns() -> int:
    """Of all cores, by the host (proc(5))."""
    return int(Path("/proc/stat").read_text().split()[8]) * 10**9 // os.sysconf("SC_CLK_TCK")


def test_what_takes_the_core_is_told_from_what_is_waited_for(run):
    before_ns = stolen_ns()
    computing = run("computes")
    taken_ns = stolen_ns() - before_ns
    waiting = run("waits")

    # What a busy machine adds to computing is in the run queue, where the kernel counts it.
    assert computing.total("cpu_ns") >= 96 * 2_000_000
    assert all(slot.knows_runqueue for slot in computing.slots)
    # What the host takes is in neither, if the kernel knows of it: then it looks like waiting.
    assert computing.total("blocked_ns") - taken_ns < computing.total("cpu_ns")
    assert waiting.total("blocked_ns") >= 0.9 * 96 * 10_000_000
    assert waiting.total("cpu_ns") < waiting.total("blocked_ns")


@pytest.mark.parametrize(("helper", "computes_ns"), [("thread", 2_000_000), ("process", 20_000_000)])
def test_what_a_helper_of_the_dataset_computes_is_not_waiting(run, helper, computes_ns):
    left = run(f"computes_in_a_{helper}")

    assert left.total("cpu_ns") >= 0.9 * 96 * computes_ns


def test_what_is_read_is_counted_by_where_it_came_from(run, tmp_path):
    (tmp_path / "data").write_bytes(bytes(65536))
    left = run("reads", DATA=str(tmp_path / "data"))
    read_bytes = left.total("storage_bytes") + left.total("cached_bytes")

    assert all(slot.knows_io for slot in left.slots)
    assert 96 * 65536 <= read_bytes < 1.5 * 96 * 65536
    assert left.total("cached_bytes") > left.total("storage_bytes"), "it has just been written"


def test_a_dataset_that_reads_nothing_has_read_nothing(run):
    """The measuring reads files too, and that is not the dataset's; handing batches over takes a few bytes."""
    assert run("computes").total("cached_bytes") < 12 * 4096


def test_collating_is_counted_apart(run):
    left = run("collates")

    assert left.total("collate_ns") >= 0.9 * 12 * 10_000_000
    assert left.total("collate_ns") <= left.total("wall_ns")


def test_an_exception_of_the_dataset_passes_and_is_no_batch(run):
    left = run("breaks")

    assert 0 < left.total("batches") < 12
    assert left.page.hooks_unavailable == Hook(0)


def test_a_dataset_that_reads_from_a_dataloader_is_counted_once(run):
    left = run("nests")

    assert (left.total("batches"), left.total("samples")) == (12, 96)


def test_without_workers_nobody_measures(run):
    left = run("has_no_workers")

    assert (left.slots, left.page.loader.batches, left.page.loader.workers_configured) == ((), 12, 0)
    assert left.page.loader.wait_ns_total > 0
    assert (left.page.loader.transfer_ns_total, left.page.loader.blocked_ns_total) == (0, 0)


def test_workers_of_a_program_that_the_rank_starts_are_not_the_ranks(run):
    assert run("starts_a_program").slots == ()


def test_without_a_file_for_them_workers_are_not_measured_and_all_else_is(run):
    left = run("computes", with_workers_file=False)

    assert left.page.hooks_unavailable == Hook.WORKERS
    assert "no file for workers" in left.page.fault
    assert left.page.loader.batches == 12


# --- the rank -------------------------------------------------------------------------------------------------------


def test_a_batch_that_waits_for_an_earlier_one_blocks_the_line(run):
    left = run("late_batch")

    assert left.page.loader.blocked_ns_total >= 200_000_000
    assert left.page.loader.wait_ns_total >= left.page.loader.blocked_ns_total + left.page.loader.transfer_ns_total


def test_a_batch_that_is_there_takes_its_time_to_get_across(run):
    left = run("ready_batches")
    seen = left.page

    assert 0 < seen.loader.transfer_ns_total <= seen.loader.wait_ns_total
    assert seen.loader.transfer_ns_total > seen.loader.blocked_ns_total
    assert seen.loader.batch_bytes_total == 96 * 4 * 4
    assert sum(seen.loader.wait_counts) == seen.loader.batches == 12


def test_a_loader_has_a_line_and_what_was_waited_for_it(run):
    left = run("two_epochs", HOW="fork", KIND="map", KEPT="yes")
    (site,) = left.sites

    assert site.kind == "loader"
    assert re.fullmatch(r"\S*loading\.py:\d+ two_epochs", site.text)
    assert left.facts["loaders"][0]["site"] == site.text
    assert (site.count, site.size_bytes) == (24, 2 * 96 * 4 * 4)
    assert site.blocked_ns == left.page.loader.wait_ns_total


# --- what a program says of itself ----------------------------------------------------------------------------------


def test_the_facts_tell_how_a_program_is_set_up(run):
    left = run("tells_of_itself", OMP_NUM_THREADS="3,1")
    training, evaluation, unused = left.facts["loaders"]

    assert re.fullmatch(r"\S*loading\.py:\d+ tells_of_itself", training.pop("site"))
    assert training == {
        "split": "train",
        "made_anew": False,
        "num_workers": 2,
        "prefetch_factor": 3,
        "pin_memory": False,
        "persistent_workers": True,
        "in_order": True,
        "batch_size": 8,
        "kind": "map",
        "start_method": "fork",
        "epoch_batches": 12,
    }
    assert (evaluation["split"], evaluation["num_workers"], evaluation["start_method"]) == ("eval", 0, None)
    assert (unused["split"], unused["kind"], unused["batch_size"]) == (None, "iterable", None)
    assert re.fullmatch(r"\S*loading\.py:\d+ tells_of_itself", left.facts["dataparallel"])
    assert left.facts["precision"] == {
        "parameters": "float32",
        "sharded": False,
        "optimizer": "SGD",
        "default": "float32",
        "autocast": "bfloat16",
        "matmul": "highest",
    }
    assert (left.facts["version"], left.facts["omp_threads"], left.facts["torch_threads"]) == (1, 3, 1)
    assert (left.facts["device"], left.facts["ddp"]) == (None, None)
    assert left.facts["torch"].count(".") >= 2
    assert (left.page.loader.batches, left.page.loader.eval_batches, left.page.steps) == (18, 6, 12)


def test_parameters_that_have_no_size_yet_may_be_looked_at(run):
    left = run("trains_lazy_layers")

    assert left.page.hooks_unavailable == Hook(0), left.page.fault
    assert left.facts["precision"]["parameters"] == "float64"


def test_nobody_sees_that_parameters_are_looked_at(run):
    left = run("is_watched_by_a_mode")

    assert left.facts["precision"]["parameters"] == "float32"


def test_a_loader_that_a_package_makes_from_the_programs_own_is_the_programs(run):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    left = run("accelerated")
    lines = {loader["site"] for loader in left.facts["loaders"]}

    assert len(lines) == 1
    assert re.fullmatch(r"\S*loading\.py:\d+ accelerated", lines.pop())
    assert {(site.kind, site.count) for site in left.sites} == {("loader", 12)}


def test_the_class_of_dataloaders_is_as_it_was(run):
    assert run("looks_at_the_class").page.hooks_unavailable == Hook(0)


def test_off_means_off(run):
    left = run("two_epochs", HOW="spawn", KIND="map", KEPT="yes", GPULAUNCH_PROFILE="off")

    assert (left.slots, left.facts, left.page.armed) == ((), {}, False)
