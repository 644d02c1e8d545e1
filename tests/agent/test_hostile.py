"""Programs and surroundings that a launcher meets in real life and did not expect. Each was a fault once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shelve
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

METHODS = ["fork", "spawn"]
COMMAND = Path(sysconfig.get_path("scripts"), "gpulaunch")
TORCH = pytest.mark.torch


def script(path: Path, text: str, name: str = "train.py") -> Path:
    file = path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))
    return file


def wait_until(condition, what: str) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.02)


# --- what a program may count on


@TORCH
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["spawn", "forkserver"])
def test_a_child_process_hands_back_objects_of_the_scripts_own_classes(
    gpulaunch, tmp_path: Path, method: str, kind: str
) -> None:
    program = f"""
        import multiprocessing
        class Mine:
            pass
        def make(_):
            return Mine()
        if __name__ == "__main__":
            with multiprocessing.get_context("{kind}").Pool(1) as pool:
                print("GOT", type(pool.map(make, [1])[0]) is Mine)
    """
    ended = gpulaunch("--nproc", "1", "--start-method", method, script(tmp_path, program))

    assert "GOT True" in ended.stdout, ended


@TORCH
def test_what_a_script_sets_before_it_imports_torch_is_in_force(gpulaunch, tmp_path: Path) -> None:
    program = """
        import os
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        os.environ.update({"OMP_NUM_THREADS": "2", "MY_OWN": "x"})
        import torch.distributed
        print("LEVEL", torch.distributed.get_debug_level().name, torch.get_num_threads(), os.environ["MY_OWN"])
    """
    ended = gpulaunch("--nproc", "2", script(tmp_path, program))

    assert ended.stdout.count("LEVEL DETAIL 2 x") == 2, ended
    assert "not forked" not in ended.stderr


@TORCH
def test_what_a_script_computes_before_it_imports_torch_is_in_force_too(gpulaunch, tmp_path: Path) -> None:
    program = """
        import os
        os.environ["OMP_NUM_THREADS"] = str(1 + 1)
        import torch
        print("THREADS", torch.get_num_threads())
    """
    ended = gpulaunch("--nproc", "2", script(tmp_path, program))

    assert ended.stdout.count("THREADS 2") == 2, ended
    assert "not forked: the script computes os.environ['OMP_NUM_THREADS']" in ended.stderr


@TORCH
@pytest.mark.parametrize("method", METHODS)
def test_modules_beside_the_script_win_over_what_torch_has_loaded(gpulaunch, tmp_path: Path, method: str) -> None:
    for name in ("profile", "statistics", "joblib"):
        script(tmp_path, "MINE = True", f"{name}.py")
    program = "import torch, profile, statistics, joblib\nprint('MINE', profile.MINE, statistics.MINE, joblib.MINE)"
    ended = gpulaunch("--nproc", "1", "--start-method", method, script(tmp_path, program))

    # torch itself may trip over such a neighbour when it is imported by the rank: then it is the user's own to rename.
    if method == "fork":
        assert "MINE True True True" in ended.stdout, ended


@TORCH
def test_what_a_script_puts_on_its_path_wins_over_what_is_installed(gpulaunch, tmp_path: Path) -> None:
    script(tmp_path, "MINE = True", "vendor/joblib/__init__.py")
    program = """
        import os, sys
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "vendor"))
        import joblib
        print("MINE", joblib.MINE)
    """
    assert "MINE True" in gpulaunch("--nproc", "1", script(tmp_path, program)).stdout


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_program_still_finishes(gpulaunch, tmp_path: Path, method: str) -> None:
    program = """
        import atexit, time
        kept = open("kept", "w")
        kept.write("metrics so far")
        atexit.register(print, "ATEXIT")
        print("READY", flush=True)
        time.sleep(600)
    """
    run = gpulaunch.start("--nproc", "1", "--start-method", method, script(tmp_path, program))
    run.wait_for("READY")
    run.signal(signal.SIGINT)
    ended = run.wait()

    assert ended.code == 130
    assert "ATEXIT" in ended.stdout
    assert (tmp_path / "kept").read_text() == "metrics so far"


@pytest.mark.parametrize("method", METHODS)
def test_a_daemon_thread_says_nothing_as_its_program_is_freed(gpulaunch, tmp_path: Path, method: str) -> None:
    program = """
        import threading, time

        counts = []
        def count(item):
            counts.append(item)
        class Keeper:
            def __del__(self, sleep=time.sleep):
                sleep(0.5)
                print("freed", flush=True)
        keeper = Keeper()
        import timer
        threading.Thread(target=timer.run, args=(count,), daemon=True).start()
    """
    (tmp_path / "timer.py").write_text(
        "import time\ndef run(call):\n    while True:\n        call(time.time())\n        time.sleep(0.01)\n"
    )

    ended = gpulaunch("--nproc", "1", "--start-method", method, script(tmp_path, program))

    assert (ended.code, ended.stdout) == (0, "freed\n")
    assert "Error" not in ended.stderr


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_destructor_completes_is_complete(gpulaunch, tmp_path: Path, method: str, frozen: bool) -> None:
    """However deep it is held: in a cycle, beside a model in DDP, in a module of its own; it may use the globals."""
    (tmp_path / "journal.py").write_text("kept = []")
    program = """
        import gc, os, shelve, sys, tempfile, zipfile
        import torch, journal
        import torch.distributed as dist

        class Archive:
            def __init__(self, name):
                self.file = zipfile.ZipFile(name, "w")
                self.file.writestr("x", "hello")

        class Log:
            def __init__(self):
                self.file = open("log", "w")
            def __del__(self):
                self.file.write("the end")

        DIRECTORY, settings = ".", {"prefix": "scratch"}

        def path(name):
            return os.path.join(DIRECTORY, name)

        class Scratch:
            def __init__(self, name):
                self.name = name
                open(path(self.name), "w").close()
            def __del__(self):
                os.remove(path(self.name))

        class Last(Scratch):
            def __del__(self):
                super().__del__()
                assert settings["prefix"] in self.name

        class Net(torch.nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
                self.archive = Archive("net.zip")

        class Trainer:
            def __init__(self):
                self.itself = self
                self.model = torch.nn.parallel.DistributedDataParallel(Net())
                self.archive, self.log, self.file = Archive("trainer.zip"), Log(), Scratch("scratch-of-trainer")
                self.results = shelve.open("results", writeback=True)
                self.results["losses"] = []
                self.scratch = tempfile.NamedTemporaryFile(dir=".", prefix="scratch")
            def train(self):
                self.model(torch.ones(4)).sum().backward()
                self.results["losses"].append(1.5)

        def main():
            mine = Archive("local.zip")
            sys.exit(0)

        dist.init_process_group("gloo")
        journal.kept.append(Archive("journal.zip"))
        trainer, scratch = Trainer(), Last("scratch-of-program")
        trainer.train()
        dist.destroy_process_group()
        if FREEZE:
            gc.freeze()
        main()
    """
    program = program.replace("FREEZE", str(frozen))

    ended = gpulaunch("--nproc", "1", "--start-method", method, script(tmp_path, program))

    assert ended.code == 0, ended
    assert "Error" not in ended.stderr
    for name in ("net", "trainer", "local", "journal"):
        with zipfile.ZipFile(tmp_path / f"{name}.zip") as archive:
            assert archive.read("x") == b"hello", name
    with shelve.open(tmp_path / "results", "r") as results:
        assert results["losses"] == [1.5]
    assert (tmp_path / "log").read_text() == "the end"
    assert not list(tmp_path.glob("scratch*"))


@pytest.mark.parametrize("method", METHODS)
def test_the_exit_code_is_the_exceptions_though_the_rank_was_stopped_before_its_end(
    gpulaunch, tmp_path: Path, method: str
) -> None:
    """Its clean-up took longer than the next rank's failure: 143 would read as a preemption."""
    program = """
        import atexit, os, time
        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 60)
            raise ValueError("first")
        while not os.path.exists("go"):
            time.sleep(0.01)
        raise ValueError("second")
    """
    run = gpulaunch.start("--nproc", "2", "--start-method", method, script(tmp_path, program))
    wait_until(lambda: list(tmp_path.glob("gpulaunch-runs/*/attempts/0/rank-1/error.json")), "rank 1 has raised")
    (tmp_path / "go").touch()
    ended = run.wait()

    assert ended.code == 1, ended
    assert json.loads((ended.run_dir / "attempts/0/failure.json").read_text())["first"]["rank"] == 1


def test_an_excepthook_decides_the_exit_code(gpulaunch, tmp_path: Path) -> None:
    program = """
        import sys
        def hook(*_):
            print("HOOK", flush=True)
            sys.exit(7)
        sys.excepthook = hook
        raise ValueError("x")
    """
    ended = gpulaunch("--nproc", "1", "--start-method", "spawn", script(tmp_path, program))

    assert ended.code == 7
    assert ended.stdout.count("HOOK") == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_program_that_closes_all_descriptors_still_has_last_words(gpulaunch, tmp_path: Path, method: str) -> None:
    program = """
        import atexit, os
        os.closerange(3, 4096)
        precious = os.open("precious", os.O_CREAT | os.O_WRONLY)
        atexit.register(os.write, precious, b"kept")
        raise ValueError("after closing")
    """
    ended = gpulaunch("--nproc", "1", "--start-method", method, script(tmp_path, program))

    report = json.loads((ended.run_dir / "attempts/0/failure.json").read_text())
    assert report["ranks"][0]["error"]["message"] == "ValueError: after closing" or (
        report["ranks"][0]["error"]["message"] == "after closing"
    )
    assert (tmp_path / "precious").read_bytes() == b"kept"


def test_ranks_inherit_no_descriptors_of_the_launchers_caller(tmp_path: Path) -> None:
    program = script(tmp_path, "import os; print('FDS', sorted(map(int, os.listdir('/proc/self/fd')))[:-1])")
    with open(os.devnull) as leaked:
        os.set_inheritable(leaked.fileno(), True)
        said = subprocess.run(
            [COMMAND, "--no-profile", "--start-method", "spawn", program],
            cwd=tmp_path, close_fds=False, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    # Those above are the rank's own: faulthandler's two logs and the spare for last words.
    assert "FDS [0, 1, 2, 3, 4, 5]" in said


# --- surroundings


@TORCH
@pytest.mark.parametrize("method", ["auto", "spawn"])
def test_a_fork_server_that_cannot_live_costs_the_warm_start_and_not_the_job(
    gpulaunch, tmp_path: Path, method: str
) -> None:
    """As if the kernel killed it for its memory: ranks must not wait for a store that never comes."""
    script(
        tmp_path,
        """
        import os, sys
        if any("forkserver_main" in argument for argument in sys.orig_argv):
            os.kill(os.getpid(), 9)
        """,
        "site/sitecustomize.py",
    )
    program = """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print("MET")
    """
    ended = gpulaunch(
        "--nproc", "2", "--start-method", method, "--max-restarts", "1", script(tmp_path, program),
        env={"PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip

    assert ended.code == 0, ended
    assert ended.stdout.count("MET") == 2
    assert "the fork server died" in ended.stderr


def test_a_signal_during_the_start_does_not_wait_for_the_imports(gpulaunch, tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import sys, time
        if any("forkserver_main" in argument for argument in sys.orig_argv):
            open("importing", "w").close()
            time.sleep(600)
        """,
        "site/sitecustomize.py",
    )
    run = gpulaunch.start(
        "--nproc", "2", "--start-method", "fork", script(tmp_path, "pass"), env={"PYTHONPATH": str(tmp_path / "site")}
    )
    wait_until((tmp_path / "importing").exists, "the fork server imports")
    run.signal(signal.SIGTERM)

    assert run.wait(30).code == 143


def test_a_current_directory_that_is_removed_meanwhile(gpulaunch, tmp_path: Path) -> None:
    program = script(tmp_path, "import os, time\nwhile os.path.exists('/proc/self/cwd/train.py'): time.sleep(0.01)")
    gone = tmp_path / "gone"
    gone.mkdir()
    script(gone, "")
    gpulaunch.cwd = gone
    run = gpulaunch.start("--nproc", "1", "--start-method", "spawn", "--job-dir", tmp_path / "job", program)
    wait_until(lambda: '"started"' in events(tmp_path / "job"), "the rank runs")
    shutil.rmtree(gone)

    assert run.wait().code == 0


def events(run_dir: Path) -> str:
    path = run_dir / "events.jsonl"
    return path.read_text() if path.exists() else ""


def test_a_script_that_comes_through_a_pipe_is_left_to_the_rank(tmp_path: Path) -> None:
    said = subprocess.run(
        [COMMAND, "--nproc", "1", "--start-method", "spawn", "/dev/stdin"],
        cwd=tmp_path, input="print('FROM THE PIPE')", capture_output=True, text=True,
    )  # fmt: skip

    assert "FROM THE PIPE" in said.stdout


def test_few_open_files_are_enough_or_said_to_be_too_few(gpulaunch, tmp_path: Path) -> None:
    program = script(tmp_path, "import resource; print('LIMIT', resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    job = f"{COMMAND} --nproc 16 --start-method spawn {program}"
    soft = subprocess.run(["bash", "-c", f"ulimit -Sn 60; {job}"], cwd=tmp_path, capture_output=True, text=True)
    hard = subprocess.run(["bash", "-c", f"ulimit -n 60; {job}"], cwd=tmp_path, capture_output=True, text=True)

    assert soft.returncode == 0, soft.stderr
    assert soft.stdout.count("LIMIT 60") == 16, "the ranks keep the user's limit"
    assert hard.returncode == 2
    (line,) = hard.stderr.splitlines()
    assert "ulimit -n" in line


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(tmp_path: Path, closed: str) -> None:
    program = script(tmp_path, "import sys; sys.stdin.read(5); print('x'); open('done', 'w')")
    run = subprocess.run(
        ["bash", "-c", f"{COMMAND} --nproc 1 --start-method spawn {program} {closed}"],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip

    assert run.returncode == 0, run
    assert (tmp_path / "done").exists()


@pytest.mark.root
def test_a_full_disk_does_not_keep_a_job_from_running(gpulaunch, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], check=True)
    try:
        (small / "job").mkdir()
        with open(small / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        ended = gpulaunch(
            "--nproc", "1", "--start-method", "spawn", "--job-dir", small / "job", script(tmp_path, "print('RAN')")
        )
    finally:
        subprocess.run(["umount", small], check=True)

    assert ended.code in (0, 2), ended
    assert "No space left on device" in ended.stderr
    assert "internal error" not in ended.stderr


def test_two_launchers_do_not_share_a_job_dir(gpulaunch, tmp_path: Path) -> None:
    waiting = script(tmp_path, "import os, time; print('READY', flush=True); time.sleep(600)")
    first = gpulaunch.start("--nproc", "1", "--start-method", "spawn", "--job-dir", tmp_path / "job", waiting)
    first.wait_for("READY")
    second = gpulaunch("--nproc", "1", "--start-method", "spawn", "--job-dir", tmp_path / "job", waiting)
    first.signal(signal.SIGTERM)
    first.wait()

    assert second.code == 69, "not a mistake of the user's: it passes"
    assert "another gpulaunch runs in" in second.stderr


INNER = """
    import os, subprocess, sys, time
    if len(sys.argv) > 1:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("INNER READY", flush=True)
        time.sleep(600)
    else:
        os.execv({command!r}, [{command!r}, "--nproc", "1", "--start-method", "spawn", __file__, "inner"])
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_inside_a_rank_leaves_nothing_either(gpulaunch, tmp_path: Path, signum: int) -> None:
    """The census sees its processes and its pages."""
    program = script(tmp_path, INNER.replace("{command!r}", repr(os.fspath(COMMAND))))
    run = gpulaunch.start("--nproc", "1", "--start-method", "spawn", "--shutdown-timeout", "5", program)
    run.wait_for("INNER READY")

    run.signal(signum)

    assert run.wait().code in (-signal.SIGKILL, 128 + signal.SIGTERM)


def test_it_runs_where_there_is_no_temporary_directory(gpulaunch, tmp_path: Path) -> None:
    program = script(tmp_path, "print('RAN')")
    ended = gpulaunch("--nproc", "1", "--start-method", "spawn", program, env={"TMPDIR": "/nonexistent"})

    assert "RAN" in ended.stdout
    assert tempfile.gettempdir() != "/nonexistent"


@pytest.mark.parametrize("surroundings", [{"PYTHONSAFEPATH": "1"}, {"PYTHONOPTIMIZE": "2"}, {"PYTHONDEVMODE": "1"}])
def test_settings_of_the_interpreter(gpulaunch, tmp_path: Path, surroundings: dict[str, str]) -> None:
    ended = gpulaunch("--nproc", "1", "--start-method", "spawn", script(tmp_path, "print('RAN')"), env=surroundings)

    assert ended.code == 0, ended
    assert "RAN" in ended.stdout


def test_another_interpreter_that_has_no_gpulaunch(gpulaunch, tmp_path: Path) -> None:
    """PYTHON_EXEC, as torchrun has it."""
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    ended = gpulaunch("--nproc", "2", script(tmp_path, "print('RAN')"), env={"PYTHON_EXEC": str(bare)})

    assert ended.code == 0, ended
    assert ended.stdout.count("RAN") == 2


WRITES_TO_EVERY_PIPE = """
    import os, stat
    rubbish = [b"5", b"{}", b"null", b'{"why": 5}', b"[" * 5000, b"\\xff"]
    told = b'{"packages": ["torch"], "why": "it is mine", "written": false, "threads": 0}'
    opened = [fd for fd in range(3, 100) if os.path.exists(f"/proc/self/fd/{fd}")]
    pipes = [fd for fd in opened if stat.S_ISFIFO(os.fstat(fd).st_mode)]
    for fd in pipes:
        for line in (*rubbish, told):
            os.write(fd, line + b"\\n")
    import torch
    print("RAN with", len(pipes))
"""


@TORCH
def test_what_a_program_writes_to_a_pipe_of_the_launchers_does_not_end_the_job(gpulaunch, tmp_path: Path) -> None:
    """A program may write to every descriptor that it finds open. What the launcher knows of such a pipe is heard."""
    ended = gpulaunch("--nproc", "1", script(tmp_path, WRITES_TO_EVERY_PIPE))

    assert ended.code == 0, ended
    assert re.search(r"RAN with [1-9]", ended.stdout), ended
    assert "ranks restart from the script's first line in new interpreters: it is mine" in ended.stderr
