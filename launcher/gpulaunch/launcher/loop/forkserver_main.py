"""The fork server: imports torch once, unless nothing needs it, and forks ranks. `python -u forkserver_main.py <fd>`.

It never touches CUDA, has one thread, and itself imports only the standard library. The messages on its socket
(inherited, one stream, each message a 4-byte length and JSON, descriptors by SCM_RIGHTS):

    (setup)  agent -> it   what to import
    ready    it -> agent   what was preloaded, what was left to the ranks and why, this process's pid
    start    agent -> it   one message with the ranks of an attempt, then the descriptors of all, in order
    started  it -> agent   the pid of every rank, in order, and of the store

Ranks must be children of the agent, so that it can wait for them and they die with it: the fork server forks a
middle process, which forks all ranks of the attempt and ends; its orphans go to the nearest subreaper, the agent.

What is preloaded, and the checks that ranks can share it, are in `preload.py`.
"""

from __future__ import annotations

import sys

# What the interpreter itself has loaded, before anything below, and before a trial server, which imports this module.
_AT_START = frozenset(name for name in sys.modules if name.partition(".")[0] != "gpulaunch")

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import struct
import threading
from typing import Any, NamedTuple, NoReturn

_HEADER = struct.Struct("<I")
_MAX_FDS = 200  # SCM_MAX_FD is 253; see unix(7)
FDS_PER_RANK = 3  # stdout, stderr, and the pipe that reports its restart

INHERITED = "GPULAUNCH_FORK_SERVER"
"""The agent's variable with a socket's descriptor, a comma and a pid: a fork server that is its child already."""

_preload_finder: Any = None  # a PreloadFinder, once everything has been imported
_in_force: dict[str, str] = {}  # what the program is expected to set before its imports


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send one message, then its descriptors in chunks, each attached to one filler byte."""
    body = json.dumps(message).encode()
    sock.sendall(_HEADER.pack(len(body)) + body)
    for at in range(0, len(fds or []), _MAX_FDS):
        socket.send_fds(sock, [b"f"], (fds or [])[at : at + _MAX_FDS])


def _answer(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send to the agent; exit if the agent is gone."""
    try:
        send(sock, message)
    except OSError:
        os._exit(0)


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """Receive one message; None at the end of the stream."""
    header = _exactly(sock, _HEADER.size)
    if header is None:
        return None
    body = _exactly(sock, _HEADER.unpack(header)[0])
    message: dict[str, Any] | None = None if body is None else json.loads(body)
    return message


def receive_fds(sock: socket.socket, count: int) -> list[int]:
    """Receive the `count` descriptors that follow a message."""
    fds: list[int] = []
    while len(fds) < count:
        filler, got, _, _ = socket.recv_fds(sock, 1, _MAX_FDS)
        if not filler:
            raise EOFError("the agent closed its socket in the middle of a message")
        fds += got
    return fds


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    got = b""
    while len(got) < size:
        piece = sock.recv(size - len(got))
        if not piece:
            return None
        got += piece
    return got


# -- starting


def _start(request: dict[str, Any], fds: list[int], sock: socket.socket) -> None:
    """Fork the store and the ranks of one attempt through one middle process, and report their pids."""
    go_read, go_write = os.pipe()
    pids_read, pids_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        _middle(request, fds, sock, go_read, go_write, pids_read, pids_write)
    os.close(pids_write)
    os.close(go_read)
    for fd in fds:
        os.close(fd)
    with os.fdopen(pids_read, "rb") as pipe:
        told = pipe.read()
    os.waitpid(middle, 0)
    pids = json.loads(told) if told else {"error": "the middle process died before it reported the pids"}
    _answer(sock, {"op": "started", **pids})
    # Only now are the ranks children of the agent, which learns their pids before they begin.
    os.close(go_write)


