"""Bad input: one clear line and the right exit code, or correct output all the same. Never a traceback of ours."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from gpulaunch.launcher.agent import metrics_port
from gpulaunch.launcher.job.spec import METRICS_PORT_BASE

HELLO = "import os; print('hello', os.environ['RANK'])"


@pytest.fixture
def hello(tmp_path: Path) -> Path:
    program = tmp_path / "hello.py"
    program.write_text(HELLO)
    return program


def check_one_line(ended, *words: str, code: int = 2) -> None:
    """It was refused before anything started, in one line that says these words."""
    assert ended.code == code, ended
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("gpulaunch: error: ")
    for word in words:
        assert word in line


def test_missing_script(gpulaunch, hello: Path) -> None:
    check_one_line(gpulaunch("--nproc", "2", "helo.py"), "helo.py", "did you mean hello.py?")


def test_no_script_at_all(gpulaunch) -> None:
    check_one_line(gpulaunch("--nproc", "2"), "no program to run")


@pytest.mark.parametrize("number", ["0", "-1", "two", ""])
def test_nproc_that_is_no_number_of_ranks(gpulaunch, hello: Path, number: str) -> None:
    check_one_line(gpulaunch(f"--nproc={number}", hello), "--nproc")


def test_unknown_option(gpulaunch, hello: Path) -> None:
    check_one_line(gpulaunch("--nprocc", "2", hello), "--nprocc", "did you mean --nproc")


@pytest.mark.parametrize("option", ["--master-port", "--metrics-addr"])
def test_port_in_use(gpulaunch, hello: Path, option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        value = f"127.0.0.1:{port}" if option == "--metrics-addr" else str(port)

        check_one_line(gpulaunch("--nproc", "2", option, value, hello), str(port), "in use", code=69)
    assert not list(hello.parent.glob("gpulaunch-runs/*")), "there was no run"


def test_a_start_that_was_refused_leaves_a_job_directory_as_it_was(gpulaunch, hello: Path, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        check_one_line(gpulaunch("--metrics-addr", address, "--job-dir", tmp_path / "job", hello), "in use", code=69)
    assert not list((tmp_path / "job").iterdir())


def test_a_taken_default_metrics_port_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(metrics_port, "METRICS_PORT_BASE", port)

        with metrics_port.bind_metrics("127.0.0.1", None) as found:
            used = found.getsockname()[1]
            assert used > port
            assert metrics_port.url_of(found) == f"http://127.0.0.1:{used}/metrics"
            assert metrics_port.other_port_notice(found, None) == f"port {port} is taken: metrics are served on {used}"
            assert metrics_port.other_port_notice(found, used) == "", "asked for"
        with metrics_port.bind_metrics("127.0.0.1", 0) as found:
            assert metrics_port.other_port_notice(found, 0) == ""
    with metrics_port.bind_metrics("127.0.0.1", None) as found:
        assert found.getsockname()[1] == port
        assert metrics_port.other_port_notice(found, None) == ""


def test_connections_of_a_past_run_do_not_take_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as past:
        port = past.getsockname()[1]
        with socket.create_connection(past.getsockname()) as client:
            past.accept()[0].close()  # first, so that TIME_WAIT is on this side
            assert client.recv(1) == b""
    monkeypatch.setattr(metrics_port, "METRICS_PORT_BASE", port)

    with metrics_port.bind_metrics("127.0.0.1", None) as found:
        assert found.getsockname()[1] == port


def test_of_two_launchers_that_bind_at_once_each_gets_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has bound the port, and listens before this one does."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        monkeypatch.setattr(metrics_port, "METRICS_PORT_BASE", port)

        class Slower(socket.socket):
            def listen(self, backlog: int = 0) -> None:
                if self.getsockname()[1] == port:
                    other.listen()
                super().listen(backlog)

        monkeypatch.setattr(socket, "socket", Slower)
        with metrics_port.bind_metrics("127.0.0.1", None) as found:
            assert found.getsockname()[1] > port


def listener_on(port: int) -> socket.socket:
    """A socket that has the port: a job of another test may have it, and end before a later one looks."""
    until_s = time.monotonic() + 120
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_a_job_whose_metrics_are_elsewhere_says_where(gpulaunch, hello: Path) -> None:
    with listener_on(METRICS_PORT_BASE):
        ended = gpulaunch("--start-method", "spawn", hello)

    told = re.search(rf"\[gpulaunch\] port {METRICS_PORT_BASE} is taken: metrics are served on (\d+)\n", ended.stderr)
    assert told is not None, ended.stderr
    assert f"[gpulaunch] metrics http://127.0.0.1:{told[1]}/metrics\n" in ended.stderr
    assert int(told[1]) > METRICS_PORT_BASE


def test_job_dir_that_is_a_file(gpulaunch, hello: Path) -> None:
    check_one_line(gpulaunch("--job-dir", hello / "below", hello), "--job-dir")


def test_job_dir_that_cannot_be_written(gpulaunch, hello: Path, tmp_path: Path) -> None:
    # Root may write everywhere but into /proc.
    check_one_line(
        gpulaunch("--job-dir", "/proc/gpulaunch", hello), "--job-dir /proc/gpulaunch", "use a writable directory"
    )


def test_no_memory_for_shared_pages_costs_the_profile_and_not_the_job(gpulaunch, hello: Path) -> None:
    ended = gpulaunch("--nproc", "2", "--start-method", "spawn", hello, env={"GPULAUNCH_SHM_DIR": "/proc/nowhere"})

    assert ended.code == 0, ended
    (line,) = [line for line in ended.stderr.splitlines() if "profiling is off" in line]
    assert "/proc/nowhere" in line
    assert sorted(ended.stdout.split()) == ["0", "1", "[0]", "[1]", "hello", "hello"]


@pytest.mark.root
def test_a_full_dev_shm_costs_the_profile_and_not_the_job(gpulaunch, hello: Path, tmp_path: Path) -> None:
    small = tmp_path / "shm"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", small], check=True)
    try:
        (small / "ballast").write_bytes(bytes(4096))
        ended = gpulaunch("--nproc", "2", "--start-method", "spawn", hello, env={"GPULAUNCH_SHM_DIR": str(small)})
    finally:
        subprocess.run(["umount", small], check=True)

    assert ended.code == 0, ended
    assert "No space left on device" in ended.stderr
    assert ended.stdout.count("hello") == 2


def test_malformed_toml(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("nproc = \n")
    check_one_line(gpulaunch("--config", "job.toml"), "job.toml", "line 1")


def test_unknown_key_in_the_job_file(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('script = "x.py"\nnprok = 2\n')
    check_one_line(gpulaunch("--config", "job.toml"), "job.toml", "nprok", "did you mean")


@pytest.mark.torch
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_script_with_a_syntax_error(gpulaunch, tmp_path: Path, method: str) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n    pass\n")
    ended = gpulaunch("--nproc", "2", "--start-method", method, "broken.py")

    assert ended.code == 1
    assert "SyntaxError" in ended.stderr
    (cause,) = [line for line in ended.stderr.splitlines() if "first cause" in line]
    assert "SyntaxError" in cause
    assert "gpulaunch/launcher" not in ended.stderr, "a frame of ours in the user's traceback"


@pytest.mark.torch
def test_a_program_that_fails_on_import_fails_with_its_own_traceback(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nimport no_such_package\n")
    ended = gpulaunch("--nproc", "1", "train.py")

    log = (ended.run_dir / "attempts/0/rank-0/stderr.log").read_text()
    assert log.count("Traceback") == 1
    assert log.endswith("ModuleNotFoundError: No module named 'no_such_package'\n")
    assert ended.code == 1


def test_long_lines_without_newline(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("import sys; sys.stdout.write('x' * 300)")
    ended = gpulaunch("--nproc", "2", "--start-method", "spawn", "long.py")

    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] " + "x" * 300 for rank in range(2)]


def test_binary_output(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "binary.py").write_text("import os; os.write(1, bytes(range(256)) * 1000)")
    ended = gpulaunch("--nproc", "1", "--start-method", "spawn", "binary.py")

    assert ended.code == 0
    assert (ended.run_dir / "attempts/0/rank-0/stdout.log").read_bytes() == bytes(range(256)) * 1000


def test_a_command_that_is_not_there(gpulaunch) -> None:
    check_one_line(gpulaunch("--no-python", "no-such-command"), "no-such-command", "not found in PATH")


def test_nodes_without_a_place_to_meet_are_refused_and_what_works_is_named(gpulaunch, hello: Path) -> None:
    check_one_line(gpulaunch("--nnodes", "1:2", hello), "--nnodes", "--rdzv-endpoint")
    check_one_line(gpulaunch("--nnodes", "2", "--rdzv-backend", "c10d", hello), "--rdzv-endpoint")


def test_stdout_that_is_closed_does_not_end_the_job(gpulaunch, hello: Path, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("import time; print('a'); time.sleep(1); print('b'); open('done', 'w')")
    import sysconfig

    command = Path(sysconfig.get_path("scripts"), "gpulaunch")
    with open(os.devnull, "w") as null:
        run = subprocess.Popen(
            [command, "--start-method", "spawn", "late.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=null
        )
        assert run.stdout is not None
        run.stdout.close()

        assert run.wait(60) == 0
    assert (tmp_path / "done").exists()
