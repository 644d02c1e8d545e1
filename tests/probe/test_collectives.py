"""Collectives, counted by kind and numbered by torch's flight recorder: with stand-ins, and in real programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulaunch.profiler.channel import segment_writer
from gpulaunch.profiler.channel.collectives import (
    CALL,
    CALLS,
    COMPLETED,
    ENQUEUED,
    KINDS,
    READABLE,
    RECORDER,
    SEQUENCE,
    UNREADABLE,
    CollectivesReader,
    CollectivesSnapshot,
    words_of_call,
)
from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.segment import SegmentReader
from gpulaunch.profiler.probe import collectives, facts, gradients, recorder
from gpulaunch.profiler.probe.recorder import Recorder
from gpulaunch.profiler.probe.state import Probe

FSDP = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
RANKS = str(Path(__file__).with_name("ranks.py"))


# --- kinds --------------------------------------------------------------------------------------------------------


def test_every_function_has_a_kind() -> None:
    kinds = {name: collectives.kind_of(name) for name in collectives.COLLECTIVES}

    assert kinds["all_gather_into_tensor"] == kinds["_all_gather_base"] == kinds["all_gather_object"] == "all_gather"
    assert kinds["reduce_scatter_tensor"] == kinds["_reduce_scatter_base"] == "reduce_scatter"
    assert (kinds["reduce"], kinds["monitored_barrier"], kinds["scatter_object_list"]) == (
        "reduce",
        "barrier",
        "scatter",
    )
    assert {*kinds.values(), "wait"} == set(KINDS)


# --- the tap ------------------------------------------------------------------------------------------------------


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    """This thread trains."""
    path = str(tmp_path / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    probe = Probe(segment_writer.SegmentWriter(path), TORCH)
    probe.mark_step()
    return probe


TORCH: Any = SimpleNamespace(
    Tensor=object,
    cuda=SimpleNamespace(is_initialized=lambda: False),
    compiler=SimpleNamespace(is_dynamo_compiling=lambda: False),
)


def no_words() -> list[int]:
    return [0] * 512


def tapped(probe: Probe, words: list[int], original: Callable[[], Any], kind: str = "barrier") -> Callable[[], Any]:
    return collectives.tap_collective(probe, TORCH, collectives.Calls(probe, words), kind, original)


def test_a_call_is_said_before_it_waits(probe: Probe) -> None:
    """So that a rank that never comes back has said it."""
    words, inside = no_words(), no_words()
    counter, running, returned = words_of_call("barrier")

    tapped(probe, words, lambda: inside.__setitem__(slice(None), words))()

    assert (inside[CALL], inside[counter]) == (running, 1)
    assert (words[CALL], words[counter]) == (returned, 1)


def calls_of(
    module: str, probe: Probe, monkeypatch: pytest.MonkeyPatch, *, parameters: list[Any]
) -> tuple[collectives.Calls, dict[str, Any]]:
    """The names of a module that gathers and reduces, and what counts that; an optimizer has the parameters."""
    monkeypatch.setattr(facts, "rank_facts", facts.Facts())
    monkeypatch.setattr(gradients, "optimizers", [SimpleNamespace(param_groups=[{"params": parameters}])])
    calls = collectives.Calls(probe, no_words())
    library: dict[str, Any] = {"__name__": module}
    for kind in ("all_gather", "reduce_scatter"):
        library[kind] = collectives.tap_collective(probe, TORCH, calls, kind, lambda *output: None)
    return calls, library


@pytest.mark.parametrize(("module", "edges", "reductions"), [(FSDP, 4, 4.0), (FSDP, 1, 1.0), ("megatron", 4, None)])
def test_what_fsdp_calls_is_told_in_ratios(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, module: str, edges: int, reductions: float | None
) -> None:
    """Four backward passes for each step of the optimizer, with reductions in so many of them."""
    calls, library = calls_of(module, probe, monkeypatch, parameters=[0, 0, 0])
    library["unit"] = SimpleNamespace(nbytes=512)
    exec("def backward():\n  all_gather(unit)\n  reduce_scatter()", library)
    for backward in range(4):
        probe.writer.words[Word.LAST_EDGE] = min(backward, edges - 1)
        library["backward"]()
    calls.look()
    assert "fsdp" not in facts.rank_facts.known, "no step of an optimizer so far"
    probe.machine.microsteps, probe.machine.optimized = 4, 1
    calls.look()

    told = facts.rank_facts.known.get("fsdp")
    if reductions is None:
        assert told is None
    else:
        assert (told["reductions_per_step"], told["gathers_per_reduction"]) == (reductions, 1.0)
        assert 0.0 < told["seconds_per_reduction"] < 1.0
        assert (told["gathers_per_step"], told["bytes_per_gather"]) == (4.0, 510.0)
        assert 0.0 < told["following_seconds_per_step"] < 1.0
        assert told["parameters_per_unit"] == pytest.approx(3.0 * edges / 4, abs=0.06)


def test_fsdp1_gathers_into_a_list_and_has_one_parameter_for_a_unit(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU; of how many parameters that is made is not known."""
    flat = type("FlatParameter", (), {})()
    calls, library = calls_of("torch.distributed.fsdp._flat_param", probe, monkeypatch, parameters=[flat, flat])
    library["shard"] = SimpleNamespace(nbytes=500)
    exec("def backward():\n  all_gather([shard] * 4, shard)\n  reduce_scatter()", library)
    library["backward"]()
    probe.machine.microsteps = probe.machine.optimized = 1
    calls.look()

    told = facts.rank_facts.known["fsdp"]
    assert (told["bytes_per_gather"], told["parameters_per_unit"]) == (2000.0, 0.0)


