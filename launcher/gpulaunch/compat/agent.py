"""Runs the agent of a library call in a separate process: `python -P -m gpulaunch.compat.agent SOCKET CALLER`.

The caller may have threads, CUDA, children and signal handlers; an agent needs none of them. It receives the job over
the socket as JSON, runs it as the command line would, and sends back over the same socket how the job ended:

    request   {"version": 1, "options": destination -> value, "call_dir", "argv", "main"}
    answer    {"version": 1, "refused": str, "broken": str, "code", "error", "ranks": [...],
               "failures": [{"rank", "local_rank", "pid", "exitcode", "error_file", "wall_time_s"}]}

The first failure is the first cause. The agent ends gently with its caller: the caller's death arrives as a SIGTERM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from gpulaunch.launcher.failure.blame import torch_exit_code
from gpulaunch.launcher.loop import linux

if TYPE_CHECKING:
    from gpulaunch.launcher.agent.agent import Agent, Ended
    from gpulaunch.launcher.agent.rundir import RunDir
    from gpulaunch.launcher.job.spec import JobSpec

VERSION = 1


def main() -> None:
    """Serve one request and exit."""
    fd, caller_pid = map(int, sys.argv[1:3])
    os.set_inheritable(fd, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the calling thread may have blocked some
    linux.die_with_parent(caller_pid, signal.SIGTERM)
    with socket.socket(fileno=fd) as sock:
        request = json.loads(read_all(sock))
        sys.argv = request["argv"]
        try:
            answer = _serve(request)
        except KeyboardInterrupt:  # before the loop handles the signals
            answer = {"code": 128 + signal.SIGINT}
        finally:
            # The caller removes it, unless it is dead.
            if request["call_dir"] and os.getppid() != caller_pid:
                shutil.rmtree(request["call_dir"], ignore_errors=True)
        with contextlib.suppress(OSError):
            sock.sendall(json.dumps({"version": VERSION, **answer}).encode())


def read_all(sock: socket.socket) -> bytes:
    """Read until the other end stops writing."""
    pieces: list[bytes] = []
    while piece := sock.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    from gpulaunch.launcher.cli.run import run
    from gpulaunch.launcher.job.host_info import detect
    from gpulaunch.launcher.job.load import resolve
    from gpulaunch.launcher.job.options import UsageError

    answer: dict[str, Any] = {}
    try:
        host = detect(os.environ)
        resolved = resolve(request["options"], os.environ, host)
        job = dataclasses.replace(resolved, spec=_as_called(resolved.spec, request))
        run(job, host, on_end=lambda rundir, agent, ended: answer.update(_told(rundir, agent, ended)))
    except UsageError as err:
        return {"refused": str(err)}
    except Exception as err:
        if os.environ.get("GPULAUNCH_DEBUG") == "1":
            raise
        return {"broken": " ".join(f"{type(err).__name__}: {err}".split())}
    return answer


def _as_called(spec: JobSpec, request: dict[str, Any]) -> JobSpec:
    """The job with settings that no command line can express."""
    from gpulaunch.launcher.job.imports import imports_of

    origins = {
        name: "the calling program" if origin == "command line" else origin for name, origin in spec.origins.items()
    }
    spec = dataclasses.replace(spec, origins=origins)
    if not request["call_dir"]:
        return spec
    program = dataclasses.replace(
        spec.program,
        kind="function",
        args=("${local_rank}",),
        python=sys.executable,
        call_dir=request["call_dir"],
    )
    # The ranks import the caller's main file, so what that imports is worth preloading, as for a script.
    preload = tuple(imports_of(request["main"])) if spec.preload is None else spec.preload
    return dataclasses.replace(spec, program=program, preload=preload)


def _told(rundir: RunDir, agent: Agent, ended: Ended) -> dict[str, Any]:
    blame = ended.blame if ended.code else None
    ends = (blame.first, *blame.also, *blame.echoes) if blame is not None else ()
    return {
        "code": ended.code,
        "error": ended.error,
        "ranks": sorted(agent.totals),
        "failures": [
            {
                "rank": end.rank,
                "local_rank": end.local_rank,
                "pid": end.pid,
                "exitcode": torch_exit_code(end),
                "error_file": os.path.realpath(
                    os.path.join(rundir.rank_path(agent.num_restarts, end.rank), "error.json")
                ),
                "wall_time_s": end.wall_time_s,
            }
            for end in ends
        ],
    }


if __name__ == "__main__":
    main()
