"""Real programs that move tensors, with `meta` as the accelerator: what went where, by which line, for how long."""

from __future__ import annotations

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
from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.channel.segment import SegmentSnapshot, Site

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent
MOVING = HERE / "moving.py"
PARAMETERS_BYTES = 4 * (8 * 16 + 16 + 16 * 3 + 3)
LEDGER = Hook.COPIES | Hook.SYNCS


@dataclass
class Left:
    """What a program has left behind."""

    page: SegmentSnapshot
    sites: dict[str, Site]
    """By the mark at the end of the line."""

    def copies(self, direction: str, memory: str = "pageable") -> tuple[int, int]:
        """Count and bytes."""
        seen = self.page.copies[direction, memory]
        return seen.count, seen.size_bytes

    @property
    def waits(self) -> dict[str, int]:
        """Calls, of those kinds that there were."""
        return {kind: seen.calls for kind, seen in self.page.syncs.items() if seen.calls}


Run = Callable[..., Left]


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """One process with torch in it, from which ranks are forked."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}
    process = subprocess.Popen(
        [sys.executable, str(MOVING)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    yield process
    process.communicate(timeout=60)


@pytest.fixture
def run(nursery: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Run a program of `moving` to its end, quietly, and read what it leaves."""

    def run_program(program: str, **environ: str) -> Left:
        path = str(tmp_path / "rank-3.bin")
        segment_writer.create(path, rank=3, local_rank=1, attempt=0)
        workers.create(str(tmp_path / "workers-3.bin"))
        extra = " ".join(f"{name}={value}" for name, value in {"GPULAUNCH_DEVICE_TYPES": "meta", **environ}.items())
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(f"{program}\t{tmp_path}\t{extra}\n")
        nursery.stdin.flush()
        code = nursery.stdout.readline().strip()
        assert code == "0", (tmp_path / "out").read_text()
        assert (tmp_path / "out").read_text() == "", "a rank that is well says nothing"
        with segment.SegmentReader(path) as reader:
            rows = [row for row in reader.sites() if row.kind != "loader"]
            return Left(reader.read(), {mark_of(row): row for row in rows})

    return run_program


def mark_of(row: Site) -> str:
    """The words after the # of a row's line; the whole text where the line has none."""
    lines = MOVING.read_text().splitlines()
    place = row.text.rpartition("moving.py:")[2].split(" ")[0]
    if not place.isdigit():
        return row.text
    return lines[int(place) - 1].partition("  # ")[2] or row.text


def test_batches_that_go_over_are_counted_by_line(run):
    seen = run("batches_go_over")

    assert seen.copies("h2d") == (24, 12 * (256 + 64))
    assert seen.waits == {}
    inputs, targets = seen.sites["inputs"], seen.sites["targets"]
    assert (inputs.kind, inputs.count, inputs.size_bytes, inputs.non_blocking) == ("h2d", 12, 12 * 256, 0)
    assert (targets.kind, targets.count, targets.size_bytes, targets.non_blocking) == ("h2d", 12, 12 * 64, 12)
    assert inputs.text.endswith(" move")
    assert inputs.blocked_ns + targets.blocked_ns == seen.page.copies["h2d", "pageable"].blocked_ns > 0
    assert (inputs.pinned, inputs.gpu_ns) == (0, 0)
    assert seen.page.hooks_armed & LEDGER == LEDGER
    assert seen.page.hooks_unavailable == Hook(0), seen.page.fault


def test_the_time_of_copies_and_waits_is_a_part_of_the_step(run):
    went = run("batches_go_over").page
    came = run("values_come_back").page

    for seen in (went, came):
        assert sum(seen.phase_ns.values()) == seen.step_ns_total
    assert 0 < went.phase_ns["h2d"] <= went.copies["h2d", "pageable"].blocked_ns
    assert went.phase_ns["sync"] == 0
    blocked_ns = sum(wait.blocked_ns for wait in came.syncs.values())
    # The first batch's come before the training thread is known to be one.
    assert 0.5 * blocked_ns < came.phase_ns["sync"] <= blocked_ns


