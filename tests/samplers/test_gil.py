"""Which samples of a training thread are waits for Python's GIL, and what they are counted for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulaunch.profiler.daemon.stack_samples import StackSamples
from gpulaunch.profiler.record import RankPlace
from gpulaunch.profiler.samplers.gil import is_of_thread, waits_for_thread
from gpulaunch.profiler.samplers.sampled_calls import function_of_thread
from gpulaunch.profiler.stack import Frame

PYTHON = "/usr/lib/python3.11"
PACKAGES = "/home/me/venv/lib/python3.11/site-packages"
PLACE = RankPlace(rank=0, local_rank=0, pid=os.getpid())
STARTED = [
    Frame("Thread.run", f"{PYTHON}/threading.py", 982),
    Frame("Thread._bootstrap_inner", f"{PYTHON}/threading.py", 1045),
    Frame("Thread._bootstrap", f"{PYTHON}/threading.py", 1002),
]
ENCODE = f"{PYTHON}/json/encoder.py:encode"
QUANTILES = Frame("quantiles", f"{PYTHON}/statistics.py", 700)
FETCH = Frame("_MapDatasetFetcher.fetch", f"{PACKAGES}/torch/utils/data/_utils/fetch.py", 52)
PROGRAM = """\
def watch(rewards):
    while True:
        show(rewards)
def show(rewards):
    page.write(statistics.quantiles(rewards))
while True:
    loss.backward()
    json.dump(loss.item(), file)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(PROGRAM)
    return str(tmp_path / "train.py")


def watching(program: str) -> list[Frame]:
    return [QUANTILES, Frame("show", program, 5), Frame("main.<locals>.watch", program, 3), *STARTED]


def test_a_wait_for_the_gil_is_counted_for_the_holder_and_not_for_the_line_that_waits(program: str) -> None:
    samples = StackSamples(Path("/"))
    dump = [Frame("dump", f"{PYTHON}/json/__init__.py", 180), Frame("<module>", program, 8)]
    samples.add(PLACE, "other", dump, False, watching(program))
    samples.add(PLACE, "other", dump, True)

    watch = f"{program} watch"
    assert samples.tally.gil_waits == {
        (0, watch, ""): 1,
        (0, watch, f"{program}:3"): 1,
        (0, watch, f"{program}:5"): 1,
    }
    assert samples.tally.calls[0, f"{program}:5"] == "statistics.quantiles"
    assert samples.tally.calling == {(0, f"{program}:8"): 1}
    assert samples.tally.samples == {0: 2}


@pytest.mark.parametrize(
    ("phase", "inner", "counted"),
    [
        ("forward", None, True),
        ("backward", None, True),
        ("optimizer", None, True),
        ("unsettled", None, True),
        ("data_wait", FETCH, True),
        ("data_wait", Frame("Connection.recv", f"{PYTHON}/multiprocessing/connection.py", 250), False),
        ("data_wait", None, False),
        ("startup", None, False),
        ("validation", None, False),
        ("checkpoint", None, False),
        ("comm", None, False),
        ("other", Frame("Queue.get", f"{PYTHON}/queue.py", 171), False),
        ("other", Frame("Event.wait", f"{PYTHON}/threading.py", 629), False),
        ("other", Frame("Future.result", f"{PYTHON}/concurrent/futures/_base.py", 451), False),
        ("other", Frame("Popen.wait", f"{PYTHON}/subprocess.py", 1264), False),
        ("other", Frame("dump", f"{PYTHON}/json/__init__.py", 180), True),
    ],
)
def test_only_what_computes_for_a_step_waits_for_the_gil(
    program: str, phase: str, inner: Frame | None, counted: bool
) -> None:
    samples = StackSamples(Path("/"))
    stack = [*([inner] if inner else []), Frame("<module>", program, 7)]
    samples.add(PLACE, phase, stack, False, watching(program))

    assert bool(samples.tally.gil_waits) is counted
    assert samples.tally.samples == ({} if phase == "startup" else {0: 1})


def test_a_wait_for_another_thread_is_counted_whoever_has_the_gil(program: str) -> None:
    samples = StackSamples(Path("/"))
    waits = [Frame("Queue.get", f"{PYTHON}/queue.py", 171), Frame("<module>", program, 7)]
    for phase, holder in (("other", ()), ("other", watching(program)), ("validation", ()), ("data_wait", ())):
        samples.add(PLACE, phase, waits, False, holder)

    assert (samples.tally.thread_waits, samples.tally.gil_waits) == ({0: 2}, {})


@pytest.mark.parametrize(
    ("stack", "function"),
    [
        (["train.py:draw", "train.py:Page.run"], ("train.py", "Page.run")),
        ([ENCODE, "train.py:watch", f"{PACKAGES}/apscheduler/job.py:run"], ("train.py", "watch")),
        ([ENCODE, f"{PACKAGES}/tracker/_thread/send.py:Sender.loop"], ("", "tracker.send.loop")),
        ([f"{PYTHON}/logging/handlers.py:QueueListener._monitor"], ("", "logging.handlers._monitor")),
        (["train.py:pin_memory", f"{PACKAGES}/torch/utils/data/_utils/pin_memory.py:do_one_step"], None),
        (["/home/me/lib/python3.11/site-packages/gpulaunch/checkpoint/_saver.py:_write"], None),
        ([], None),
    ],
    ids=["the program's", "called by a package", "a package's", "Python's", "torch's", "ours", "of no function"],
)
def test_a_thread_is_named_by_its_outermost_function(stack: list[str], function: tuple[str, str] | None) -> None:
    frames = [Frame(name, file, 1) for file, _, name in (each.rpartition(":") for each in stack)]

    assert function_of_thread([*frames, *STARTED]) == function


def test_a_stack_that_does_not_end_where_threads_begin_is_torn(program: str) -> None:
    assert is_of_thread(watching(program))
    assert not is_of_thread(watching(program)[:-1])
    assert not is_of_thread([])


def test_a_module_of_the_program_with_the_name_of_one_of_python_is_the_programs() -> None:
    assert waits_for_thread([Frame("get", f"{PYTHON}/queue.py", 1)])
    assert not waits_for_thread([Frame("get", "/home/me/queue.py", 1)])
    assert not waits_for_thread([])