def _middle(
    request: dict[str, Any],
    fds: list[int],
    sock: socket.socket,
    go_read: int,
    go_write: int,
    pids_read: int,
    pids_write: int,
) -> NoReturn:
    """Fork every rank, report their pids, and exit: the ranks become children of the agent."""
    os.close(go_write)
    os.close(pids_read)
    told: dict[str, Any] = {"store": None, "pids": []}
    try:
        sock_fd = sock.fileno()
        if request["store"] is not None:
            pid = os.fork()
            if pid == 0:
                _run_child(lambda: _store(request["store"], fds[0]), [pids_write, sock_fd, *fds[1:]], go_read, request)
            told["store"] = pid
        at = 0 if request["store"] is None else 1
        for rank in request["ranks"]:
            mine = fds[at : at + FDS_PER_RANK]
            at += FDS_PER_RANK
            pid = os.fork()
            if pid == 0:
                others = [fd for fd in fds if fd not in mine]
                _run_child(lambda: _rank(rank, mine, request), [pids_write, sock_fd, *others], go_read, request)  # noqa: B023
            told["pids"].append(pid)
    except OSError as err:
        told["error"] = f"fork: {err.strerror}"
    os.write(pids_write, json.dumps(told).encode())
    os._exit(0)


def _run_child(work: Any, close: list[int], go_read: int, request: dict[str, Any]) -> NoReturn:
    """The start of every forked child: close other ranks' descriptors, make a session, bind it to the agent."""
    try:
        for fd in close:
            os.close(fd)
        os.setsid()
        os.read(go_read, 1)  # end of file: the middle process has been reaped, so the agent is now the parent
        os.close(go_read)
        _die_with(request["agent_pid"])
        if not request["sigint_ignored"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


def _rank(rank: dict[str, Any], fds: list[int], request: dict[str, Any]) -> NoReturn:
    """Become one rank: its environment, stdio, CPUs, name, randomness; then the user's program."""
    from gpulaunch.launcher.loop import linux, rank_main, restart_plain

    *stdio, restart_notice_fd = fds
    os.dup2(stdio[0], 1)
    os.dup2(stdio[1], 2)
    for fd in stdio:
        os.close(fd)
    os.set_inheritable(restart_notice_fd, False)
    os.environ.update(rank["env"])
    if rank["affinity"]:
        os.sched_setaffinity(0, rank["affinity"])
    if request["tracer_pid"]:
        linux.allow_ptrace_by(request["tracer_pid"])
    linux.set_comm(request["comm"])
    linux.set_cmdline(rank["title"])
    with contextlib.suppress(Exception):  # Python 3.11 keeps the fork server's id
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    _reseed()
    _renew_autograd()
    for fd, text in zip((1, 2), request["printed"], strict=True):
        while text:
            text = text[os.write(fd, text) :]
    if _preload_finder is not None:
        _preload_finder.arm(
            {**os.environ, **_in_force},
            again=restart_plain.RestartPlain(rank["program"], restart_notice_fd),
            on_torch=rank_main.arm_probe,
        )
    rank_main.run(rank["program"], _AT_START)


def _reseed() -> None:
    """Reseed from system entropy, as a program started by itself has; Python's `random` does it after a fork."""
    from gpulaunch.launcher.loop import import_state

    import_state.renew()
    if _preload_finder is not None:
        with contextlib.suppress(Exception):
            _preload_finder.module("numpy.random").seed()
        with contextlib.suppress(Exception):
            # torch seeds its CPU generator from the system at load time (CUDA's has a constant seed).
            _preload_finder.module("torch").default_generator.seed()


def _renew_autograd() -> None:
    """Have torch recreate its autograd engine while there is one thread.

    In a forked process the first backward does so, and if several threads begin at once, one may find another's engine
    half made: SIGSEGV in Engine::add_thread_pool_task in 9 of 1,400 children, with this in none of 1,000 (torch 2.13,
    torch/csrc/autograd/python_engine.cpp). Any query to the engine is enough; it starts no thread.
    """
    if _preload_finder is not None:
        with contextlib.suppress(Exception):
            _preload_finder.module("torch.autograd")._is_checkpoint_valid()


def _store(store: dict[str, Any], listen_fd: int) -> NoReturn:
    """Serve one attempt's TCPStore on the socket that the agent bound, until the agent kills this process."""
    from gpulaunch.launcher.loop import linux

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a job manager may send it to all; the ranks need the store to save
    linux.set_comm("gpulaunch-store")
    linux.set_cmdline(["gpulaunch: store"])
    if _preload_finder is None or _preload_finder.module("torch") is None:
        import select

        select.select([listen_fd], [], [])  # the program seems not to use torch: perhaps there is never a connection
    distributed = importlib.import_module("torch.distributed")
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listen_fd}
    try:
        server = distributed.TCPStore(store["host"], store["port"], use_libuv=True, **options)
    except NotImplementedError:
        # Up to torch 2.6 the libuv server cannot take over a socket; the older server speaks the same protocol.
        server = distributed.TCPStore(store["host"], store["port"], use_libuv=False, **options)
    while server.port:  # which also keeps it alive
        signal.pause()
    os._exit(0)


