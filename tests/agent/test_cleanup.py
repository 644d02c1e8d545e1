"""What ranks leave behind: left running, waited for or ended; and what is not theirs is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import pytest

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

# The last rank's final upload: in a session of its own, it prints, and then writes.
UPLOADS = """
    import subprocess, sys
    helper = '''
    import os, time
    time.sleep(2)
    for _ in range(600):
        if os.path.exists("held"):
            time.sleep(0.1)
    print("UPLOADING", flush=True)
    open("uploaded", "w")
    '''
    subprocess.Popen([sys.executable, "-c", helper], start_new_session=True)
"""


def script(path: Path, text: str, name: str = "train.py") -> Path:
    file = path / name
    file.write_text(textwrap.dedent(text))
    return file


def wait_until(condition, what: str, within_s: float = 60.0) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, f"never: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.torch
def test_a_helper_left_behind_by_a_rank_that_ended_well_goes_on_as_under_torchrun(gpulaunch, tmp_path: Path) -> None:
    program = script(tmp_path, UPLOADS)
    theirs = subprocess.run([*TORCHRUN, program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    wait_until((tmp_path / "uploaded").exists, "the helper of torchrun's rank writes")
    assert (theirs.returncode, theirs.stdout) == (0, "UPLOADING\n")
    (tmp_path / "uploaded").unlink()

    (tmp_path / "held").touch()
    run = gpulaunch.start("--nproc", "1", "--start-method", "spawn", program)
    run.wait_for("left running: pid ")
    wait_until(lambda: not alive(run.pid), "the launcher ends")
    assert not (tmp_path / "uploaded").exists(), "the launcher has not waited for it"
    (tmp_path / "held").unlink()
    wait_until((tmp_path / "uploaded").exists, "the helper prints, and lives to write")
    ended = run.wait()

    assert (ended.code, ended.stdout) == (0, "UPLOADING\n"), ended
    assert "--lefto" in ended.stderr
    (log,) = tmp_path.glob("gpulaunch-runs/*/attempts/0/rank-0/stdout.log")
    assert log.read_text() == "UPLOADING\n"


def test_leftovers_are_waited_for_where_that_is_asked(gpulaunch, tmp_path: Path) -> None:
    ended = gpulaunch("--nproc", "1", "--start-method", "spawn", "--leftovers", "wait", script(tmp_path, UPLOADS))

    assert ended.code == 0, ended
    assert "waiting for processes left running by the ranks: pid " in ended.stderr
    assert (tmp_path / "uploaded").exists()
    assert ended.stdout == "UPLOADING\n"


@pytest.mark.parametrize(
    ("options", "held"), [(("--redirects", "3"), ""), ((), ">/dev/null")], ids=["nothing shown", "only its stderr"]
)
def test_who_reads_the_launchers_stdout_does_not_wait_for_a_helper_that_does_not_print_there(
    tmp_path: Path, options: tuple[str, ...], held: str
) -> None:
    """`x=$(gpulaunch ...)`, `| tee`, ssh: with torchrun they have their end, too."""
    command = [Path(sysconfig.get_path("scripts"), "gpulaunch"), "--no-profile", *options, "--no-python", "sh", "-c"]
    with open(tmp_path / "stderr", "w") as stderr:
        ended = subprocess.run(
            [*command, f"sleep 60 {held} & echo $! > pid; echo done"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, timeout=30,
        )  # fmt: skip
    helper = int((tmp_path / "pid").read_text())
    lives = alive(helper)
    os.kill(helper, signal.SIGKILL)

    assert (ended.returncode, lives) == (0, True)
    assert ended.stdout == (b"" if options else b"done\n")


LEAVES_FOR_EVER = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        open("left", "w").write(str(os.getpid()))
        time.sleep(600)
    while not os.path.exists("left"):
        time.sleep(0.01)
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
        sys.exit(int(sys.argv[1]))
"""


