"""A rank cannot tell that it is not `python -u train.py`: same `__main__`, path, arguments, streams, endings."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

METHODS = ["fork", "spawn"]

LOOK = """
    import json, os, pickle, signal, sys, threading, multiprocessing

    class Mine:
        pass

    def look():
        main = sys.modules["__main__"]
        return {
            "name": __name__,
            "file": __file__,
            "spec": __spec__ and __spec__.name,
            "package": __package__,
            "loader": type(__loader__).__name__,
            "main dict is ours": main.__dict__ is globals(),
            "builtins is a module": type(__builtins__).__name__,
            "argv": sys.argv,
            "orig_argv": sys.orig_argv[1:],
            "path": sys.path,
            "executable": sys.executable,
            "flags": list(sys.flags),
            "stdout": [type(sys.stdout).__name__, sys.stdout.encoding, sys.stdout.errors, sys.stdout.write_through],
            "cwd": os.getcwd(),
            "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "sigpipe": signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN,
            "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "main thread": threading.current_thread() is threading.main_thread(),
            "pickled": pickle.loads(pickle.dumps(Mine())).__class__ is Mine,
            "leads its session": True,
            "multiprocessing": multiprocessing.current_process().name,
            "docs": __doc__,
            "annotations": dict(__annotations__),
            "comm": open("/proc/self/comm").read(),
            "warnings": sys.warnoptions,
        }

    if __name__ == "__main__":
        print("SEEN", json.dumps(look()), flush=True)
