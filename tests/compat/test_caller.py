"""The caller and the job: signals, interruptions, sudden death, and whose handlers they are."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

JOB = """
    import os, signal, sys
    from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch

    def train():
        def stop(signum, frame):
            open(f"stopped-{os.environ['RANK']}", "w").write(str(signum))
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        print("training", flush=True)
        while True:
            signal.pause()

    if __name__ == "__main__":
"""
LAUNCH = "elastic_launch(LaunchConfig(1, 1, 1), train)()"


def indent(source: str) -> str:
    return "".join(f"        {line}\n" for line in source.strip("\n").splitlines())


def test_sigterm_ends_the_ranks_gently_and_raises_torchs_signal_exception(start_caller: Any, here: Path) -> None:
    caller = start_caller(
        JOB
        + indent(f"""
try:
    {LAUNCH}
except Exception as err:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    print(type(err).__name__, int(err.sigval))
""")
    )
    caller.until("training")
    caller.signal(signal.SIGTERM)
    code, stdout, _ = caller.wait()

    assert (code, stdout) == (0, "SignalException 15\n")
    assert (here / "stopped-0").read_text() == "15"


def test_ctrl_c_is_a_keyboard_interrupt_after_the_ranks_have_ended(start_caller: Any, here: Path) -> None:
    caller = start_caller(
        JOB
        + indent(f"""
try:
    {LAUNCH}
except KeyboardInterrupt:
    print("interrupted", os.path.exists("stopped-0"))
""")
    )
    caller.until("training")
    caller.signal(signal.SIGINT)
    code, stdout, _ = caller.wait()

    assert (code, stdout) == (0, "interrupted True\n")


@pytest.mark.parametrize("raising", [False, True])
def test_a_handler_of_the_callers_own_stays_and_decides(start_caller: Any, here: Path, raising: bool) -> None:
    """One that raises ends the job; one that returns has only taken note."""
    caller = start_caller(
        JOB
        + indent(f"""
class Mine(Exception): pass
def handler(signum, frame):
    print("handled", flush=True)
    if {raising}:
        raise Mine
signal.signal(signal.SIGUSR1, handler)
try:
    elastic_launch(LaunchConfig(1, 1, 1, signals_to_handle="SIGTERM,SIGUSR1"), train)()
except Mine:
    print("mine", os.path.exists("stopped-0"))
except Exception as err:
    print(type(err).__name__)
""")
    )
    caller.until("training")
    caller.signal(signal.SIGUSR1)
    caller.until("handled")
    if not raising:
        assert not (here / "stopped-0").exists()
        caller.signal(signal.SIGTERM)
    _, stdout, _ = caller.wait()

    assert stdout == ("mine True\n" if raising else "SignalException\n")


def test_a_caller_that_is_killed_takes_the_job_with_it(start_caller: Any, here: Path) -> None:
    """Gently: the ranks are asked first. The census sees to it that no process and no directory of the call is left."""
    caller = start_caller(JOB + indent(LAUNCH))
    caller.until("training")
    caller.signal(signal.SIGKILL)
    code, _, _ = caller.wait()

    assert code == -signal.SIGKILL
    assert (here / "stopped-0").read_text() == "15"


def test_an_agent_that_is_killed_is_an_error_and_leaves_nothing(start_caller: Any) -> None:
    caller = start_caller(
        JOB
        + indent(f"""
import threading, time
from gpulaunch.launcher.loop import linux
def kill_the_agent():
    while not any(linux.descendants_of(agent) for agent in linux.children_of(os.getpid())):
        time.sleep(0.05)
    for agent in linux.children_of(os.getpid()):
        os.kill(agent, signal.SIGKILL)
threading.Thread(target=kill_the_agent).start()
try:
    {LAUNCH}
except Exception as err:
    print(type(err).__name__, err)
""")
    )
    code, stdout, _ = caller.wait()

    assert code == 0
    assert "RuntimeError the process that runs the job was killed by SIGKILL; its ranks have been ended\n" in stdout


def test_the_callers_children_and_blocked_signals_are_its_own(start_caller: Any, here: Path) -> None:
    """A child of the caller outlives the job, and a mask of the calling thread does not reach the agent."""
    caller = start_caller(
        JOB
        + indent(f"""
import subprocess
child = subprocess.Popen(["sleep", "60"])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(elastic_launch(LaunchConfig(1, 1, 1), "true")(), child.poll())
child.kill()
child.wait()
{LAUNCH}
""")
    )
    caller.until("{0: None} None")
    caller.until("training")
    caller.signal(signal.SIGKILL)
    caller.wait()

    assert (here / "stopped-0").read_text() == "15"