def test_a_call_that_fails_is_over_too(probe: Probe) -> None:
    words = no_words()

    with pytest.raises(ZeroDivisionError):
        tapped(probe, words, lambda: 1 // 0)()

    assert words[CALL] == words_of_call("barrier")[2]


def test_what_a_call_calls_itself_is_part_of_it(probe: Probe) -> None:
    words = no_words()
    inner = tapped(probe, words, lambda: None, "all_reduce")

    tapped(probe, words, inner)()

    assert sum(words[CALLS:]) == 1
    assert words[CALL] == words_of_call("barrier")[2]


def test_calls_of_other_threads_are_not_the_training_threads(probe: Probe) -> None:
    words = no_words()
    thread = threading.Thread(target=tapped(probe, words, lambda: None))
    thread.start()
    thread.join()

    assert words == no_words()


@pytest.mark.parametrize(
    ("name", "args", "kind"),
    [
        ("all_reduce", (SimpleNamespace(nbytes=8),), "small_collective"),
        ("all_reduce", (SimpleNamespace(nbytes=1 << 20),), "collective"),
        ("all_gather", ([], SimpleNamespace(nbytes=8)), "small_collective"),
        ("all_gather_object", ([], {"loss": 1.0}), "small_collective"),
        ("barrier", (), "small_collective"),
        ("send", (SimpleNamespace(nbytes=8),), "collective"),
        ("recv_object_list", ([],), "collective"),
    ],
)
def test_a_line_has_small_collectives_if_the_program_calls_them(
    probe: Probe, tmp_path: Path, name: str, args: tuple[Any, ...], kind: str
) -> None:
    """The number of calls matters, not of bytes; but what torch calls, in SyncBatchNorm say, is not the program's."""

    def original(*_args: Any) -> None:
        pass

    original.__name__ = name
    tap = collectives.tap_collective(
        probe, TORCH, collectives.Calls(probe, no_words()), name.split("_obj")[0], original
    )
    of_torch = {"__name__": "torch.nn.modules.batchnorm", "tap": tap}
    exec("def forward(*args): tap(*args)", of_torch)
    function = {"__name__": "torch.autograd.function"}
    exec("def apply(forward): forward()", function)

    tap(*args)
    of_torch["forward"](*args)
    function["apply"](lambda: tap(*args))

    with SegmentReader(str(tmp_path / "rank-0.bin")) as reader:
        found = reader.sites()
    assert [(site.kind, site.count) for site in found] == [(kind, 1), ("collective", 1), ("collective", 1)]


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        ((9216, 64, 9216, 64), {"small_collective": 3, "collective": 1}),  # a loop over parameters
        ((9216, 9216, 9216), {"collective": 3}),  # activations, all of a size
        ((64, 1 << 20, 64), {"small_collective": 2, "collective": 1}),
    ],
)
def test_a_larger_one_is_small_beside_smaller_ones_of_its_line(
    probe: Probe, tmp_path: Path, sizes: tuple[int, ...], kinds: dict[str, int]
) -> None:
    tap = collectives.tap_collective(probe, TORCH, collectives.Calls(probe, no_words()), "all_reduce", lambda _: None)

    for size in sizes:
        tap(SimpleNamespace(nbytes=size))
    tap(SimpleNamespace(nbytes=9216))  # another line

    with SegmentReader(str(tmp_path / "rank-0.bin")) as reader:
        counts = {(site.kind, site.text): site.count for site in reader.sites()}
    first = min(line for _, line in counts)
    assert {kind: count for (kind, line), count in counts.items() if line == first} == kinds
    assert sorted(count for (_, line), count in counts.items() if line != first) == [1]


