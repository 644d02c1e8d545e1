"""Stacks read out of the memory of other processes, with py-spy as the witness."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import inspect
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers import peek, pylayout
from gpulaunch.profiler.samplers.peek import Peek
from gpulaunch.profiler.samplers.pylayout import LayoutError, find_layout, lines_of, read_memory
from gpulaunch.profiler.samplers.pyspy import Look, PySpy

READY = """
import os, sys, threading, time
def stay():
    print("ready", flush=True)
    time.sleep(600)
"""
PROGRAMS = {
    "plain": "stay()",
    "method": "class A:\n  def f(self):\n    return (lambda: stay())()\nA().f()",
    "called by C": "sorted([1, 2], key=lambda each: stay())",
    "generator": "def numbers():\n  yield 1\n  stay()\nlist(numbers())",
    "comprehension": "[stay() for _ in range(3)]",
    "asynchronous": "import asyncio\nasync def main():\n  await asyncio.sleep(0)\n  stay()\nasyncio.run(main())",
    "made at run time": "exec(compile('\\n' * 300 + 'def f():\\n  stay()\\nf()', 'made.py', 'exec'))",
    "long lines": "def f():\n  x = [\n" + "    0,\n" * 3000 + "  ]\n  stay()\nf()",
    "recursive": "def f(n):\n  f(n - 1) if n else stay()\nsys.setrecursionlimit(2000)\nf(900)",
    "one of many threads": (
        "for _ in range(40):\n  threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\nstay()"
    ),
    "importing": "sys.meta_path.insert(0, type('F', (), {'find_spec': lambda *a: stay()}))\nimport nothing",
    "a fork": "if pid := os.fork():\n  os.waitpid(pid, 0)\nelse:\n  stay()",
}
Start = Callable[..., int]


@dataclasses.dataclass
class EmptySampler:
    """A sampler that gives nothing, and notes who it was asked for."""

    missing: str = "nobody: not there"
    asked: list[int] = dataclasses.field(default_factory=list)
    name: str = "nobody"

    def absent(self) -> str:
        return self.missing

    def look(self, pid: int) -> Look:
        self.asked.append(pid)
        return Look(failed="nobody: asked")


@pytest.fixture
def start(census: None) -> Iterator[Start]:
    """Start a program and give its pid when it has said that it is ready; it is ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def one(*argv: str) -> int:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield one
    for process in started:
        with process:
            os.killpg(process.pid, signal.SIGKILL)


def python(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", READY + program


def where(look: Look) -> list[str]:
    return [frame.name for frame in look.frames]


# -- what it reads


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_it_reads_what_pyspy_reads(start: Start, program: str) -> None:
    own = Peek(EmptySampler())
    pid = start(*python(program))
    (child,) = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] or [pid]

    until_s = time.monotonic() + 10.0
    # "ready" is said a line before the one where it stays.
    while (look := own.look(child)).frames != PySpy().look(child).frames and time.monotonic() < until_s:
        time.sleep(0.05)

    assert look.failed == ""
    assert look.frames[0].name == "stay"
    assert look.frames == PySpy().look(child).frames
    assert own.look(child) == look  # from what it remembers


@pytest.mark.parametrize(
    ("program", "held"),
    [
        ("print('ready', flush=True)\nwhile True: sum(range(1000))", 1.0),
        ("stay()", 0.0),
        ("import zlib\nmuch = bytes(1 << 24)\nprint('ready', flush=True)\nwhile True: zlib.crc32(much)", 0.0),
        ("threading.Thread(target=stay, daemon=True).start()\nwhile True: sum(range(1000))", 1.0),
        ("print('ready', flush=True)\nthreading.Thread(target=sum, args=[iter(int, 1)]).start()\nstay()", 0.0),
    ],
    ids=["Python", "sleeps", "C without the GIL", "beside a thread that sleeps", "sleeps beside a thread of Python"],
)
def test_it_knows_whether_the_main_thread_holds_the_gil(start: Start, program: str, held: float) -> None:
    pid = start(*python(program))
    own = Peek(EmptySampler())
    looks: list[bool | None] = []
    for _ in range(30):
        time.sleep(0.01)
        looks.append(own.look(pid).holds_gil)

    assert looks.count(True) / len(looks) == pytest.approx(held, abs=0.1)
    assert PySpy().look(pid).holds_gil is bool(held)