def test_leftovers_are_ended_where_that_is_asked(gpulaunch, tmp_path: Path) -> None:
    program = script(tmp_path, LEAVES_FOR_EVER)
    ended = gpulaunch("--nproc", "2", "--start-method", "spawn", "--leftovers", "end", program, "0")

    assert ended.code == 0, ended
    assert not alive(int((tmp_path / "left").read_text()))
    (line,) = [line for line in ended.stderr.splitlines() if "left running" in line]
    assert line.startswith("[gpulaunch] ending processes left running by the ranks: pid ")
    assert f"pid {(tmp_path / 'left').read_text()} (" in line


def test_after_a_failure_nothing_is_left_of_a_rank_that_ended_well(gpulaunch, tmp_path: Path) -> None:
    ended = gpulaunch("--nproc", "2", "--start-method", "spawn", script(tmp_path, LEAVES_FOR_EVER), "5")

    assert ended.code == 5, ended
    assert not alive(int((tmp_path / "left").read_text()))


def test_a_signal_ends_the_wait_and_what_is_waited_for(gpulaunch, tmp_path: Path) -> None:
    program = script(tmp_path, LEAVES_FOR_EVER)
    run = gpulaunch.start("--nproc", "2", "--start-method", "spawn", "--leftovers", "wait", program, "0")
    run.wait_for("waiting for processes left running by the ranks")
    assert alive(int((tmp_path / "left").read_text()))
    run.signal(signal.SIGTERM)

    assert run.wait(30).code == 0, "all ranks had ended well"
    assert not alive(int((tmp_path / "left").read_text()))


# --- what is not the ranks'

SERVICE = """
    import os, sys, time
    if os.fork():
        time.sleep(600)  # the launcher's child, started before it
    while not os.path.exists("running"):
        time.sleep(0.01)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        open("worker", "w").write(str(os.getpid()))  # orphaned: the launcher is its nearest subreaper
        time.sleep(600)
    time.sleep(600)
"""
FAILS_ONCE = """
    import os, time
    open("running", "w")
    while not os.path.exists("worker"):
        time.sleep(0.01)
    time.sleep(0.2)
    raise SystemExit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""


def test_a_service_started_before_the_launcher_lives_through_a_restart(tmp_path: Path) -> None:
    service, program = script(tmp_path, SERVICE, "service.py"), script(tmp_path, FAILS_ONCE)
    command = Path(sysconfig.get_path("scripts"), "gpulaunch")
    options = "--nproc 1 --start-method spawn --max-restarts 1"
    call = f"{sys.executable} {service} >/dev/null 2>&1 & echo $! > service; exec {command} {options} {program}"
    ended = subprocess.run(["sh", "-c", call], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    pids = [int((tmp_path / name).read_text()) for name in ("service", "worker")]

    assert ended.returncode == 0, ended.stderr
    assert "restarting all ranks" in ended.stderr
    assert [alive(pid) for pid in pids] == [True, True], "a service that is not the ranks' was ended"
    # The census ends them: they are the test's own.
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in children_of_service(service):
        os.kill(pid, signal.SIGKILL)


LOOKS_AT_THE_SERVICE = """
    import os, subprocess, sys, time
    subprocess.Popen(["setsid", "sleep", "600"])  # its own: ended with the failed attempt
    time.sleep(0.3)
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    sleeping = [open(f"/proc/{pid}/cmdline").read().split("\\0")[1] for pid in os.listdir("/proc") if pid.isdigit()
                and open(f"/proc/{pid}/comm").read() == "sleep\\n"]
    print("SLEEPING", sorted(sleeping), flush=True)
    sys.exit(0 if again else 3)
