"""The trial server: imports what a job's ranks need once, and starts trials that have it. `python -u FILE <fd>`.

A trial is an agent in a new process, with a fork server that is its child already and has imported everything: both are
forked here, and then the agent is executed. The messages on the socket, as in `loop.forkserver_main`:

    (setup)  tune -> it   what to import, as for a fork server; its "agent" is tune
    ready    it -> tune   as from a fork server
    trial    tune -> it   argv, env, directory and view ("": no throw-away view); stdin, stdout and stderr follow
    started  it -> tune   the agent's pid, a child of tune; 0: there is none

The fork server is in the trial's namespaces, which are made before it is forked. A normal user's exec drops the
capabilities that come with these, and the fork server, which is not executed, drops them itself.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's directory, put there by Python

from gpulaunch.launcher.loop import forkserver_main  # first: it notes which modules the interpreter itself has loaded

# isort: split
import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from gpulaunch.launcher.loop import child, linux, preload
from gpulaunch.launcher.tune import scratch

_NUM_FDS = 3


def main() -> None:
    """Entry point: the one argument is the socket's number, padded with spaces: room for the ranks' command lines."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sys.argv = [""]
    setup = forkserver_main.receive(sock)
    if setup is None:
        return
    # As of an agent's fork server. What imports compile would be written outside of a trial's view.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, child.NOTICES)
    # Imports may change both: libgomp binds the thread that loads it (OMP_PROC_BIND).
    before = dict(os.environ), os.sched_getaffinity(0)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    preloaded = forkserver_main.preload(setup)
    sys.dont_write_bytecode = writes
    with contextlib.suppress(OSError):  # tune has ended, or no process can be made
        _Server(sock, setup, preloaded, *before).serve()
    preloaded.finalize()
    os._exit(0)


class _Server:
    def __init__(
        self,
        sock: socket.socket,
        setup: dict[str, Any],
        preloaded: forkserver_main.Preloaded,
        env: Mapping[str, str],
        cores: set[int],
    ) -> None:
        self._sock = sock
        self._setup = setup
        self._preloaded = preloaded
        self._env = env
        self._cores = cores
        self._of_ranks = _open_fds() - {sock.fileno()}
        """Descriptors that ranks get: what the imports have left open, and stdio."""

    def serve(self) -> None:
        """Start trials until tune closes the socket. Raises OSError."""
        sock = self._sock
        forkserver_main.send(sock, {"op": "ready", "pid": os.getpid(), **self._preloaded.ready})
        while (request := forkserver_main.receive(sock)) is not None:
            fds = forkserver_main.receive_fds(sock, _NUM_FDS)
            pid = self._start(request, fds)
            for fd in fds:
                os.close(fd)
            forkserver_main.send(sock, {"op": "started", "pid": pid})

    def _start(self, request: dict[str, Any], fds: list[int]) -> int:
        """Fork the agent through a middle process, so that it becomes a child of tune, a subreaper; return its pid."""
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = 0
            try:
                parent = os.getpid()
                pid = os.fork()
                if pid == 0:
                    os.close(write)
                    self._become_agent(request, fds, parent)
            finally:  # no process can be made: 0 says so
                os.write(write, str(pid).encode())
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            told = pipe.read()
        os.waitpid(middle, 0)
        return int(told or 0)

    def _become_agent(self, request: dict[str, Any], fds: list[int], middle: int) -> NoReturn:
        """In the child: enter the trial's view, fork its fork server, and execute the agent."""
        try:
            tune_pid = self._setup["agent_pid"]
            preload.wait_until_orphaned(middle)
            os.dup2(fds[2], 2)
            if request["view"]:
                scratch.enter(request["directory"], request["view"])
            ours, theirs = socket.socketpair()
            server = os.fork()
            if server == 0:
                self._serve_agent(theirs, fds, drop_capabilities=bool(request["view"]))
            if not self._preloaded.of_ranks["sigint_ignored"]:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            child.become(
                request["argv"],
                {**request["env"], forkserver_main.INHERITED: f"{ours.fileno()},{server}"},
                stdio=(fds[0], fds[1], fds[2]),
                pass_fds=[ours.fileno()],
                parent_pid=tune_pid,
                affinity=sorted(self._cores),
                told_write=os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC),
            )
        except OSError as err:
            os.write(2, f"gpulaunch: {scratch.line_of(err)}\n".encode())
        finally:
            os._exit(scratch.FAILED)

    def _serve_agent(self, sock: socket.socket, fds: list[int], *, drop_capabilities: bool) -> NoReturn:
        """In the agent's child: be its fork server, if it needs what has been imported and nothing else."""
        try:
            os.setsid()
            os.dup2(fds[0], 0)
            os.dup2(fds[2], 1)  # as of a fork server that the agent starts
            for fd in _open_fds() - self._of_ranks - {sock.fileno()}:
                os.close(fd)
            if drop_capabilities:
                scratch.drop_capabilities()
            wanted = forkserver_main.receive(sock)
            if wanted is None or not self._has_imported(wanted):
                os._exit(0)
            for name in self._env.keys() - wanted["env"].keys():
                os.environ.pop(name, None)
            os.environ.update(wanted["env"])
            linux.set_run(wanted["env"]["GPULAUNCH_RUN_ID"])
            linux.die_with_parent(wanted["agent_pid"])
            # Others still need what its finalizers would remove.
            forkserver_main.serve(sock, self._preloaded._replace(finalizers=[]))
        finally:
            os._exit(1)

    def _has_imported(self, wanted: dict[str, Any]) -> bool:
        """Whether a fork server that the agent would start would import the same."""
        setup, refused = self._setup, self._preloaded.ready["refused"]
        same = all(wanted[name] == setup[name] for name in setup if name not in ("agent_pid", "refused"))
        same = same and _of_user(wanted["env"]) == _of_user(self._env)
        return same and wanted["refused"].keys() <= refused.keys()


def _of_user(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without what differs from one run to the next."""
    return {name: text for name, text in env.items() if not name.startswith("GPULAUNCH_")}


def _open_fds() -> set[int]:
    listed = map(int, os.listdir("/proc/self/fd"))
    return {fd for fd in listed if os.path.exists(f"/proc/self/fd/{fd}")}  # but that of the list


if __name__ == "__main__":
    main()
