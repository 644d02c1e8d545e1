"""elastic_launch on gpulaunch's engine, the caller's side: starts an agent, waits for it, returns the result."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import Any

from gpulaunch.compat import function_call
from gpulaunch.compat.agent import VERSION, read_all
from gpulaunch.compat.config import LaunchConfig, options_of

_COPY_S = 2.0
"""Time to read the rest of the output, once the agent has ended."""

Entrypoint = Callable[..., Any] | str


class elastic_launch:  # noqa: N801 (torch's name)
    """Run a function or a command on all ranks of this node: `elastic_launch(config, train)(arg)`.

    Returns {global rank: return value} of this node's ranks (None each for a command). Raises torch's ChildFailedError
    when ranks fail, its SignalException when a signal ended the job, and ValueError for an invalid job.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Entrypoint | None, health_check_server: object = None) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run it with these arguments."""
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script within this interpreter, as `--run-path` does in each rank."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(sys.argv[0], run_name="__main__")


def launch_agent(
    config: LaunchConfig, entrypoint: Entrypoint | None, args: Sequence[Any], health_check_server: object = None
) -> dict[int, Any]:
    """Run `entrypoint(*args)` on all ranks of this node; see `elastic_launch`."""
    if health_check_server is not None:
        raise ValueError("health_check_server is not supported: query the metrics address, or wait for this call")
    if entrypoint is None:
        raise ValueError("nothing to run: the entrypoint is None; pass a function or a command")
    if not config.run_id:
        config.run_id = str(uuid.uuid4().int)
    with _call_dir(entrypoint) as call_dir:
        if call_dir:
            assert not isinstance(entrypoint, str), "a command needs no directory"
            function_call.pack(call_dir, entrypoint, args)
        request = {
            "version": VERSION,
            "options": {**options_of(config), **_program(entrypoint, args)},
            "call_dir": call_dir,
            "argv": sys.argv,
            "main": str(getattr(sys.modules["__main__"], "__file__", None) or ""),
        }
        answer = _ask_agent(request, config.signals_to_handle.split(","))
        _raise_for(answer, _entrypoint_name(entrypoint, args))
        return {rank: function_call.value(call_dir, rank) if call_dir else None for rank in answer["ranks"]}


@contextlib.contextmanager
def _call_dir(entrypoint: Entrypoint) -> Generator[str]:
    """A private directory for the call of a function; "" for a command."""
    if isinstance(entrypoint, str) or entrypoint is run_script_path:
        yield ""
        return
    call_dir = tempfile.mkdtemp(prefix="gpulaunch-call-")
    try:
        yield call_dir
    finally:
        shutil.rmtree(call_dir, ignore_errors=True)


def _program(entrypoint: Entrypoint, args: Sequence[Any]) -> dict[str, Any]:
    """What to run, as options. `python -u [-m] PROGRAM` is recognised, and so starts as fast as a script."""
    words = [str(arg) for arg in args]
    if entrypoint is run_script_path:
        return _command(words[0], words[1:], run_path=True)
    if not isinstance(entrypoint, str):
        return _command(function_call.name_of(entrypoint), [], module=True)  # a name to import, and no file to look for
    if _is_our_python(entrypoint):
        rest = words
        while rest[:1] == ["-u"]:  # ranks never buffer
            rest = rest[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            return _command(rest[1], rest[2:], module=True)
        if rest and not rest[0].startswith("-"):
            return _command(rest[0], rest[1:])
    return _command(entrypoint, words, no_python=True)


def _command(
    program: str, args: list[str], *, module: bool = False, no_python: bool = False, run_path: bool = False
) -> dict[str, Any]:
    return {
        "training_script": program,
        "training_script_args": args,
        "module": module,
        "no_python": no_python,
        "run_path": run_path,
    }


def _is_our_python(command: str) -> bool:
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return command == python or shutil.which(command) == python


def _entrypoint_name(entrypoint: Entrypoint, args: Sequence[Any]) -> str:
    """As torch names it: the function, the script that a Python runs, or the command."""
    if not isinstance(entrypoint, str):
        return str(args[0]) if entrypoint is run_script_path else function_call.name_of(entrypoint)
    if _is_our_python(entrypoint):
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return entrypoint


# -- the agent


def _ask_agent(request: dict[str, Any], signal_names: Sequence[str]) -> dict[str, Any]:
    """Have an agent run the job; see `agent` for the messages. Returns, or raises, only when the agent has ended."""
    ours, theirs = socket.socketpair()
    with ours, contextlib.ExitStack() as copies:
        with theirs, contextlib.ExitStack() as pipes:
            teed = [_teed(request["options"]["tee"], fd, pipes, copies) for fd in (1, 2)]
            agent = subprocess.Popen(
                [sys.executable, "-P", "-m", "gpulaunch.compat.agent", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdout=teed[0],
                stderr=teed[1],
                # A separate session: Ctrl-C reaches the caller, which forwards it once.
                start_new_session=True,
            )
        try:
            with _forwarded(agent, signal_names) as received:
                with contextlib.suppress(OSError):  # it has exited, as the end of the stream will show
                    ours.sendall(json.dumps(request).encode())
                    ours.shutdown(socket.SHUT_WR)
                said = read_all(ours)
                code = agent.wait()
        except BaseException as interruption:  # KeyboardInterrupt, or what a signal handler of the caller raises
            _end(agent, signal.SIGINT if isinstance(interruption, KeyboardInterrupt) else signal.SIGTERM)
            raise
    if received:
        return {"code": 128 + received[0]}
    if not said:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return {"code": 1, "error": f"the process that runs the job {how}; its ranks have been ended"}
    answer: dict[str, Any] = json.loads(said)
    return answer


def _teed(tee: str, fd: int, pipes: contextlib.ExitStack, copies: contextlib.ExitStack) -> int | None:
    """A pipe into the caller's `sys.stdout` or `sys.stderr`, or None where the agent may write to `fd` itself.

    torch copies teed lines to these objects, which in a notebook or a test are not the descriptors. `pipes` closes the
    agent's end, `copies` reads the rest of the output.
    """
    stream: Any = sys.stdout if fd == 1 else sys.stderr
    streams = [part.rpartition(":")[2] for part in tee.split(",")]
    if stream is None or not any(each.isdecimal() and int(each) & fd for each in streams):
        return None
    with contextlib.suppress(AttributeError, OSError, ValueError):  # ValueError: closed
        if stream.fileno() == fd:
            return None
    read_fd, write_fd = os.pipe()
    pipes.callback(os.close, write_fd)
    copy = threading.Thread(target=_copy, args=(read_fd, stream), name=f"gpulaunch-tee-{fd}", daemon=True)
    copy.start()
    # A process that the ranks left running may hold it for any length of time.
    copies.callback(copy.join, _COPY_S)
    return write_fd


def _copy(fd: int, stream: Any) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while data := pipe.read(1 << 16):
            with contextlib.suppress(Exception):  # the caller's own object may raise: keep reading, or the ranks block
                stream.write(decoder.decode(data))
                stream.flush()


def _end(agent: subprocess.Popen[bytes], signum: int) -> None:
    """Ask the agent to end and wait for it, at most for its grace; a second interruption cuts the wait short."""
    while agent.returncode is None:
        try:
            agent.send_signal(signum)
            agent.wait()
        except BaseException:  # noqa: S112 (the first interruption is raised again when the ranks are gone)
            continue


@contextlib.contextmanager
def _forwarded(agent: subprocess.Popen[bytes], signal_names: Sequence[str]) -> Generator[list[int]]:
    """Forward the signals that would end this process, and collect them. The caller's own handlers stay."""
    received: list[int] = []

    def forward(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        agent.send_signal(signum)

    ours: list[signal.Signals] = []
    try:
        if threading.current_thread() is threading.main_thread():  # Python can set handlers only there
            known = signal.Signals.__members__
            for signum in (known[name.strip()] for name in signal_names if name.strip() in known):
                if signal.getsignal(signum) is signal.SIG_DFL and signum not in (signal.SIGKILL, signal.SIGSTOP):
                    signal.signal(signum, forward)
                    ours.append(signum)
        yield received
    finally:
        for signum in ours:
            signal.signal(signum, signal.SIG_DFL)


# -- the result


def _raise_for(answer: dict[str, Any], name: str) -> None:
    """Raise what torch would raise for a job that ended like this; nothing for a success."""
    if answer.get("refused"):
        raise ValueError(answer["refused"])
    if answer.get("broken"):
        raise RuntimeError(f"gpulaunch: internal error: {answer['broken']}; please report")
    code, failures = answer["code"], answer.get("failures", [])
    if code == 0 and "ranks" in answer:
        return
    if code > 128 and not failures:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        sigval = signal.Signals(code - 128)
        raise SignalException(f"Process {os.getpid()} got signal: {sigval.name}; all ranks have ended", sigval=sigval)
    if failures:
        raise child_failed_error(failures, name)
    raise RuntimeError(answer.get("error") or f"the job ended with code {code}")


def child_failed_error(failures: Sequence[dict[str, Any]], name: str) -> Exception:
    """torch's ChildFailedError, in which the first cause is the first failure."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    found: dict[int, Any] = {}
    for each in failures:
        facts = {key: each[key] for key in ("local_rank", "pid", "exitcode")}
        try:
            failure = ProcessFailure(**facts, error_file=each["error_file"])
        except Exception:  # torch cannot parse the error file that the program wrote
            failure = ProcessFailure(**facts, error_file="")
        if failure.error_file != each["error_file"]:
            failure.timestamp = int(each["wall_time_s"])
        found[each["rank"]] = failure
    # torch takes the lowest timestamp, in whole seconds, for the first cause: the agent's order is exact.
    first = found[failures[0]["rank"]]
    first.timestamp = min(failure.timestamp for failure in found.values())
    error: Exception = ChildFailedError(name, found)
    return error