def test_what_goes_over_is_counted_as_it_arrives(run):
    seen = run("what_goes_over_is_counted_as_it_arrives")

    assert seen.copies("h2d") == (36, 12 * (128 + 256 + 256))
    assert (seen.sites["converted"].size_bytes, seen.sites["converted"].non_blocking) == (12 * 128, 12)
    assert (seen.sites["filled"].size_bytes, seen.sites["filled"].non_blocking) == (12 * 256, 12)
    assert seen.sites["like another"].size_bytes == 12 * 256


def test_what_moves_nothing_is_no_entry(run):
    seen = run("what_moves_nothing")

    assert {key: copies.count for key, copies in seen.page.copies.items() if copies.count} == {}
    assert (seen.waits, seen.sites) == ({}, {})
    assert seen.page.steps == 12


def test_pinned_memory_is_told_from_the_other(run):
    seen = run("pinned_batches")

    assert seen.copies("h2d", "pinned") == (12, 12 * 256)
    assert seen.copies("h2d", "pageable") == (12, 12 * 128)
    assert (seen.sites["pinned"].pinned, seen.sites["pinned"].non_blocking) == (12, 12)
    assert seen.sites["converted on its way, through memory that is not pinned"].pinned == 0


def test_values_that_come_back_are_waited_for(run):
    seen = run("values_come_back")

    assert seen.waits == {"item": 48, "bool": 12, "tolist": 12, "numpy": 12, "cpu": 36, "nonzero": 12}
    assert seen.copies("d2h") == (60, 5 * 12 * 12)
    kinds = {mark: (row.kind, row.count) for mark, row in seen.sites.items()}
    assert kinds == {
        **dict.fromkeys(("item", "float", "int", "index"), ("item", 12)),
        **{kind: (kind, 12) for kind in ("bool", "tolist", "numpy", "cpu", "nonzero")},
        **dict.fromkeys(("to cpu", "copied back"), ("d2h", 12)),
    }
    held_ns = 2_000_000 * 12
    assert all(row.blocked_ns >= held_ns for row in seen.sites.values())
    assert all(seen.page.syncs[kind].blocked_ns > 0 for kind in seen.waits)


def test_what_goes_from_one_accelerator_to_the_other_is_counted_by_line_and_is_no_wait(run):
    seen = run("goes_from_one_accelerator_to_the_other")

    assert seen.copies("d2d", "") == (24, 12 * (12 + 20))
    sizes = {mark: (row.kind, row.count, row.size_bytes) for mark, row in seen.sites.items()}
    assert sizes == {"moved across": ("d2d", 12, 12 * 12), "filled across": ("d2d", 12, 12 * 20)}
    assert seen.page.copies["d2d", ""].blocked_ns == sum(row.blocked_ns for row in seen.sites.values())
    assert all(row.blocked_ns >= 12 * 2_000_000 for row in seen.sites.values())
    assert (seen.waits, seen.page.phase_ns["sync"], seen.page.phase_ns["h2d"]) == ({}, 0, 0)
    assert seen.page.hooks_unavailable == Hook(0), seen.page.fault


def test_what_synchronizes_is_counted(run):
    seen = run("waits_for_the_gpu")

    assert seen.waits == {"synchronize": 48}
    assert seen.sites["synchronize"].kind == "synchronize"
    assert seen.page.phase_ns["sync"] > 40 * 2_000_000


def test_a_model_goes_over_as_a_whole(run):
    seen = run("a_model_goes_over")

    assert seen.copies("h2d") == (1, PARAMETERS_BYTES)
    assert (seen.sites["model"].count, seen.sites["model"].size_bytes) == (1, PARAMETERS_BYTES)
    assert len(seen.sites) == 1