READY_TO_TRAIN = """
import os, sys, threading, time, zlib
def ready():
    print("ready", flush=True)
def watch():
    while True:
        of_a_page()
def of_a_page():
    return sum(each * each for each in range(20000))
def train(much=bytes(1 << 20)):
    ready()
    while True:
        zlib.crc32(much)
"""
WRITES = "def writes():\n  while True:\n    open(os.devnull, 'w').write('well')\n    time.sleep(0.2)\n"
WATCHED = "threading.Thread(target=watch, daemon=True).start()\n"


def holders(start: Start, program: str) -> Iterator[list[str]]:
    """What looks at a program tell of the thread that it waits for, the names of its frames; nothing if it does not."""
    pid = start(sys.executable, "-c", READY_TO_TRAIN + program)
    own = Peek(EmptySampler())
    while True:
        time.sleep(0.01)
        yield [frame.name for frame in own.look(pid).gil_holder]


def test_the_thread_that_keeps_the_gil_is_read_while_the_main_thread_waits_for_it(start: Start) -> None:
    """What releases the GIL for a fraction of a millisecond gets it back after five."""
    found: list[list[str]] = []
    until_s = time.monotonic() + 60.0
    for frames in holders(start, f"{WATCHED}train()"):
        found += [frames] if frames else []
        assert time.monotonic() < until_s, found
        if len(found) == 30:
            break

    ends = {tuple(frames[-4:]) for frames in found}
    assert ends == {("watch", "Thread.run", "Thread._bootstrap_inner", "Thread._bootstrap")}
    assert sum("of_a_page" in frames for frames in found) > 20


@pytest.mark.parametrize(
    "program",
    [
        f"{WATCHED}ready()\ntime.sleep(600)",
        f"{WATCHED}lock = threading.Lock()\nlock.acquire()\nready()\nlock.acquire()",
        f"{WATCHED}reads, _ = os.pipe()\nready()\nos.read(reads, 1)",
        "threading.Thread(target=time.sleep, args=[600], daemon=True).start()\ntrain()",
        f"{WRITES}threading.Thread(target=writes, daemon=True).start()\ntrain()",
        "train()",
    ],
    ids=[
        *("sleeps", "waits for a lock", "waits for a pipe", "beside a thread that sleeps", "beside one that writes"),
        "alone",
    ],
)
def test_a_main_thread_that_does_not_wait_for_the_gil_has_no_holder(start: Start, program: str) -> None:
    """Between its sleeps and its writes a thread holds the GIL for microseconds."""
    assert sum(map(bool, islice(holders(start, program), 60))) <= 3


def test_without_the_kernels_word_no_thread_is_said_to_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int, gil: int) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(peek, "waits_for_gil", forbidden)

    assert not any(islice(holders(start, f"{WATCHED}train()"), 40))


