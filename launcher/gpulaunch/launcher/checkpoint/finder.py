"""The agent's way to a checkpoint: the search runs in a forked child, its answer arrives on the loop.

A search reads for as long as the checkpoint is large, imports what the agent must not (zlib, hashlib, pickletools,
fsspec with its threads), and a network file system may hold it for ever; the loop must not wait for any of that. The
child is a fork without exec. Measured on two shared virtual CPUs, a directory of four small checkpoints: `find` takes
1.2 ms, and 27 ms through here, nearly all of it the child's imports. It has nothing of the agent's: no descriptor but
its pipe, no signal handler, no cleanup at its end. It dies with the agent, and after its timeout.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from gpulaunch.launcher.checkpoint.find import Checkpoint, Search, Skipped
from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.loop.loop import Exit, Loop, Timer

COMM = "gpulaunch-find"
_ANSWER_CAP_BYTES = 64 << 20
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What to search for, as `find` and `examine` take it."""

    where: tuple[str, ...] = ()
    named: str | None = None
    """One named checkpoint to examine, instead of a search: found, or the only one skipped."""
    pattern: str | None = None
    limit: int = 1
    memory: str | None = None
    since_s: float | None = None
    timeout_s: float = 600.0


class Finder:
    """One search at a time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.pid: int | None = None
        """The child, while there is one."""
        self._done: Callable[[Search], None] | None = None
        self._read = -1
        self._answer = bytearray()
        self._timer: Timer | None = None
        self._error = ""

    def start(self, ask: Ask, done: Callable[[Search], None]) -> None:
        """Search; `done` is called once, from the loop, unless cancelled. A search under way is cancelled."""
        self.cancel()
        self._read, write = os.pipe2(os.O_CLOEXEC)
        # A signal between fork and reset would reach the agent's wakeup pipe from here as well.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        agent_pid = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                _search_and_exit(ask, write, agent_pid)
        except OSError as err:
            os.close(self._read)
            os.close(write)
            self._read = -1
            failed = Search(error=f"cannot start the search for a checkpoint: {os.strerror(err.errno or 0)}")
            self._loop.call_at(self._loop.now(), lambda: done(failed))
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(write)
        os.set_blocking(self._read, False)
        self.pid, self._done, self._answer, self._error = pid, done, bytearray(), ""
        self._loop.watch_read(self._read, self._on_news)
        self._loop.watch_pid(pid, self._on_exit)
        self._timer = self._loop.call_at(self._loop.now() + ask.timeout_s, lambda: self._on_late(ask.timeout_s))

    def cancel(self) -> None:
        """End the search, if one is under way; its `done` is never called."""
        self._done = None
        self._kill()
        self._end()

    def _on_news(self) -> None:
        self._take()

    def _take(self) -> bool:
        """Take what there is in the pipe; whether there can be more."""
        try:
            data = os.read(self._read, 1 << 20)
        except BlockingIOError:
            return False
        self._answer += data
        if len(self._answer) > _ANSWER_CAP_BYTES:
            self._error = "the search for a checkpoint found more than it can tell"
            self._kill()
        if not data:
            self._close()
        return bool(data)

    def _on_late(self, timeout_s: float) -> None:
        self._error = (
            f"the search for a checkpoint was ended after {timeout_s:.0f} s: is the storage slow or gone? "
            f"--resume PATH names one to go on from, --resume never starts anew"
        )
        self._kill()

    def _on_exit(self, exit_: Exit) -> None:
        if exit_.pid != self.pid:
            return  # one that was cancelled
        while self._read >= 0 and self._take():
            pass  # what it wrote before it ended
        self._end()
        done, self._done = self._done, None
        if done is not None:
            done(_understood(bytes(self._answer), exit_, self._error))

    def _kill(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own

    def _end(self) -> None:
        self._close()
        if self._timer is not None:
            self._timer.cancel()
        self.pid = None

    def _close(self) -> None:
        if self._read >= 0:
            self._loop.unwatch_read(self._read)
            os.close(self._read)
            self._read = -1


def _understood(answer: bytes, exit_: Exit, error: str) -> Search:
    """Read the child's answer; without one, say how it ended."""
    if not error:
        try:
            document: Any = json.loads(answer)
            return Search(
                found=tuple(Checkpoint(**one) for one in document["found"]),
                skipped=tuple(Skipped(**one) for one in document["skipped"]),
                error=document["error"],
            )
        except (ValueError, TypeError, KeyError):
            how = f"signal {exit_.signal}" if exit_.signal is not None else f"exit code {exit_.code}"
            error = f"the search for a checkpoint ended by {how} before it answered"
    return Search(error=error)


def _search_and_exit(ask: Ask, write: int, agent_pid: int) -> NoReturn:
    """What the child does. Signals are blocked; nothing of the agent's may run here, and nothing returns."""
    code = 1
    try:
        linux.die_with_parent(agent_pid)
        linux.set_comm(COMM)
        signal.set_wakeup_fd(-1)
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.SIG_DFL)
        for signum in _IGNORED:  # the agent's business, which ends this process when it is not wanted
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.dup2(write, 3, inheritable=False)  # first: where the agent's own were closed, the pipe may be one of 0..2
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.closerange(4, 1 << 20)
        _forget_agents_objects()
        _write_all(3, json.dumps(asdict(_search(ask))).encode())
        code = 0
    except BaseException as err:  # whatever it is, the agent hears of it
        with contextlib.suppress(BaseException):
            said = Search(error=f"the search for a checkpoint failed: {type(err).__name__}: {err}"[:500])
            _write_all(3, json.dumps(asdict(said)).encode())
    finally:
        os._exit(code)


def _search(ask: Ask) -> Search:
    from gpulaunch.launcher.checkpoint import find

    if ask.named is None:
        return find.find(ask.where, pattern=ask.pattern, limit=ask.limit, memory=ask.memory, since_s=ask.since_s)
    try:
        return Search(found=(find.examine(ask.named, memory=ask.memory),))
    except find.Damaged as why:
        return Search(skipped=(Skipped(path=ask.named, format="", why=str(why)),))


def _forget_agents_objects() -> None:
    """Never collect what the agent had made: its destructors would close descriptors that are this process's now."""
    import gc

    gc.freeze()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
