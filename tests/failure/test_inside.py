"""Toy ranks of a few lines each, as real processes: what does each leave behind, and is its own end unchanged?"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.failure.errors import examine
from gpulaunch.launcher.failure.evidence import read_rank_evidence
from gpulaunch.launcher.failure.inside import exit_status

ARM = "import sys; from gpulaunch.launcher.failure import inside; inside.arm(sys.argv[1])\n"


class Toy:
    """Run a program as a rank whose directory is `where`."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.error_file = where / "error.json"

    def run(self, program: str, *, arm: str = ARM, **options: Any) -> subprocess.CompletedProcess[str]:
        script = self.where / "toy.py"
        script.write_text(arm + program)
        return subprocess.run(
            [sys.executable, str(script), str(self.error_file)], capture_output=True, text=True, timeout=120, **options
        )

    def extra(self) -> dict[str, Any]:
        extra: dict[str, Any] = json.loads(self.error_file.read_text())["message"]["extraInfo"]
        return extra


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def test_a_plain_exception_is_written_in_torchs_layout(toy: Toy) -> None:
    before_ns = time.monotonic_ns()
    done = toy.run("def step():\n    raise ValueError('bad loss')\nstep()\n")

    assert done.returncode == 1
    assert "ValueError: bad loss" in done.stderr, "what the user sees stays"
    document = json.loads(toy.error_file.read_text())
    assert document["message"]["message"] == "ValueError: bad loss"
    extra = document["message"]["extraInfo"]
    assert isinstance(extra["timestamp"], str)
    assert int(extra["timestamp"]) > 1_600_000_000
    assert before_ns < extra["monotonic_ns"] < time.monotonic_ns()
    assert extra["version"] == 1
    assert extra["py_callstack"].startswith("Traceback (most recent call last):\n")
    assert "in step" in extra["py_callstack"]
    assert (toy.error_file.stat().st_mode & 0o777) == 0o600
    leftovers = {path.name for path in toy.where.iterdir()} - {"toy.py", "error.json", "fault.log", "stacks.log"}
    assert leftovers == set()


# As torch's: whenever a child ends, the handler raises, wherever the main thread is. A thread ends one all the time.
SIGCHLD = """
import os, signal, threading, time
def died(*_):
    raise RuntimeError("DataLoader worker is killed by signal: Killed.")
def children():
    while True:
        if os.fork() == 0:
            os._exit(0)
        os.wait()
def deep(n):
    if n:
        deep(n - 1)
    raise ConnectionResetError("of the worker's socket")
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
threading.Thread(target=children, daemon=True).start()
time.sleep(0.05)
signal.signal(signal.SIGCHLD, died)
deep(200)
"""


def test_a_handler_that_raises_at_any_moment_does_not_cost_the_words(toy: Toy) -> None:
    """Seen with a killed dataloader worker: the traceback was empty, because the formatter had been cut off."""
    for _ in range(5):
        toy.error_file.unlink(missing_ok=True)
        toy.run(SIGCHLD)

        assert toy.extra()["py_callstack"].count("in deep") >= 1


def test_a_chain_is_written_whole_and_oldest_first(toy: Toy) -> None:
    toy.run("try:\n    {}['x']\nexcept KeyError as err:\n    raise RuntimeError('no config') from err\n")

    error = examine(str(toy.error_file))[0]

    assert error is not None
    assert error.headline == "RuntimeError: no config"
    assert error.traceback.index("KeyError: 'x'") < error.traceback.index("RuntimeError: no config")


def test_an_exception_group_keeps_its_members(toy: Toy) -> None:
    toy.run("raise ExceptionGroup('two things', [ValueError('a'), TypeError('b')])\n")

    error = examine(str(toy.error_file))[0]

    assert error is not None
    assert error.type == "ExceptionGroup"
    assert "ValueError: a" in error.traceback
    assert "TypeError: b" in error.traceback


# As the launcher's own runner does it: its frames are of this package, and it catches what ends the program.
RUNNER = """
def run(program):
    try:
        exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
    except BaseException as exc:
        inside.write_error_file(exc, sys.argv[1])
        raise SystemExit(inside.exit_status(exc)) from None
"""


def under_the_runner(program: str) -> str:
    return ARM + f"exec(compile({RUNNER!r}, inside.__file__, 'exec'))\nrun({program!r})\n"


def test_a_script_that_does_not_parse_shows_its_line_and_no_frame_of_the_runner(toy: Toy) -> None:
    done = toy.run("", arm=under_the_runner("x = = 1\n"))

    error = examine(str(toy.error_file))[0]

    assert done.returncode == 1
    assert error is not None
    assert error.type == "SyntaxError"
    assert error.traceback.startswith('  File "train.py", line 1\n')


def test_the_traceback_begins_in_the_users_program(toy: Toy) -> None:
    toy.run("", arm=under_the_runner("def step():\n    raise ValueError('x')\nstep()\n"))

    error = examine(str(toy.error_file))[0]

    assert error is not None
    frames = [line for line in error.traceback.splitlines() if line.startswith("  File ")]
    assert frames == ['  File "train.py", line 3, in <module>', '  File "train.py", line 2, in step']