def test_a_process_that_never_stands_still_is_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stack is one that there can be; hardly any is torn beyond repair. And it is read again at once: while the
    interpreter is looked for, the process gets elsewhere, and what it does most is seen least."""
    searched: list[int] = []
    paused: list[float] = []
    monkeypatch.setattr(peek, "base_of", lambda pid, mapped: searched.append(pid) or pylayout.base_of(pid, mapped))
    monkeypatch.setattr(peek, "time", types.SimpleNamespace(sleep=lambda s: paused.append(s) or time.sleep(s)))
    calls = "def a(n):\n  return b(n) + 1\ndef b(n):\n  return c(n) + 1\ndef c(n):\n  return sum(map(d, range(n)))\n"
    pid = start(*python(f"{calls}def d(n):\n  return n * n\nprint('ready', flush=True)\nwhile True:\n  a(5)"))
    own = Peek(EmptySampler())
    looks = [own.look(pid) for _ in range(500)]

    stacks = {tuple(reversed(where(look))) for look in looks if look.frames}
    assert stacks <= {("<module>", "a", "b", "c", "d")[:depth] for depth in range(1, 6)}
    assert len(stacks) >= 2
    assert sum(not look.frames for look in looks) < 10
    assert len(searched) <= 2 + len(paused)  # itself, the other; and one that may have become another program


def test_a_generator_that_has_just_yielded_is_seldom_the_end_of_a_stack(start: Start) -> None:
    """Its frame has no caller then. What writes JSON goes through generators within generators."""
    writes = "import io, json\nthings = [{'a': n, 'b': [n]} for n in range(9)]\nprint('ready', flush=True)\n"
    pid = start(*python(f"{writes}while True:\n  json.dump(things, io.StringIO())"))
    other = EmptySampler(missing="")
    own = Peek(other)
    looks = [own.look(pid) for _ in range(500)]

    stacks = [where(look) for look in looks if look.frames]
    torn = [stack for stack in stacks if stack[-1] != "<module>"]
    assert len(torn) < 50, torn  # the first of each generator, of which no caller was seen yet; else about 240
    assert sum("_iterencode_dict" in name for stack in stacks for name in stack) > 5
    without = sum(not look.frames for look in looks)
    assert without < 50
    # From the third look in a row on that gives nothing; and at once, seldom, after one that followed a lost pointer.
    assert len(other.asked) <= without / 2 + 3


def test_a_stopped_process_is_read(start: Start) -> None:
    pid = start(*python("stay()"))
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)

    assert where(Peek(EmptySampler()).look(pid)) == ["stay", "<module>"]


def test_it_can_read_itself() -> None:
    """The main thread, from another one."""
    looks: list[Look] = []
    own = Peek(EmptySampler())
    assert own.absent() == ""
    thread = threading.Thread(target=lambda: looks.append(own.look(os.getpid())))
    thread.start()
    thread.join()

    assert "test_it_can_read_itself" in where(looks[0])


# -- what it leaves to others


def test_another_program_is_left_to_the_other(start: Start) -> None:
    other = EmptySampler(missing="")
    pid = start("sh", "-c", "echo ready; exec sleep 600")

    assert Peek(other).look(pid) == Look(failed="nobody: asked")
    assert other.asked == [pid]


def test_a_process_that_becomes_another_program_is_noticed(start: Start, tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    again = [
        sys.executable,
        "-c",
        f"import time\ndef later():\n  open({fifo!r}, 'w').close()\n  time.sleep(600)\nlater()",
    ]
    pid = start(*python(f"print('ready', flush=True)\nopen({fifo!r}).close()\nos.execv({again[0]!r}, {again!r})"))
    own = Peek(EmptySampler())

    assert where(own.look(pid)) == ["<module>"]
    open(fifo, "wb").close()  # it goes on
    open(fifo, "rb").close()  # it is there
    assert where(own.look(pid)) == ["later", "<module>"]


def test_names_that_are_not_ascii_are_left_to_the_other(start: Start) -> None:
    pid = start(*python("def gew\u00f6hnlich():\n  stay()\ngew\u00f6hnlich()"))

    assert where(Peek().look(pid)) == ["stay", "gew\u00f6hnlich", "<module>"]
    assert Peek(EmptySampler(missing="")).look(pid).failed == "nobody: asked"


def test_where_the_other_is_missing_our_own_reason_is_told(start: Start) -> None:
    pid = start("sh", "-c", "echo ready; exec sleep 600")

    assert Peek(EmptySampler()).look(pid).failed == "own reader: it does not run the same Python"


def test_a_process_that_has_ended_is_no_failure() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()

    assert Peek(EmptySampler()).look(ended.pid) == Look()
    assert Peek().look(ended.pid).failed == ""


@pytest.mark.root
def test_where_ptrace_is_forbidden_the_reason_says_so(start: Start) -> None:
    pid = start(*python("stay()"))
    answers, tell = os.pipe()
    nobody = os.fork()
    if nobody == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.write(tell, Peek(EmptySampler()).look(pid).failed.encode())
        os._exit(0)
    os.close(tell)
    with os.fdopen(answers) as pipe:
        said = pipe.read()
    os.waitpid(nobody, 0)

    assert said in ("own reader: Permission denied", "own reader: Operation not permitted")


# -- whether it is to be believed


def test_the_layout_of_this_python_is_found_and_believed() -> None:
    own = Peek(EmptySampler())

    assert (own.absent(), own.name) == ("", "own reader")


LAYOUT = find_layout()


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(LAYOUT) if each.name not in ("none", "gil")])
def test_an_offset_that_is_wrong_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is not believed, and the other is asked. `none` is used from 3.13 on only; `gil` is not of a stack."""
    right = getattr(LAYOUT, name)
    wrong = "00:00 0" if name == "mapped" else (right[0] + 64, *right[1:]) if name == "current" else right + 64
    monkeypatch.setattr(peek, "find_layout", lambda: replace(LAYOUT, **{name: wrong}))
    monkeypatch.setattr(peek, "CHECKS", 3)
    own = Peek(EmptySampler())

    assert (own.absent(), own.name) == ("nobody: not there", "nobody")