def _die_with(agent_pid: int) -> None:
    from gpulaunch.launcher.loop import linux

    linux.die_with_parent(agent_pid)


# -- the server


class Preloaded(NamedTuple):
    """What a fork server has imported, and what its ranks get of that."""

    ready: dict[str, Any]
    """What it answers: torch, problem, loaded, refused."""
    of_ranks: dict[str, Any]
    """What a rank needs beside the request: sigint_ignored, comm, printed."""
    finalizers: list[Any]
    """Of what was made on disk."""

    def finalize(self) -> None:
        """Remove what was made on disk: no rank will need it."""
        for finalizer in self.finalizers:
            with contextlib.suppress(Exception):
                finalizer()


def preload(setup: dict[str, Any]) -> Preloaded:
    """Import what the first message says, as long as ranks can share it.

    It has: agent_pid, torch (bool), dynamo (bool), packages (list), refused (package -> why, from earlier runs),
    environment (what the program sets before it imports torch), before_torch (packages that it imports first),
    of_a_rank (variables that ranks have and this process does not).

    On return the process may not be the caller's: it may be a trial that passed.
    """
    global _preload_finder
    from gpulaunch.launcher.loop import import_state, linux, preload
    from gpulaunch.launcher.loop.import_watch import Watch
    from gpulaunch.launcher.loop.preload_finder import PreloadFinder

    _die_with(setup["agent_pid"])
    comm = linux.comm_of(os.getpid())
    linux.set_comm("gpulaunch-fork")
    # The agent handles Ctrl-C in the terminal; the ranks get back what this process was started with.
    sigint_ignored = signal.signal(signal.SIGINT, signal.SIG_IGN) == signal.SIG_IGN
    gc.disable()  # imports make no garbage; the collector takes a tenth of the time of importing torch
    sockets_before = preload.open_sockets()
    loaded: list[str] = []
    refused: dict[str, str] = dict(setup["refused"])
    printed = preload.CapturedOutput()
    _in_force.update(setup["environment"])
    watch = Watch()
    with preload.environment(setup["environment"]), import_state.watching():
        problem = preload.import_torch(setup["dynamo"], watch) if setup["torch"] else ""
        problem = problem or preload.unsafe_to_fork(sockets_before, frozenset())
        if not problem:
            wanted = [name for name in setup["packages"] if name not in refused and name not in sys.modules]
            loaded, newly = preload.third_party(
                wanted,
                setup["agent_pid"],
                printed,
                watch,
                before_torch=frozenset(setup["before_torch"]),
                of_a_rank=frozenset(setup["of_a_rank"]),
            )
            refused.update(newly)
    has_torch = "torch" in sys.modules
    preload.import_rank_modules()
    said = printed.end()
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].__dict__["tempdir"] = (
            None  # where temporary files go is still the program's choice: TMPDIR
        )
    _preload_finder = PreloadFinder(watch.packages)
    _preload_finder.fill(_AT_START)
    # Live objects are shared with the ranks: keep the collector from writing to their pages. No collection before: it
    # adds 0.2 s to every start and finds next to nothing among modules.
    gc.freeze()
    gc.enable()
    return Preloaded(
        ready={"torch": has_torch, "problem": problem, "loaded": loaded, "refused": refused},
        of_ranks={"sigint_ignored": sigint_ignored, "comm": comm, "printed": said},
        finalizers=preload.take_finalizers(),
    )


def serve(sock: socket.socket, preloaded: Preloaded) -> NoReturn:
    """Report what is preloaded, then start attempts until the agent closes the socket."""
    _answer(sock, {"op": "ready", "pid": os.getpid(), **preloaded.ready})
    while (request := receive(sock)) is not None:
        _start(request | preloaded.of_ranks, receive_fds(sock, request["num_fds"]), sock)
    preloaded.finalize()
    os._exit(0)


def main() -> None:
    """Entry point: the one argument is the socket's number, padded with spaces: room for the ranks' command lines."""
    fd = int(sys.argv[1])
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.argv = [""]
    sock = socket.socket(fileno=fd)
    if (setup := receive(sock)) is not None:
        serve(sock, preload(setup))


if __name__ == "__main__":
    main()