def test_what_is_built_on_the_cpu_and_moved_is_told_with_both_lines(run):
    seen = run("builds_on_the_cpu")
    lines = MOVING.read_text().splitlines()
    at = {
        mark: 1 + next(n for n, line in enumerate(lines) if line.endswith(f"# {mark}"))
        for mark in ("noise", "noise moved")
    }
    built = {text: row for text, row in seen.sites.items() if row.kind == "built_on_cpu"}

    assert len(built) == 2
    noise = seen.sites["noise moved"]
    path = noise.text.removeprefix("built at ").partition(":")[0]
    assert noise.text == f"built at {path}:{at['noise']}, moved at {path}:{at['noise moved']}"
    assert (noise.count, noise.size_bytes) == (12, 12 * 64)
    assert seen.sites["batch"].kind == "h2d"
    assert seen.copies("h2d") == (36, 12 * (64 + 64 + 256))


def test_a_value_that_is_logged_is_told_at_the_line_that_logs(run):
    seen = run("logs")

    assert seen.sites["logged"].kind == "item"
    assert seen.waits == {"item": 12}


def test_what_a_gradient_scaler_waits_for_is_no_line_of_the_programs(run):
    """It counts; but that it looks whether gradients are infinite is not for the program to change."""
    seen = run("gradients_are_scaled")

    assert seen.waits == {"item": 24}
    assert {mark: (row.kind, row.count) for mark, row in seen.sites.items()} == {
        "": ("elsewhere", 12),
        "asked by the program": ("item", 12),
    }


def test_another_threads_copies_count_and_take_nothing_of_the_steps(run):
    seen = run("a_helper_thread_moves")

    assert seen.copies("h2d") == (12, 12 * 256)
    assert seen.page.copies["h2d", "pageable"].blocked_ns == 0
    assert (seen.page.phase_ns["h2d"], seen.page.phase_ns["sync"], seen.waits) == (0, 0, {})


def test_a_forked_child_is_not_the_rank(run):
    assert run("a_forked_child_moves").copies("h2d") == (1, 256)


def test_what_raises_has_moved_nothing(run):
    seen = run("exceptions_pass")

    assert {key: copies.count for key, copies in seen.page.copies.items() if copies.count} == {}
    assert (seen.waits, seen.page.hooks_unavailable) == ({}, Hook(0))


def test_classes_that_know_a_method_by_identity_still_do(run):
    seen = run("classes_with_a_dispatch_of_their_own")

    assert seen.page.hooks_unavailable == Hook(0), seen.page.fault


def test_what_programs_ask_of_the_methods_is_answered_as_ever(run):
    run("what_torch_looks_like")


def test_what_torch_fx_writes_down_is_what_it_would_have_been(run):
    run("is_traced_symbolically")


def test_what_a_signal_handler_raises_reaches_the_program_and_costs_one_entry(run):
    seen = run("an_alarm_goes_off")

    assert seen.page.hooks_unavailable == Hook(0), seen.page.fault
    assert seen.sites["goes on"].count == 12


def test_a_program_from_a_pipe_is_not_read_again(run, tmp_path, monkeypatch):
    seen = run("comes_out_of_a_pipe")

    assert seen.copies("h2d")[0] == 12
    assert {row.kind for row in seen.sites.values()} == {"h2d"}


def test_a_fault_of_the_ledger_ends_the_ledger_and_nothing_else(run):
    seen = run("the_ledger_breaks")

    assert seen.page.hooks_unavailable == LEDGER
    assert "TypeError" in seen.page.fault
    assert seen.page.steps == 12
    assert seen.copies("h2d") == (7, 7 * 256)


