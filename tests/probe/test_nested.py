"""What lies inside the phases, with stand-ins for torch: collections, compilations, and who counts as the training
thread meanwhile."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from gpulaunch.profiler.channel import segment, segment_writer
from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.channel.segment import SegmentSnapshot
from gpulaunch.profiler.probe import garbage, observed
from gpulaunch.profiler.probe.account import CHECKPOINT, COMM
from gpulaunch.profiler.probe.garbage import Collections
from gpulaunch.profiler.probe.nested import Compilations
from gpulaunch.profiler.probe.state import Probe

MS = 1_000_000
TORCH = SimpleNamespace(Tensor=object, cuda=SimpleNamespace(is_initialized=lambda: False))


@pytest.fixture
def path(tmp_path) -> str:
    path = str(tmp_path / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    return path


@pytest.fixture
def probe(path) -> Probe:
    """This thread trains; its first step has begun."""
    probe = Probe(segment_writer.SegmentWriter(path), TORCH)
    probe.mark_step()
    return probe


@pytest.fixture
def collected(probe) -> Iterator[Collections]:
    collections = Collections(probe)
    gc.callbacks.append(collections.on_collection)
    yield collections
    gc.callbacks.remove(collections.on_collection)


class Slow:
    """Takes its time to be collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.005)


def end_a_step(probe: Probe, path: str) -> SegmentSnapshot:
    probe.mark_step()
    return segment.read(path)


def in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


# --- garbage ------------------------------------------------------------------------------------------------------


def test_a_collection_is_the_steps_pause(probe, path, collected):
    Slow()
    gc.collect()
    seen = end_a_step(probe, path)

    assert seen.pauses.gc_collections >= 1
    assert 5 * MS <= seen.phase_ns["gc"] <= seen.pauses.gc_ns_total
    assert sum(seen.phase_ns.values()) == seen.step_ns_total


def test_a_collection_of_another_thread_is_counted_but_no_part_of_a_step(probe, path, collected):
    gc.disable()
    try:
        before = end_a_step(probe, path)
        Slow()
        in_a_thread(gc.collect)
        after = end_a_step(probe, path)
    finally:
        gc.enable()

    assert after.pauses.gc_collections == before.pauses.gc_collections + 1
    assert after.pauses.gc_ns_total - before.pauses.gc_ns_total >= 5 * MS
    assert after.phase_ns["gc"] == before.phase_ns["gc"]


def test_a_collection_that_had_begun_before_we_came_is_left_out(probe, path):
    Collections(probe).on_collection("stop", {})

    assert end_a_step(probe, path).pauses.gc_collections == 0


ASKING = """
import gc
from gc import collect
def plainly():
    gc.collect()
def by_name():
    collect()
def late():
    import gc
    (gc
     .collect())
def late_by_name():
    from gc import collect
    collect()
def twice():
    gc.collect(); gc.collect()
"""
NOT_ASKING = """
from types import SimpleNamespace
collect = list
gc = SimpleNamespace(collect=list)
kept = []
def by_itself():
    kept.append(collect(range(9)))
def by_itself_again():
    kept.append(gc.collect(range(9)))
"""


class Full:
    """All generations are collected at whatever is made next; where, is told."""

    def __enter__(self) -> list[str]:
        self.before = gc.get_threshold()
        self.functions: list[str] = []
        gc.callbacks.append(self.told)
        gc.collect()
        gc.freeze()
        gc.collect()  # by itself it comes where a quarter is new since the last one: now there is nothing
        gc.set_threshold(1, 1, 1)
        return self.functions

    def told(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self.functions.append(sys._getframe(1).f_code.co_name)

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self.before)
        gc.unfreeze()
        gc.callbacks.remove(self.told)


def run_of(directory, source: str, name: str = "program.py") -> dict[str, Callable[..., object]]:
    path = directory / name
    path.write_text(source)
    program: dict[str, Callable[..., object]] = {"__name__": "program"}
    exec(compile(source, str(path), "exec"), program)
    return program


def lines_that_ask(path: str, collected: Collections) -> dict[str, int]:
    """Function and line that ask for collections -> how often."""
    collected.look()
    with segment.SegmentReader(path) as reader:
        rows = [row for row in reader.sites() if row.kind == "gc"]
    lines = {row.text.rpartition(":")[2]: row.count for row in rows}
    assert len(lines) == len(rows), "a line has one row"
    return lines


def test_a_line_that_asks_for_a_collection_is_named(probe, path, collected, tmp_path):
    program = run_of(tmp_path, ASKING)
    for name in ("plainly", "by_name", "late", "late_by_name", "twice", "plainly"):
        program[name]()
    expected = {"5 plainly": 2, "7 by_name": 1, "10 late": 1, "14 late_by_name": 1, "16 twice": 2}
    assert lines_that_ask(path, collected) == expected

    for name in ("plainly", "twice"):  # which are known by now
        program[name]()
    assert lines_that_ask(path, collected) == {**expected, "5 plainly": 3, "16 twice": 4}


