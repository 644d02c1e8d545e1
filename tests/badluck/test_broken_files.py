"""Files of the node that are cut short, written over or not files at all, under a sidecar that runs."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_node import MS, WAIT_S, Node, Refreshes, Scrape
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulaunch.profiler.channel import layout, workers
from gpulaunch.profiler.record import Collector

STEPS = "gpulaunch_steps_total"
BATCHES = "gpulaunch_dataloader_worker_seconds_total"

# -- cut short


def test_a_page_that_is_cut_short_costs_its_rank_and_nothing_else(node: Node) -> None:
    """Whoever has it mapped would end with SIGBUS; the next attempt's page is read again."""
    node.start_sidecar()
    for attempt, size_bytes in enumerate((0, 100, layout.RING_BYTE, layout.SITE_BYTE + 1)):
        node.attempt(attempt, ranks=2)
        node.ranks[0].tell("step 3")
        before = node.wait_for(3 * (attempt + 1), STEPS, rank="0").value(STEPS, rank="1") or 0

        os.truncate(node.page(0), size_bytes)
        node.ranks[1].tell("step 2")
        node.wait_until(lambda now, steps=before + 2: ranks_of(now) == {"1"} and now.value(STEPS, rank="1") == steps)
        node.wait_for_refreshes(3)
        assert "segment of rank 0: SegmentError" in node.says()


def ranks_of(scrape: Scrape) -> set[str]:
    return {sample.labels["rank"] for sample in scrape.samples if sample.name == STEPS}


def test_a_file_of_workers_that_is_cut_short_costs_their_figures(node: Node) -> None:
    node.attempt(0, ranks=2)
    lock = worked(node, 0), worked(node, 1)
    node.start_sidecar()
    both = node.wait_until(lambda now: now.value(BATCHES, rank="0") and now.value(BATCHES, rank="1"))

    os.truncate(node.workers(0), 300)
    after = node.wait_for(None, BATCHES, rank="0")
    node.wait_for_refreshes(3)

    assert "workers of rank 0: WorkersError" in node.says()
    assert after.value(BATCHES, rank="1") == both.value(BATCHES, rank="1")
    del lock


def worked(node: Node, rank: int) -> workers.WorkersWriter:
    path = str(node.workers(rank))
    workers.claim(path)
    writer = workers.WorkersWriter(path, parent_pid=os.getpid(), worker=0, knows=3)
    writer.add((1, 8, 3 * MS, MS, MS, MS, 0, 0, 0))
    return writer


def test_a_worker_whose_file_is_cut_short_goes_on(node: Node) -> None:
    """Its batches are the program's; only that they are counted is ours."""
    node.prepare(1)
    writer = worked(node, 0)
    os.truncate(node.workers(0), 0)
    writer.add((1, 8, 3 * MS, MS, MS, MS, 0, 0, 0))

    with pytest.raises(workers.WorkersError):
        workers.read(str(node.workers(0)))


# Reads as fast as it can until the file is gone: a page that somebody cuts and makes whole again, over and over.
READER = """
import mmap, os, struct, sys
from gpulaunch.profiler.channel.segment import SegmentError, SegmentReader

path, how = sys.argv[1:]
good = bad = 0
with SegmentReader(path) as reader, open(path, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    print("ready", flush=True)
    while os.path.exists(path):
        try:
            if how == "mapped":
                struct.unpack_from("@512Q", mapped, 0)
            reader.read(), reader.sites()
            good += 1
        except SegmentError:
            bad += 1
print(bool(good), bool(bad))
"""


