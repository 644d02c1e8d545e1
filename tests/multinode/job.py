"""A job of several hosts: an agent on each, and what its ranks have written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hosts import Host

from gpulaunch.launcher.hang.sockets import connections

RANK = Path(__file__).parent / "stand_in_rank.py"
PORT = 29400
PATIENCE_S = 60.0
SOON = ("--rdzv-conf", "last_call_timeout=1")
SILENCE_S = 15.0
"""A node is lost after 9 s of silence; the rest is for a new start."""


class Node:
    """The agent on one host."""

    def __init__(self, job: Job, host: Host, arguments: list[str], env: dict[str, str]) -> None:
        self.host = host
        self.name = host.name
        self.output = job.directory / f"{host.name}.out"
        self.steps_file = job.directory / f"{host.name}.steps"
        self.run_dir = job.run_dir or job.directory / f"run-{host.name}-{job.started}"
        argv = [*job.command, *arguments]
        if job.is_ours:
            argv += ["--job-dir", str(self.run_dir)]
        own = {"STEPS": str(self.steps_file)}
        if job.program == RANK and job.is_ours:
            own["PYTHON_EXEC"] = os.path.realpath(sys.executable)  # one without torch
        argv.append(str(job.program))
        self.process = host.run(argv, env={**os.environ, **own, **env}, cwd=job.directory, output=self.output)

    @property
    def said(self) -> str:
        """What the agents on this host have printed."""
        return self.output.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """The agent's."""
        return self.host.pid_of(self.process)

    def has_met(self) -> bool:
        """Whether its agent has a connection to the leader's."""
        return any(remote.endswith(f":{PORT:04X}") for _, remote in connections(self.process.pid))

    def rank_pid(self) -> int:
        """Of local rank 0, as seen from here."""
        wanted = self.steps()[-1]["pid"]
        for path in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                lines = path.read_text().splitlines()
                ids = next(line.split()[1:] for line in lines if line.startswith("NSpid:"))
                if len(ids) > 1 and int(ids[-1]) == wanted and self._is_on_host(int(path.parent.name)):
                    return int(path.parent.name)
        raise AssertionError(f"no rank {wanted} on {self.name}")

    def _is_on_host(self, pid: int) -> bool:
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{self.process.pid}/ns/net")

    def order(self, words: str, local_rank: int = 0) -> None:
        """Tell a rank what to do in its next step."""
        path = Path(f"{self.steps_file}.{local_rank}.do")
        path.with_suffix(".new").write_text(words)
        path.with_suffix(".new").rename(path)

    def steps(self, local_rank: int = 0) -> list[dict[str, Any]]:
        """What a rank has written of its steps."""
        path = Path(f"{self.steps_file}.{local_rank}")
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


class Job:
    """The nodes of one job."""

    def __init__(
        self,
        directory: Path,
        nnodes: str,
        *arguments: str,
        leader: str = "host0",
        program: Path = RANK,
        command: list[str] | None = None,
        meets: tuple[str, ...] = (),
        run_dir: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        """`command`: of another launcher, with all its options. `meets`: how the nodes meet, if not at an endpoint.
        `run_dir`: of all nodes; None: each agent has its own."""
        self.directory = directory
        self.run_dir = run_dir
        self.program = program
        self.is_ours = command is None
        self.command = command or [
            *(str(Path(sys.executable).with_name("gpulaunch")), "--nnodes", nnodes),
            *(meets or ("--rdzv-endpoint", f"{leader}:{PORT}", "--rdzv-id", "job")),
            *("--max-restarts", "5"),
            *(("--start-method", "spawn", "--no-profile") if program == RANK else ()),
            *arguments,
        ]
        self.started = 0
        self.nodes: dict[str, Node] = {}
        self._env = env or {}

    def start(self, *hosts: Host, arguments: tuple[str, ...] = (), **env: str) -> None:
        """Start an agent on each of them."""
        for host in hosts:
            self.started += 1
            self.nodes[host.name] = Node(self, host, [*arguments], {**self._env, **env})

    def store(self) -> str:
        """The address of torch's store in the newest step, or "": each start of all ranks has one of its own."""
        steps = (step for node in self.nodes.values() for step in node.steps())
        return str(max(steps, key=_at_s, default={"store": ""})["store"])

    def trains(self, *names: str, after_s: float = 0.0, before: str = "") -> float | None:
        """When these hosts, all together and no others, made their first step after a time; None: not yet.

        `before`: steps with this store do not count.
        """
        firsts: list[dict[str, Any]] = []
        for name in names:
            steps = [step for step in self.nodes[name].steps() if step["at_s"] > after_s]
            steps = [step for step in steps if step["store"] != before]
            fit = [step for step in steps if step["world_size"] == len(names)]
            if not fit:
                return None
            firsts.append(fit[0])
        if sorted(step["rank"] for step in firsts) != list(range(len(names))):
            return None
        return max(float(step["at_s"]) for step in firsts)

    def until_trains(
        self,
        *names: str,
        after_s: float = 0.0,
        before: str = "",
        within_s: float = PATIENCE_S,
    ) -> float:
        """Wait for that; return when it was."""
        told = f"{', '.join(names)} train"
        self.until(lambda: self.trains(*names, after_s=after_s, before=before), told, within_s)
        at_s = self.trains(*names, after_s=after_s, before=before)
        assert at_s is not None
        return at_s

    def until(self, condition: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
        """Wait until something holds."""
        until_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < until_s, f"not within {within_s:g} s: {what}\n{self}"
            time.sleep(0.02)

    def first_causes(self, attempt: int) -> dict[str, str]:
        """By host: the headline of its failure.json of an attempt."""
        found: dict[str, str] = {}
        for name, node in self.nodes.items():
            (path,) = node.run_dir.glob(f"**/attempts/{attempt}/failure.json")
            found[name] = json.loads(path.read_text())["first"]["headline"]
        return found

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def end(self) -> dict[str, int]:
        """Let the ranks end with success; return the exit codes."""
        next(iter(self.nodes.values())).order("end")
        return self.codes()

    def codes(self, *names: str) -> dict[str, int]:
        """The exit codes of these agents, or of all, once they have ended."""
        chosen = {name: node for name, node in self.nodes.items() if not names or name in names}
        self.until(lambda: all(node.process.poll() is not None for node in chosen.values()), "the agents end")
        return {name: node.process.returncode for name, node in chosen.items()}

    def signal(self, name: str, signum: signal.Signals) -> None:
        """Send a signal to an agent."""
        os.kill(self.nodes[name].pid, signum)

    def __str__(self) -> str:
        return "\n".join(f"== {name}\n{node.said}" for name, node in self.nodes.items())


def _at_s(step: dict[str, Any]) -> float:
    return float(step["at_s"])


def alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has not ended."""
    return process.poll() is None
