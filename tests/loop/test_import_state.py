"""What an import made for its process alone: found whenever it is looked for, and not where it does not matter."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gpulaunch.launcher.loop import import_state


@pytest.fixture
def stamped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module with a text of its own, already imported."""

    def make(text: str):
        (tmp_path / "stamped.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "stamped", raising=False)
        return __import__("stamped")

    return make


@pytest.mark.parametrize("since_s", [100.1, 100.9])
def test_a_time_in_whole_seconds_is_found_at_any_moment_of_the_second(stamped, since_s: float) -> None:
    module = stamped("import time\nSTARTED = 100  # int(time.time())\n")

    assert import_state.find_in_namespace(vars(module), module, (since_s, 100.95), (5.0, 6.0)) == "a time"


@pytest.mark.parametrize("number", [99, 101, 1000])
def test_another_number_is_none(stamped, number: int) -> None:
    module = stamped(f"import time\nLIMIT = {number}\n")

    assert not import_state.find_in_namespace(vars(module), module, (100.1, 100.95), (5.0, 6.0))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import time\nOUT = f'runs/{time.strftime(\"%Y%m%d-%H%M%S\")}'\n", "a time"),
        ("import datetime\nOUT = 'runs/' + str(datetime.datetime.now())\n", "a time"),
        ("import time\nBEGAN = time.monotonic()\n", "a time"),
        ("from time import perf_counter\nBEGAN = perf_counter()\n", "a time"),
        ("import uuid\nRUN_ID = uuid.uuid4().hex[:8] + '0'\n", "a random name"),
        ("import secrets\nRUN_ID = secrets.token_hex(6) + '0'\n", "a random name"),
        ("import uuid\nRUN_ID = 'resnet50'\nuuid.uuid4()\n", ""),
        ("COMMIT = '1a2b3c4d'\n", ""),
    ],
)
def test_names_made_from_a_time_or_at_random_are_found(stamped, text: str, found: str) -> None:
    module = stamped(text)
    now_s, clock_s = time.time(), time.monotonic()

    assert import_state.find_in_namespace(vars(module), module, (now_s - 1, now_s), (clock_s - 1, clock_s)) == found


@pytest.mark.parametrize(
    ("habit", "what"),
    [
        ("import logging\nlogging.basicConfig(level=logging.WARNING)", "the root logger"),
        ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal handlers"),
        ("import multiprocessing\nmultiprocessing.set_start_method('spawn')", "the start method of multiprocessing"),
        ("import sys\nsys.setrecursionlimit(777)", "the recursion limit"),
        ("import sys\nsys.excepthook = print", "sys.excepthook"),
        ("import os\nos.chdir('/')", "the working directory"),
        ("import tempfile\nSCRATCH = tempfile.mkdtemp()", "a temporary file or directory"),
        ("import tempfile\nSCRATCH = tempfile.gettempdir()", ""),
        ("kept = open('trace.csv', 'a')", "the files open for writing"),
        ("kept = open('trace.csv', 'w').close() or open('trace.csv')", ""),
        ("import logging\nlogging.getLogger('mine').addHandler(logging.StreamHandler())", ""),
    ],
)
def test_what_an_import_changes_for_the_whole_process_is_found(tmp_path: Path, habit: str, what: str) -> None:
    (tmp_path / "habit.py").write_text(habit)
    program = """
        import gc, sys, multiprocessing
        from gpulaunch.launcher.loop import import_state
        sys.path.insert(0, "")
        gc.freeze()
        before = import_state.Before()
        import habit
        print("REFUSED", import_state.for_one_process(before))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert what in ended.stdout
    assert (ended.stdout == "REFUSED \n") is (not what)


def test_what_scikit_learn_imports_may_be_shared() -> None:
    """In each of its imports: numpy.f2py, which it imports, keeps the second of its own."""
    program = """
        import gc, logging, time  # logging keeps its own
        import numpy.random
        from gpulaunch.launcher.loop import import_state
        time.sleep(1 - time.time() % 1)  # the imports after it take less than a second
        gc.freeze()
        before = import_state.Before()
        import numpy.f2py
        assert numpy.f2py.rules.generationtime >= int(before.time_s)
        print("REFUSED", import_state.for_one_process(before))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "REFUSED \n"


def test_a_generator_that_was_there_is_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with numpy's, which came meanwhile."""
    monkeypatch.setattr(import_state, "generator_states", lambda: {"random": 1, "torch": 2})
    before = import_state.Before()
    monkeypatch.setattr(import_state, "generator_states", lambda: {"random": 1, "numpy": 3, "torch": 2})
    gc.freeze()
    try:
        assert not import_state.for_one_process(before)
        monkeypatch.setattr(import_state, "generator_states", lambda: {"random": 1, "numpy": 3, "torch": 4})
        assert "seeds, or draws" in import_state.for_one_process(before)
    finally:
        gc.unfreeze()