@pytest.mark.parametrize(("how", "ended"), [("held", (0, "True True\n")), ("mapped", (-signal.SIGBUS, ""))])
def test_a_page_may_be_cut_at_any_moment(node: Node, how: str, ended: tuple[int, str]) -> None:
    """...and shows what this test would see if pages were read out of a mapping."""
    node.prepare(1)
    path = node.page(0)
    whole = path.read_bytes()
    with subprocess.Popen([sys.executable, "-c", READER, path, how], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        fd = os.open(path, os.O_RDWR)
        for _ in range(20_000):
            os.ftruncate(fd, 0)
            os.pwrite(fd, whole, 0)
        os.close(fd)
        path.unlink()
        said, _ = reader.communicate(timeout=WAIT_S)

    assert (reader.returncode, said) == ended


# -- something else in its place

KINDS = ("fifo", "directory", "link to nothing", "link to itself", "link to what has no end")
FILES = ("rank-0.bin", "workers-0.bin", "facts-0.json", "run.json", "sidecar.json", "sidecar.json.tmp")


def put_in_place(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"link to nothing": "nowhere", "link to itself": path}.get(kind, "/dev/zero"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_holds_up_nobody(node: Node, kind: str) -> None:
    """From the first moment on, in the place of everything that belongs to one rank; the other rank is well."""
    node.attempt(0, ranks=2)
    for name in FILES:
        put_in_place(node.directory / name, kind)
    node.ranks[1].tell("step 2")
    node.start_sidecar()
    scrape = node.wait_for_refreshes(3)

    assert ranks_of(scrape) == {"1"}
    assert scrape.value(STEPS, rank="1") == 2
    assert "segment of rank 0: " in node.says()
    if kind != "link to nothing":  # a run that has not been told of yet
        assert "run.json: " in node.says()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_is_no_file_leaves_the_old_one(node: Node, kind: str) -> None:
    node.attempt(0)
    node.ranks[0].tell("step 2")
    node.start_sidecar()
    node.wait_for(2, STEPS)
    put_in_place(node.directory / "group.json", kind)
    node.ranks[0].tell("step 1")

    if kind == "link to nothing":  # as good as none: the run is over
        node.wait_for(None, STEPS)
    else:
        node.wait_for(3, STEPS)
    node.wait_for_refreshes(3)


# -- garbage


@pytest.fixture
def refreshes(tmp_path: Path) -> Iterator[Refreshes]:
    made = Refreshes(tmp_path)
    yield made
    made.close()


def test_a_node_that_is_well_stays_so(refreshes: Refreshes) -> None:
    """What garbage is compared with: the same refreshes close windows, and the rank is there."""
    for _ in range(20):
        state = refreshes.refresh()
        refreshes.is_well(state)

    assert state.training[0].steps == 1000
    assert [finding.rule for finding in state.findings] == ["gc-pauses"]


@settings(max_examples=10)
@given(seeds=st.lists(st.integers(0, 2**32), min_size=12, max_size=12), begin=st.sampled_from([0, 16, 1024, 28672]))
def test_any_bytes_in_a_page_leave_the_sidecar_well(seeds: list[int], begin: int) -> None:
    """Written over while it is held: from its head on, or behind it, where nothing tells garbage from counters."""
    with tempfile.TemporaryDirectory() as directory:
        made = Refreshes(Path(directory))
        for seed in seeds:
            with open(made.directory / "rank-0.bin", "r+b") as file:
                file.seek(begin)
                file.write(random.Random(seed).randbytes(layout.SEGMENT_BYTES - begin))
            state = made.sidecar.refresh()
            made.is_well(state)
            assert (begin == 0) == (state.training == ())
        made.close()


@settings(max_examples=25)
@given(
    content=st.binary(max_size=256)
    | st.binary(max_size=256).map(lambda slots: struct.pack("@2Q", workers.MAGIC, 1).ljust(256, b"\0") + slots)
)
def test_any_bytes_in_a_file_of_workers_leave_the_sidecar_well(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = Refreshes(Path(directory))
        (made.directory / "workers-0.bin").write_bytes(content.ljust(workers.WORKERS_BYTES, b"\0"))
        made.is_well(made.refresh())
        made.is_well(made.refresh())
        made.close()


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)
loaders = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "site": documents,
            "split": st.sampled_from(["train", "eval"]) | documents,
            "num_workers": st.integers(-1, 9) | documents,
            **dict.fromkeys(("prefetch_factor", "pin_memory", "in_order", "batch_size", "kind", "wait_ns"), documents),
        },
    )
    | documents,
    max_size=3,
)
facts = st.fixed_dictionaries(
    {"version": st.just(1)},
    optional={
        "torch": documents,
        "omp_threads": documents,
        "torch_threads": documents,
        "loaders": loaders | documents,
        "device": st.fixed_dictionaries({}, optional=dict.fromkeys(("uuid", "capability", "type"), documents))
        | documents,
        "precision": st.fixed_dictionaries({}, optional=dict.fromkeys(("parameters", "autocast", "matmul"), documents))
        | documents,
        "dataparallel": documents,
        "ddp": documents,
    },
)


@settings(max_examples=20)
@given(facts=facts)
def test_any_facts_leave_the_sidecar_well(facts: dict[str, Any]) -> None:
    """Well-formed, and saying anything: the rules see them when a window closes."""
    with tempfile.TemporaryDirectory() as directory:
        made = Refreshes(Path(directory))
        (made.directory / "facts-0.json").write_text(json.dumps(facts))
        for _ in range(14):
            made.is_well(made.refresh())
        made.close()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 60_000, b'{"version": 1e999}', b"0" * 60_000])
def test_what_cannot_be_read_as_facts_is_told_and_costs_nothing_else(refreshes: Refreshes, content: bytes) -> None:
    (refreshes.directory / "facts-0.json").write_bytes(content)
    state = refreshes.refresh()

    refreshes.is_well(state)
    assert state.collectors[Collector.RANKS].reason.startswith("facts of rank 0: ")
    assert (state.training[0].steps, state.training[0].facts) == (50, {})