def test_each_line_that_has_a_package_collect_is_named(probe, path, collected, tmp_path):
    """Once while setting up, and then at every step: the second one is what costs."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    free = run_of(packages, ASKING)["plainly"]
    program = run_of(tmp_path, "def set_up(free):\n    free()\ndef step(free):\n    free()\n", "train.py")
    program["set_up"](free)
    for _ in range(3):
        lines_that_ask(path, collected)
        program["step"](free)

    assert lines_that_ask(path, collected) == {"2 set_up": 1, "4 step": 3}


def test_what_a_signal_handler_raises_while_a_line_is_judged_gets_to_the_program(
    probe, path, collected, tmp_path, monkeypatch
):
    def late(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    def handler(*_: object) -> None:
        raise TimeoutError("the program's own")

    monkeypatch.setattr(garbage, "parsed", late)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        run_of(tmp_path, ASKING)["plainly"]()
        with pytest.raises(TimeoutError, match="the program's own"):
            collected.look()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_collection_that_nobodys_python_has_called_is_no_lines(probe, path, collected, monkeypatch):
    """Of C, in a thread of its own: there is no frame above."""
    monkeypatch.setattr(Probe, "is_training", lambda _: True)
    over = threading.Event()
    gc.callbacks.append(lambda phase, _: phase == "stop" and over.set())
    try:
        _thread.start_new_thread(gc.collect, ())
        assert over.wait(60)
    finally:
        gc.callbacks.pop()

    assert lines_that_ask(path, collected) == {}
    seen = segment.read(path)
    assert (seen.pauses.gc_collections, seen.fault) == (1, "")


def test_our_own_fault_costs_the_lines_and_not_the_steps(probe, path, collected, tmp_path, monkeypatch):
    def breaks() -> None:
        raise RecursionError

    monkeypatch.setattr(garbage, "line_of_user", breaks)
    run_of(tmp_path, ASKING)["plainly"]()

    assert "NESTED: RecursionError" in segment.read(path).fault
    assert end_a_step(probe, path).steps > 0


def test_a_collection_that_comes_by_itself_is_no_lines(probe, path, collected, tmp_path):
    """While something is called that only has the name."""
    program = run_of(tmp_path, NOT_ASKING)
    with Full() as functions:
        for _ in range(200):
            program["by_itself"]()
            program["by_itself_again"]()

    assert {"by_itself", "by_itself_again"} <= set(functions)
    assert {line.split()[1] for line in lines_that_ask(path, collected)} == {"__enter__"}


def test_a_program_without_a_text_is_collected_without_a_line(probe, path, collected):
    exec(compile("import gc\ngc.collect()", "<stdin>", "exec"), {"__name__": "__main__"})

    assert segment.read(path).pauses.gc_collections >= 1
    assert lines_that_ask(path, collected) == {}


def test_a_forked_child_collects_without_a_word(probe, path, collected):
    gc.disable()
    try:
        before = segment.read(path)
        child = os.fork()
        if child == 0:
            probe.off()
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        after = segment.read(path)
    finally:
        gc.enable()

    assert after == before


# --- compilations -------------------------------------------------------------------------------------------------


class Handler:
    """torch._dynamo.callback.callback_handler, as far as it is used."""

    def __init__(self) -> None:
        self.start_callbacks: list[Callable[..., None]] = []
        self.end_callbacks: list[Callable[..., None]] = []

    def register_start_callback(self, callback: Callable[..., None]) -> None:
        self.start_callbacks.append(callback)

    def register_end_callback(self, callback: Callable[..., None]) -> None:
        self.end_callbacks.append(callback)

    def compile(self, inside: Callable[[], object]) -> None:
        for callback in self.start_callbacks:
            callback(SimpleNamespace(compile_id="0/0"))
        inside()
        for callback in self.end_callbacks:
            callback(SimpleNamespace(compile_id="0/0"))


@pytest.fixture
def handler(monkeypatch) -> Handler:
    handler = Handler()
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", SimpleNamespace(callback_handler=handler))
    return handler


def wait_a_little() -> None:
    time.sleep(0.005)


def test_a_compilation_is_the_steps_time_and_what_happens_in_it_passes_unseen(probe, path, handler):
    """The compiler calls autograd itself, to trace it: no backward of the program's."""
    Compilations(probe).look()

    def inside() -> None:
        wait_a_little()
        probe.mark_phase(CHECKPOINT)
        probe.mark_step()

    handler.compile(inside)
    seen = end_a_step(probe, path)

    assert (seen.steps, seen.pauses.compiles) == (2, 1)
    assert 5 * MS <= seen.phase_ns["compile"] <= seen.pauses.compile_ns_total
    assert seen.phase_ns["checkpoint"] == 0