"""


@pytest.mark.root
def test_a_process_reparented_to_the_launcher_as_pid_1_lives_through_a_restart(tmp_path: Path) -> None:
    """As in a container: `sh -c 'service --daemon; exec gpulaunch ...'`."""
    program = script(tmp_path, LOOKS_AT_THE_SERVICE)
    command = Path(sysconfig.get_path("scripts"), "gpulaunch")
    call = f"(setsid sleep 601 >/dev/null 2>&1 &); exec {command} --start-method spawn --max-restarts 1 {program}"
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", call]
    ended = subprocess.run(namespace, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("SLEEPING ['600', '601']") == 2, ended.stdout


def children_of_service(service: Path) -> list[int]:
    """Processes that run this file."""
    wanted = os.fsencode(service)
    found: list[int] = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if wanted in Path(entry.path, "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


# As atd, slurmd and systemd do: it runs what it is handed, in the environment of whoever handed it.
QUEUE = """
    import json, os, subprocess, time
    while not os.path.exists("submitted"):
        time.sleep(0.01)
    job = subprocess.Popen(["sleep", "600"], env=json.load(open("submitted")), start_new_session=True)
    open("job", "w").write(str(job.pid))
    job.wait()
"""
SUBMITS = """
    import json, os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        open("own", "w").write(str(os.getpid()))
        time.sleep(600)
    json.dump(dict(os.environ), open("submitting", "w"))
    os.rename("submitting", "submitted")
    print("READY", flush=True)
    time.sleep(600)
"""


def test_after_sigkill_of_the_launcher_a_job_submitted_from_a_rank_lives_on_and_a_ranks_own_does_not(
    gpulaunch, tmp_path: Path
) -> None:
    queue = subprocess.Popen([sys.executable, script(tmp_path, QUEUE, "queue.py")], cwd=tmp_path)
    try:
        run = gpulaunch.start("--nproc", "1", "--start-method", "spawn", script(tmp_path, SUBMITS))
        wait_until(lambda: (tmp_path / "job").exists() and (tmp_path / "job").read_text(), "the job is submitted")
        wait_until(lambda: (tmp_path / "own").exists() and (tmp_path / "own").read_text(), "the daemon is there")
        job, own = (int((tmp_path / name).read_text()) for name in ("job", "own"))
        run.signal(signal.SIGKILL)
        run.wait()
        wait_until(lambda: not alive(own), "the rank's daemon is ended")
        time.sleep(0.5)  # were the job taken for the run's, it would be ended in the same sweep

        assert alive(job)
        os.kill(job, signal.SIGKILL)
        assert queue.wait(10) == 0
    finally:
        queue.kill()
        queue.wait()


# --- /dev/shm

SEMAPHORES = """
    import multiprocessing, os, sys, time
    def work(queue):
        time.sleep(600)
    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        kept = [context.Semaphore(), context.Queue()]
        worker = context.Process(target=work, args=(kept[1],))
        worker.start()
        print("SEMAPHORES", sum(name.startswith("sem.mp-") for name in os.listdir("/dev/shm")), flush=True)
        open(f"made-{os.environ['RANK']}", "w")
        while not os.path.exists("made-0") or not os.path.exists("made-1"):
            time.sleep(0.01)
        if os.environ["RANK"] == sys.argv[1]:
            os._exit(5)
        time.sleep(600)
"""


@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.torch), "spawn"])
@pytest.mark.parametrize("ends", ["a failure", "sigkill of the launcher"])
def test_no_semaphore_stays_in_shared_memory(gpulaunch, tmp_path: Path, ends: str, method: str) -> None:
    before = semaphores()
    program = script(tmp_path, SEMAPHORES)
    run = gpulaunch.start("--nproc", "2", "--start-method", method, program, "1" if ends == "a failure" else "none")
    run.wait_until(lambda run: run.stdout.count("SEMAPHORES") == 2)
    if ends != "a failure":
        wait_until((tmp_path / "made-1").exists, "both have made theirs")
        run.signal(signal.SIGKILL)
    ended = run.wait()

    assert ended.code == (5 if ends == "a failure" else -signal.SIGKILL), ended
    assert "SEMAPHORES 0" not in ended.stdout, "the program makes none: nothing is tested"
    wait_until(lambda: not semaphores() - before, f"{semaphores() - before} are removed", 10.0)


def semaphores() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("sem.mp-")}