class Sparse:
    @property
    def nbytes(self) -> int:
        raise RuntimeError("a sparse tensor has no such size")


def test_a_tensor_without_a_size_is_not_small_and_leaves_the_probe_in_service(probe: Probe, tmp_path: Path) -> None:
    tap = collectives.tap_collective(probe, TORCH, collectives.Calls(probe, no_words()), "all_reduce", lambda _: None)

    tap(Sparse())

    with SegmentReader(str(tmp_path / "rank-0.bin")) as reader:
        assert [site.kind for site in reader.sites()] == ["collective"]
        assert not reader.read().hooks_unavailable


def test_the_first_small_collective_of_a_step_is_told_from_those_that_follow(probe: Probe, tmp_path: Path) -> None:
    tap = tapped(probe, no_words(), lambda: time.sleep(0.002))
    for _ in range(3):
        tap()
        tap()
        probe.machine.optimized += 1

    with SegmentReader(str(tmp_path / "rank-0.bin")) as reader:
        blocked_ns, follows_ns = (
            sum(getattr(each, name) for each in reader.sites()) for name in ("blocked_ns", "gpu_ns")
        )
    assert 3 * 2_000_000 <= follows_ns <= blocked_ns - 3 * 2_000_000


def test_where_there_is_no_room_for_the_file_the_steps_are_measured_all_the_same(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("GPULAUNCH_CHANNEL_DIR", str(tmp_path / "nowhere"))

    assert isinstance(collectives.open_words(probe), list)


@pytest.mark.parametrize("left", [True, False])
def test_leaving_all_process_groups_is_told_once_it_is_done(probe: Probe, left: bool) -> None:
    """And leaving one of several is not."""
    told = probe.writer.words
    seen: list[int] = []
    c10d = SimpleNamespace(is_initialized=lambda: not left)
    leave = collectives.tap_leave(probe, c10d, lambda group=None: seen.append(told[Word.LEFT_GROUP_NS]))

    leave(group=None)

    assert seen == [0]
    assert (told[Word.LEFT_GROUP_NS] > 0) is left


# --- the recorder -------------------------------------------------------------------------------------------------


def a_torch(*dumps: Callable[..., bytes], initialized: bool = True) -> Any:
    """A torch with a flight recorder, or two."""
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    native = SimpleNamespace(**dict(zip(names, dumps, strict=False)))
    return SimpleNamespace(
        _C=SimpleNamespace(_distributed_c10d=native),
        distributed=SimpleNamespace(is_initialized=lambda: initialized),
    )


def says(**groups: tuple[int, int]) -> Callable[..., bytes]:
    """A dump of these groups' enqueued and completed collectives."""

    def dump(*, includeCollectives: bool, onlyActive: bool) -> bytes:
        assert not includeCollectives, "all of the recorder is nearly a megabyte"
        status = {
            name.removeprefix("g"): {
                "last_enqueued_collective": str(enqueued),
                "last_started_collective": "-1",
                "last_completed_collective": str(completed),
            }
            for name, (enqueued, completed) in groups.items()
        }
        return json.dumps({"version": "2.10", "pg_status": status}).encode()

    return dump


def test_the_numbers_of_all_groups_and_recorders_are_summed() -> None:
    words = no_words()
    Recorder(a_torch(says(g0=(40, 39), g1=(5, 5)), says(g0=(100, 90), g1=(-1, -1))), words).look()

    assert (words[RECORDER], words[ENQUEUED], words[COMPLETED], words[SEQUENCE]) == (READABLE, 145, 134, 100)


@pytest.mark.parametrize("torch", [a_torch(says()), a_torch(says(g0=(3, 3)), initialized=False)])
def test_nothing_is_said_before_the_first_collective(torch: Any) -> None:
    words = no_words()
    Recorder(torch, words).look()

    assert words == no_words()


@pytest.mark.parametrize("broken", [b"", b"{", b'{"pg_status": {"0": {}}}', b'{"pg_status": 7}'])
def test_a_recorder_of_another_shape_is_asked_once_and_raises_nothing(
    broken: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PAUSE_PER_QUERY", 0)
    asked: list[int] = []

    def dump(**_: bool) -> bytes:
        asked.append(1)
        return broken

    words = no_words()
    asks = Recorder(a_torch(dump), words)
    for _ in range(3):
        asks.look()

    assert words[RECORDER] == UNREADABLE
    assert len(asked) == 1


def test_a_torch_without_a_recorder_is_told() -> None:
    words = no_words()
    Recorder(a_torch(), words).look()

    assert words[RECORDER] == UNREADABLE


def test_an_answer_that_takes_long_is_seldom_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many groups there are, it costs a thousandth of the time."""
    now_ns = 0
    asked_ns: list[int] = []

    def dump(**_: bool) -> bytes:
        nonlocal now_ns
        asked_ns.append(now_ns)
        now_ns += 3_000_000
        return b"{}"

    monkeypatch.setattr("gpulaunch.profiler.probe.recorder.monotonic_ns", lambda: now_ns)
    recorder = Recorder(a_torch(dump), no_words())
    for second in range(10):
        now_ns = max(now_ns, second * 1_000_000_000)
        recorder.look()

    assert asked_ns == [0, 3_000_000_000, 6_000_000_000, 9_000_000_000]


# --- real programs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """One process with torch in it, from which ranks are forked."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}
    command = [sys.executable, RANKS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=outside)
    yield process
    process.communicate(timeout=60)


@pytest.fixture
def run(nursery: subprocess.Popen[str], tmp_path: Path) -> Callable[[str], CollectivesSnapshot]:
    """Run a program of `ranks` to its end and read the file that it leaves."""

    def run_program(program: str) -> CollectivesSnapshot:
        segment_writer.create(str(tmp_path / "rank-3.bin"), rank=3, local_rank=1, attempt=2)
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(f"{program}\t{tmp_path}\t\n")
        nursery.stdin.flush()
        assert nursery.stdout.readline().strip() == "0", (tmp_path / "out").read_text()
        with CollectivesReader(str(tmp_path / "collectives-3.bin")) as reader:
            return reader.read()

    return run_program


@pytest.mark.torch
def test_what_a_program_calls_is_counted_by_kind(run: Callable[[str], CollectivesSnapshot]) -> None:
    """12 steps with a barrier and an all_reduce each; every other one of those is awaited."""
    seen = run("waits_for_others")

    assert seen.attempt == 2
    assert {kind: count for kind, count in zip(KINDS, seen.calls, strict=True) if count} == {
        "all_reduce": 12,
        "barrier": 12,
        "wait": 6,
    }
    assert (seen.last, seen.running) == ("wait", False)


@pytest.mark.torch
def test_what_ddp_begins_by_itself_is_in_the_flight_recorder(run: Callable[[str], CollectivesSnapshot]) -> None:
    """80 steps of more than 20 ms: it is asked at the first edge, and a second later. gloo's are in it, too."""
    seen = run("ddp_waits_for_others")

    assert sum(seen.calls) == 0
    assert seen.recorder == READABLE
    assert seen.sequence == seen.enqueued > 20
    assert seen.enqueued - seen.completed in (0, 1), "asked at the end of a step: gloo may still be entering the last"


@pytest.mark.torch
def test_a_program_of_one_rank_has_nothing_to_say(run: Callable[[str], CollectivesSnapshot]) -> None:
    seen = run("plain")

    assert (seen.recorder, seen.last, sum(seen.calls)) == (0, None, 0)