def test_a_compilation_of_another_thread_is_counted_but_no_part_of_a_step(probe, path, handler):
    Compilations(probe).look()
    in_a_thread(lambda: handler.compile(wait_a_little))
    seen = end_a_step(probe, path)

    assert (seen.pauses.compiles, seen.phase_ns["compile"]) == (1, 0)
    assert seen.pauses.compile_ns_total >= 5 * MS


def test_a_backward_compiled_in_autograds_thread_is_what_the_training_thread_waits_for(probe, path, handler):
    Compilations(probe).look()
    now_ns = time.monotonic_ns()
    probe.edge(now_ns, probe.machine.backward_enter(now_ns))
    in_a_thread(lambda: handler.compile(wait_a_little))
    probe.catch_up()
    probe.machine.backward_exit(time.monotonic_ns(), True)
    seen = end_a_step(probe, path)

    assert seen.pauses.compiles == 1
    assert seen.phase_ns["compile"] >= 5 * MS
    assert seen.phase_ns["backward"] > 0


def test_a_compiler_that_was_reset_is_asked_again(probe, path, handler):
    compilations = Compilations(probe)
    compilations.look()
    handler.start_callbacks.clear()
    handler.end_callbacks.clear()
    compilations.look()
    compilations.look()
    handler.compile(wait_a_little)

    assert end_a_step(probe, path).pauses.compiles == 1


def test_a_compiler_is_left_as_it_was(probe, handler):
    compilations = Compilations(probe)
    compilations.look()
    compilations.forget()

    assert (handler.start_callbacks, handler.end_callbacks) == ([], [])


def test_without_a_compiler_there_is_nothing_to_be_told(probe, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.callback", raising=False)
    compilations = Compilations(probe)
    compilations.look()
    compilations.forget()


# --- aside --------------------------------------------------------------------------------------------------------


def test_only_the_training_thread_steps_aside(probe, path):
    others: list[object] = []
    in_a_thread(lambda: others.append(probe.nested()))
    began = probe.nested()
    assert began is not None
    assert probe.nested() is None, "it is inside already"
    wait_a_little()
    own_ns = probe.nested_end(CHECKPOINT, began)
    seen = end_a_step(probe, path)

    assert others == [None]
    assert seen.phase_ns["checkpoint"] == own_ns >= 5 * MS


def test_a_probe_switched_off_meanwhile_stays_off(probe):
    began = probe.nested()
    assert began is not None
    probe.off()

    assert probe.nested_end(CHECKPOINT, began) == 0
    assert not probe.is_training()


def test_the_first_thread_that_reads_a_dataloader_stands_in(path):
    """Its model may be compiled in the first forward, before any backward has told who trains."""
    probe = Probe(segment_writer.SegmentWriter(path), TORCH)
    assert probe.nested() is None
    assert probe.stands_in(time.monotonic_ns())
    began = probe.nested()
    assert began is not None
    assert not probe.stands_in(time.monotonic_ns()), "a batch that the compiler reads is not the program's"
    probe.nested_end(CHECKPOINT, began)

    assert probe.stands_in(time.monotonic_ns())


# --- once a second ------------------------------------------------------------------------------------------------


def test_what_fails_once_a_second_is_not_tried_again(path, monkeypatch):
    monkeypatch.setattr(observed, "LOOKS_EVERY_NS", 0)
    tried: list[str] = []

    def fails() -> None:
        tried.append("fails")
        raise OSError("no such thing")

    probe = Probe(segment_writer.SegmentWriter(path), TORCH)
    probe.armed(Hook.NESTED)
    probe.each_second(Hook.NESTED, fails)
    probe.each_second(Hook.FACTS, lambda: tried.append("works"))
    cease = probe.each_second(Hook.FACTS, lambda: tried.append("ceased"))
    cease()
    cease()
    probe.mark_step()
    probe.mark_step()
    seen = segment.read(path)

    assert tried[:3] == ["fails", "works", "works"]
    assert {*tried[3:]} <= {"works"}
    assert seen.hooks_unavailable == Hook.NESTED
    assert "no such thing" in seen.fault


def test_any_number_of_them_may_lie_between_two_edges(probe, path):
    """A rollout, a generation: thousands of waits and not one edge."""
    now_ns = time.monotonic_ns()
    probe.edge(now_ns, probe.machine.backward_enter(now_ns))
    waited_ns = 0
    for _ in range(5_000):
        waited_ns += probe.nested_end(COMM, probe.nested())
    probe.catch_up()
    probe.machine.backward_exit(time.monotonic_ns(), True)
    seen = end_a_step(probe, path)

    assert seen.phase_ns["comm"] == waited_ns > 0