"""


# The interpreter that the installed command names: `python`, `python3` and `python3.11` differ to a program.
PYTHON = Path(sysconfig.get_path("scripts"), "gpulaunch").read_text().splitlines()[0].removeprefix("#!")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def seen(text: str) -> dict[str, object]:
    (line,) = [line for line in text.splitlines() if "SEEN " in line]
    found: dict[str, object] = json.loads(line.split("SEEN ")[1])
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["script", "script in a directory", "module", "package", "zip", "directory"])
def test_the_program_sees_what_python_would_have_shown_it(gpulaunch, tmp_path: Path, method: str, kind: str) -> None:
    write(tmp_path / "train.py", LOOK)
    write(tmp_path / "sub/train.py", LOOK)
    write(tmp_path / "pkg/__main__.py", LOOK)
    write(tmp_path / "pkg/__init__.py", "")
    write(tmp_path / "dir/__main__.py", LOOK)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(tmp_path / "dir/__main__.py", "__main__.py")
    program = {
        "script": ["train.py"],
        "script in a directory": ["sub/train.py"],
        "module": ["-m", "train"],
        "package": ["-m", "pkg"],
        "zip": ["app.zip"],
        "directory": ["dir"],
    }[kind]
    arguments = ["--lr", "0.1", "--nproc", "x y"]
    plain = subprocess.run(
        [PYTHON, "-u", *program, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    ended = gpulaunch("--nproc", "1", "--start-method", method, *program, *arguments)

    assert seen(plain.stdout) == seen(ended.stdout)


def both(gpulaunch, method: str, program: Path) -> tuple[subprocess.CompletedProcess[str], object]:
    plain = subprocess.run([PYTHON, "-u", program], cwd=program.parent, capture_output=True, text=True)
    return plain, gpulaunch("--nproc", "1", "--start-method", method, program)


@pytest.mark.parametrize("method", METHODS)
def test_tracebacks_are_the_programs_own(gpulaunch, tmp_path: Path, method: str) -> None:
    plain, ended = both(gpulaunch, method, write(tmp_path / "train.py", "def f():\n    return 1 / 0\nf()\n"))

    log = (ended.run_dir / "attempts/0/rank-0/stderr.log").read_text()
    assert plain.stderr == log


@pytest.mark.parametrize("method", METHODS)
def test_a_syntax_error_is_shown_as_python_shows_it_once(gpulaunch, tmp_path: Path, method: str) -> None:
    plain, ended = both(gpulaunch, method, write(tmp_path / "train.py", "x = = 1\n"))

    log = (ended.run_dir / "attempts/0/rank-0/stderr.log").read_text()
    assert plain.stderr == log
    assert ended.code == 1


@pytest.mark.parametrize("method", METHODS)
def test_what_a_program_leaves_open_is_written_as_at_the_end_of_an_interpreter(
    gpulaunch, tmp_path: Path, method: str
) -> None:
    leaving = """
        import atexit, gzip, os, sys, tempfile, threading, time
        text = open("text", "w"); text.write("no newline, no close")
        raw = open("raw", "wb"); raw.write(b"bytes")
        packed = gzip.open("packed.gz", "wt"); packed.write("packed")
        atexit.register(lambda: open("atexit", "w").write("ran"))
        def late():
            time.sleep(0.3)
            open("thread", "w").write("joined")
        threading.Thread(target=late).start()
        kept = tempfile.TemporaryDirectory(dir=".")
        open("kept", "w").write(kept.name)
        sys.stdout.write("last words")
        import multiprocessing
        sys.exit(3)
    """
    program = write(tmp_path / "train.py", leaving)

    ended = gpulaunch("--nproc", "1", "--start-method", method, program)

    import gzip

    assert ended.code == 3
    assert (tmp_path / "text").read_text() == "no newline, no close"
    assert (tmp_path / "raw").read_bytes() == b"bytes"
    assert gzip.open(tmp_path / "packed.gz", "rt").read() == "packed"
    assert (tmp_path / "atexit").read_text() == "ran"
    assert (tmp_path / "thread").read_text() == "joined"
    assert not (tmp_path / (tmp_path / "kept").read_text()).exists()
    assert "last words" in ended.stdout


@pytest.mark.parametrize("method", METHODS)
def test_multiprocessing_of_every_kind_works_in_a_rank(gpulaunch, tmp_path: Path, method: str) -> None:
    program = """
        import multiprocessing

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            for kind in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(kind).Pool(2) as pool:
                    print(kind, pool.map(double, [1, 2]), flush=True)
    """
    ended = gpulaunch("--nproc", "1", "--start-method", method, write(tmp_path / "train.py", program))

    assert ended.code == 0, ended
    for kind in ("fork", "spawn", "forkserver"):
        assert f"{kind} [2, 4]" in ended.stdout


@pytest.mark.parametrize("method", METHODS)
def test_ranks_have_randomness_of_their_own(gpulaunch, tmp_path: Path, method: str) -> None:
    program = """
        import numpy, random, uuid, tempfile, torch
        print("DRAWN", random.random(), numpy.random.rand(), uuid.uuid4(), torch.initial_seed(), flush=True)
    """
    ended = gpulaunch("--nproc", "2", "--start-method", method, write(tmp_path / "train.py", program))

    draws = [line.split()[2:] for line in ended.stdout.splitlines() if "DRAWN" in line]
    for one, other in zip(*draws, strict=True):
        assert one != other


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_can_be_found_by_the_name_of_its_script(gpulaunch, tmp_path: Path, method: str) -> None:
    """`pkill -f train.py` is how people end stray ranks."""
    program = "print('CMD', open('/proc/self/cmdline').read().split(chr(0)), flush=True)"
    ended = gpulaunch("--nproc", "1", "--start-method", method, write(tmp_path / "train.py", program), "--lr", "1")

    (line,) = [line for line in ended.stdout.splitlines() if "CMD" in line]
    assert "train.py" in line
    if method == "fork":
        assert f"['{PYTHON}', '-u', '{tmp_path}/train.py', '--lr', '1'" in line


@pytest.mark.parametrize("method", METHODS)
def test_keyboard_interrupt_ends_a_rank_by_the_signal_itself(gpulaunch, tmp_path: Path, method: str) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)"
    ended = gpulaunch("--nproc", "1", "--start-method", method, write(tmp_path / "train.py", program))

    assert ended.code == 130
    report = json.loads((ended.run_dir / "attempts/0/failure.json").read_text())
    assert report["ranks"][0]["signal_name"] == "SIGINT"