def test_copies_and_phases_are_timed_on_the_gpu(run):
    """Here with a stand-in for it; tests/gpu has a real one."""
    seen = run("a_gpu_is_timed", GPULAUNCH_DEVICE_TYPES="meta,cuda").page

    assert seen.gpu_time.steps == 2
    assert min(seen.gpu_time.forward_ns_total, seen.gpu_time.backward_ns_total, seen.gpu_time.optimizer_ns_total) > 0
    assert (
        seen.gpu_time.forward_ns_total + seen.gpu_time.backward_ns_total + seen.gpu_time.optimizer_ns_total
        < seen.gpu_time.step_ns_total
    )
    assert 0 < seen.copies["h2d", "pageable"].gpu_ns < 16 * seen.gpu_time.step_ns_total
    assert (seen.gpu.allocated_bytes, seen.gpu.inactive_split_bytes, seen.gpu.ooms) == (1, 3, 5)
    assert seen.hooks_unavailable == Hook(0), seen.fault


def test_without_an_accelerator_torch_is_as_it_was(run):
    seen = run("nothing_is_tapped", GPULAUNCH_DEVICE_TYPES="")

    assert seen.page.hooks_armed & (LEDGER | Hook.GPU_TIME) == Hook(0)
    assert seen.page.hooks_unavailable == Hook(0)
    assert (seen.page.steps, seen.waits, seen.sites) == (12, {}, {})


def test_the_ledgers_taps_come_out_again(run):
    assert run("ledger_taps_come_out", GPULAUNCH_DEVICE_TYPES="").page.steps == 12


def test_nothing_is_kept_of_a_copy(run):
    seen = run("a_hundred_thousand_copies")

    assert seen.copies("h2d") == (100_000, 100_000 * 8)


# --- torch with taps does as torch without ----------------------------------------------------------------------------


def results_of(script: str, *args: str, **environ: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / script), *args],
        env={name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}
        | environ,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_whatever_is_done_with_tensors_comes_to_the_same(tmp_path):
    segment_writer.create(str(tmp_path / "rank-0.bin"), rank=0, local_rank=0, attempt=0)
    workers.create(str(tmp_path / "workers-0.bin"))
    without = results_of("as_ever.py")
    tapped = results_of("as_ever.py", RANK="0", GPULAUNCH_CHANNEL_DIR=str(tmp_path), GPULAUNCH_DEVICE_TYPES="meta")
    seen = segment.read(str(tmp_path / "rank-0.bin"))

    assert {name: result for name, result in tapped.items() if result != without[name]} == {}
    assert (tapped.keys(), seen.hooks_unavailable) == (without.keys(), Hook(0)), seen.fault
    assert seen.copies["h2d", "pageable"].count > 5


@pytest.fixture(scope="module")
def compiled_without() -> dict[str, Any]:
    return results_of("compiled_moves.py")


@pytest.mark.parametrize("start", ["forked", "spawned"])
def test_compiled_programs_that_move_tensors_are_left_as_they_are(start, compiled_without, tmp_path):
    """A forked rank may have torch._dynamo before it is armed; a spawned one is armed by torch's own import."""
    segment_writer.create(str(tmp_path / "rank-0.bin"), rank=0, local_rank=0, attempt=0)
    workers.create(str(tmp_path / "workers-0.bin"))
    environ = {"GPULAUNCH_CHANNEL_DIR": str(tmp_path), "GPULAUNCH_DEVICE_TYPES": "meta"}
    if start == "forked":
        observed = results_of("compiled_moves.py", "0", **environ)
    else:
        observed = results_of("compiled_moves.py", RANK="0", **environ)
    seen = segment.read(str(tmp_path / "rank-0.bin"))

    for program in ("moves_inside", "converts_inside", "moves_inside_with_a_default_device"):
        assert compiled_without[program]["graph_breaks"] == {}, "this program shows nothing"
    assert compiled_without["waits_inside"]["graph_breaks"] != {}, "no break: this program shows nothing"
    assert observed == compiled_without
    assert seen.hooks_unavailable == Hook(0), seen.fault
    assert seen.copies["h2d", "pageable"].count > 0