def test_a_python_that_is_made_differently_is_left_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> None:
        raise LayoutError("it is made of glass")

    monkeypatch.setattr(peek, "find_layout", refuses)
    own = Peek(EmptySampler(missing=""))

    assert (own.absent(), own.name, own.look(1)) == ("", "nobody", Look(failed="nobody: asked"))


class OtherApi(ctypes.PyDLL):
    """Python's C API with some other functions."""

    def __init__(self, others: dict[str, Callable[[], Any]]) -> None:
        super().__init__(None)
        self.others = others

    def __getitem__(self, name: str) -> Any:
        return self.others[name]() if name in self.others else super().__getitem__(name)


@pytest.mark.parametrize("name", ["PyInterpreterState_Main", "PyInterpreterState_ThreadHead", "PyThreadState_Next"])
def test_a_function_that_this_python_has_not_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pylayout, "TRIES", 2)
    monkeypatch.setattr(ctypes, "pythonapi", OtherApi({name: lambda: ctypes.PyDLL(None)["Py_NotThere"]}))

    with pytest.raises(LayoutError, match="Py_NotThere"):
        find_layout()


def test_what_is_found_nowhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No word of a thread's is this: a small number may be one of its counters, and no address has the high bits."""
    nowhere = 0x5EED_5EED_5EED_5EED
    monkeypatch.setattr(pylayout, "TRIES", 2)
    monkeypatch.setattr(ctypes, "pythonapi", OtherApi({"PyThreadState_Next": lambda: lambda *_: nowhere}))

    with pytest.raises(LayoutError, match="it has something elsewhere"):
        find_layout()


# -- garbage


@given(st.integers(0, 1 << 32), st.sampled_from([0, 1, 8]))
def test_memory_of_any_content_ends_in_a_look(seed: int, alive: int) -> None:
    """Every word is garbage; with `alive`, one in so many leads to memory that there is."""
    chance = random.Random(seed)
    reads = 0

    def garbage(pid: int, address: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        if alive and chance.randrange(alive):
            raise OSError(14, "Bad address")
        return chance.randbytes(size)

    own = Peek(EmptySampler())
    own.absent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peek, "read_memory", garbage)
        patch.setattr(peek, "base_of", lambda pid, mapped: 1 << 40)
        look = own.look(os.getpid())

    assert look.failed.startswith("own reader: ")
    assert reads < 100_000


def test_a_stack_that_leads_back_to_itself_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torn memory may hold a circle: here every frame is its own caller."""
    layout = replace(LAYOUT)
    monkeypatch.setattr(peek, "find_layout", lambda: layout)
    own = Peek(EmptySampler())
    assert own.absent() == ""
    pid = start(*python("stay()"))
    object.__setattr__(layout, "frame_previous", LAYOUT.frame_code)  # after it has been found to be right

    look = own.look(pid)

    assert len(look.frames) <= 2000


# -- lines


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


@pytest.mark.parametrize("module", [argparse, dataclasses, inspect, typing], ids=lambda module: module.__name__)
def test_the_table_of_lines_is_read_as_python_reads_it(module: types.ModuleType) -> None:
    source = Path(module.__file__ or "").read_text()
    compared = 0
    for code in codes_of(compile(source, "x", "exec")):
        python_says = {offset: line for start, end, line in code.co_lines() for offset in range(start, end, 2)}
        ours: dict[int, int | None] = {}
        for end, line in lines_of(code.co_linetable, code.co_firstlineno):
            ours.update(dict.fromkeys(range(max(ours, default=-2) + 2, end, 2), line))
        assert ours == python_says
        compared += len(ours)

    assert compared > 1000


@given(st.binary(), st.integers(0, 1 << 31))
def test_any_table_of_lines_comes_to_its_end(table: bytes, first: int) -> None:
    assert len(list(lines_of(table, first))) <= len(table)


# -- memory


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad address"):
        read_memory(os.getpid(), 8, 8)
    with pytest.raises(OSError, match="No such process"):
        read_memory(2**22 - 7, 8, 8)