@pytest.mark.parametrize(
    ("program", "code", "headline"),
    [
        ("import sys; sys.exit('no data')", 1, "SystemExit: no data"),
        ("import sys; sys.exit(3)", 3, "SystemExit: 3"),
        ("import sys; sys.exit(256 + 7)", 7, "SystemExit: 263"),
        ("import sys; sys.exit(0)", 0, None),
        ("import sys; sys.exit(None)", 0, None),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_the_runner_hears_every_kind_of_end(toy: Toy, program: str, code: int, headline: str | None) -> None:
    done = toy.run("", arm=under_the_runner(program))

    error = read_rank_evidence(str(toy.where)).error

    assert done.returncode == code
    assert (error and error.headline) == headline


def test_a_plain_sys_exit_leaves_no_error_json_as_with_torchs_record(toy: Toy) -> None:
    for program in ("import sys; sys.exit(3)", "import sys; sys.exit('no data')"):
        toy.run("", arm=under_the_runner(program))

        assert not toy.error_file.exists()

    toy.run("", arm=under_the_runner("raise ValueError('bad loss')"))
    assert toy.error_file.exists(), "an exception is still written"


@pytest.mark.parametrize("code", ["0", "1", "3", "-1", "256", "263", "True", "None", "'text'", "''", "1 << 70", "2.5"])
def test_the_exit_status_is_the_one_that_python_gives(code: str) -> None:
    program = f"import sys; sys.exit({code})"
    python = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode

    with pytest.raises(SystemExit) as caught:
        exec(program)

    assert exit_status(caught.value) == python


def test_os_exit_leaves_nothing_and_keeps_its_code(toy: Toy) -> None:
    done = toy.run("import os; os._exit(3)\n")

    assert done.returncode == 3
    assert not toy.error_file.exists()


@pytest.mark.parametrize(
    ("program", "signum", "words"),
    [
        ("import ctypes; ctypes.string_at(0)", signal.SIGSEGV, "Segmentation fault"),
        ("import os; os.abort()", signal.SIGABRT, "Aborted"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", signal.SIGBUS, "Bus error"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGFPE)", signal.SIGFPE, "Floating"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", signal.SIGILL, "Illegal instruction"),
    ],
)
def test_a_deadly_signal_leaves_the_python_stack(toy: Toy, program: str, signum: int, words: str) -> None:
    done = toy.run(f"def native():\n    {program}\nnative()\n")

    fault = read_rank_evidence(str(toy.where)).fault

    assert done.returncode == -signum
    assert fault is not None
    assert words in fault
    assert "in native" in fault
    assert done.stderr == "", "the stack is in the fault log and not among the user's lines"


def test_a_faulthandler_of_the_users_own_wins(toy: Toy) -> None:
    done = toy.run("import faulthandler, os; faulthandler.enable(); os.abort()\n")

    assert "Fatal Python error: Aborted" in done.stderr
    assert read_rank_evidence(str(toy.where)).fault is None


def test_a_keyboard_interrupt_is_heard_and_python_still_dies_of_it(toy: Toy) -> None:
    done = toy.run("import os, signal; os.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(60)\n")

    error = examine(str(toy.error_file))[0]

    assert done.returncode == -signal.SIGINT
    assert error is not None
    assert error.type == "KeyboardInterrupt"


def test_a_thread_that_raises_is_evidence_and_the_rank_lives(toy: Toy) -> None:
    program = """
import threading
def watch():
    raise OSError("disk is gone")
thread = threading.Thread(target=watch, name="watcher"); thread.start(); thread.join()
print("still here")
"""
    done = toy.run(program)

    assert done.returncode == 0
    assert done.stdout == "still here\n"
    assert "OSError: disk is gone" in done.stderr
    assert not toy.error_file.exists()
    assert read_rank_evidence(str(toy.where)).evidence == ("a thread of this rank had ended by OSError: disk is gone",)


def test_a_later_hook_of_the_users_own_replaces_ours_and_the_runner_still_hears(toy: Toy) -> None:
    later_hook = "sys.excepthook = lambda *args: print('my hook', file=sys.stderr)\nraise ValueError('x')\n"
    done = toy.run(later_hook)
    assert done.stderr == "my hook\n"
    assert not toy.error_file.exists()

    toy.run("", arm=under_the_runner("import sys\n" + later_hook))
    assert toy.error_file.exists()


def test_an_earlier_hook_of_the_users_own_is_still_called(toy: Toy) -> None:
    hook = "import sys; sys.excepthook = lambda *args: print('earlier hook', file=sys.stderr)\n"

    done = toy.run("raise ValueError('x')\n", arm=hook + ARM)

    assert done.stderr == "earlier hook\n"
    assert examine(str(toy.error_file))[0] is not None


def test_the_first_writer_wins(toy: Toy) -> None:
    toy.error_file.write_text('{"message": "mine"}')

    done = toy.run("raise ValueError('x')\n")

    assert done.returncode == 1
    assert toy.error_file.read_text() == '{"message": "mine"}'


def test_an_unwritable_error_file_changes_nothing_for_the_user(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.error_file = tmp_path / "nowhere" / "error.json"

    done = toy.run("raise ValueError('x')\n")

    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: x\n")
    assert "gpulaunch" not in done.stderr


def test_without_an_error_file_there_is_nothing_to_do(toy: Toy) -> None:
    done = toy.run("raise ValueError('x')\n", arm="from gpulaunch.launcher.failure import inside; inside.arm('')\n")

    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: x\n")
    assert [path.name for path in toy.where.iterdir()] == ["toy.py"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "class Odd(Exception):\n    def __str__(self): raise TypeError('no')\nraise Odd\n",
            "<exception str() failed>",
        ),
        ("raise ValueError('\\udcff\\ud800 \\x00 \\x1b[31m')\n", "\udcff\ud800 \x00 \x1b[31m"),
        ("raise ValueError(b'\\xff')\n", "b'\\xff'"),
        ("raise ValueError\n", ""),
        ("a = ValueError('a'); a.__cause__ = a\nraise a\n", "a"),
        ("def f(): f()\nf()\n", "maximum recursion depth exceeded"),
    ],
)
def test_odd_exceptions_are_written_all_the_same(toy: Toy, program: str, message: str) -> None:
    toy.run(program)

    error = examine(str(toy.error_file))[0]

    assert error is not None
    assert error.message == message


def test_a_huge_message_is_capped_and_keeps_its_two_ends(toy: Toy) -> None:
    toy.run("raise ValueError('start' + '\\U0001f600' * 10_000_000 + 'finish')\n")

    error = examine(str(toy.error_file))[0]

    assert toy.error_file.stat().st_size < 1_000_000
    assert error is not None
    assert error.message.startswith("start")
    assert error.message.endswith("finish")


def test_a_rank_that_has_used_up_its_file_descriptors_can_still_speak(toy: Toy) -> None:
    toy.run("import os\nheld = []\nwhile True:\n    held.append(os.open('/dev/null', os.O_RDONLY))\n")

    error = examine(str(toy.error_file))[0]

    assert error is not None
    assert "Too many open files" in error.message


def test_a_child_that_the_user_forked_has_no_say(toy: Toy) -> None:
    done = toy.run("import os\nif os.fork() == 0:\n    raise ValueError('in the child')\nos.wait()\n")

    assert done.returncode == 0
    assert "in the child" in done.stderr
    assert not toy.error_file.exists()


def test_arming_twice_does_no_harm(toy: Toy) -> None:
    done = toy.run("inside.arm(sys.argv[1]); raise ValueError('x')\n")

    assert done.stderr.count("ValueError: x") == 1
    assert examine(str(toy.error_file))[0] is not None


def test_the_module_imports_the_standard_library_only() -> None:
    program = (
        "import sys; from gpulaunch.launcher.failure import inside;"
        "known = sys.stdlib_module_names | {'gpulaunch', '__main__', 'sitecustomize'};"
        "print([name for name in sys.modules if name.partition('.')[0] not in known and not name.startswith('_')])"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, env=_path_env())

    assert done.stdout == "[]\n", done.stderr


def _path_env() -> dict[str, str]:
    import gpulaunch.launcher

    return {"PYTHONPATH": str(Path(gpulaunch.launcher.__path__[0]).parent.parent)}


@pytest.mark.torch
def test_torchs_record_came_first_and_its_own_reader_understands_ours(toy: Toy) -> None:
    """torch's `@record` writes before the exception reaches us; and torch's agent reads what we write."""
    environment = {"TORCHELASTIC_ERROR_FILE": str(toy.error_file), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    program = """
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record
@record
def main():
    raise ValueError("recorded")
try:
    main()
except ValueError as exc:
    inside.write_error_file(exc, sys.argv[1])
    inside.write_error_file(RuntimeError("ours"), sys.argv[1] + ".ours")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=sys.argv[1] + ".ours")
    print(failure.message["message"], failure.timestamp > 0)
"""
    done = toy.run(program, env=environment)

    assert done.stdout == "RuntimeError: ours True\n", done.stderr
    assert "monotonic_ns" not in toy.extra(), "torch's file is untouched"
    error = examine(str(toy.error_file))[0]
    assert error is not None
    assert error.headline == "ValueError: recorded"


@pytest.mark.parametrize("name", ["fault.log", "stacks.log"])
def test_no_stacks_are_written_through_a_link(toy: Toy, name: str) -> None:
    aim = toy.where / "of-somebody"
    aim.write_text("as it was")
    (toy.where / name).symlink_to(aim)

    done = toy.run(
        "import os\n"
        "from gpulaunch.launcher.loop import linux\n"
        "if linux.catches(os.getpid(), inside.STACKS_SIGNAL):\n"
        "    os.kill(os.getpid(), inside.STACKS_SIGNAL)\n"
        "print('goes on', flush=True)\n"
        "os.abort()\n"
    )

    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "goes on\n")
    assert aim.read_text() == "as it was"
