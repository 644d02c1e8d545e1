"""Inside a rank: writes the exception that ends it to torch's `error.json`; the user's script needs no decorator.

Standard library only. Nothing here may raise into the user's program, and nothing here changes what the user sees:
the traceback on stderr is still printed by the code that would have printed it.

Files, all next to `error_file` in the rank's own directory:

    error.json         the exception that ends the rank; an existing one by torch's `@record` stays
    exit.json          the same for a `sys.exit` with a status or a text: `@record` then leaves no error.json
    thread-error.json  the first exception that ended a thread: that does not end a rank, so it is evidence only
    fault.log          the Python stacks at a SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT (faulthandler)
    stacks.log         the Python stacks at each STACKS_SIGNAL, which the launcher sends to a rank that seems hung
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

VERSION = 1
EXIT_FILE = "exit.json"
THREAD_ERROR_FILE = "thread-error.json"
FAULT_FILE = "fault.log"
STACKS_FILE = "stacks.log"
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""A signal without any other known user; programs use SIGUSR1 and SIGUSR2 themselves."""

# Characters. An escaped one has at most 12 bytes, so a file stays under 1 MB and the agent can read it whole.
_MESSAGE_CAP = 8_192
_TRACEBACK_CAP = 65_536

_OUR_FRAMES = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RUNPY_FRAMES = ("<frozen runpy>", "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")

_armed_pid: int | None = None
_fault_fd = _stacks_fd = -1  # faulthandler keeps the number, not the file: keep it open as long as the process
_spare_fd = -1  # closed before the error file is written, which may need a descriptor


def arm(error_file: str) -> None:
    """Chain the exception hooks and start the fault log; call in the process that will be the rank, after its fork.

    Never raises. The user's own later `sys.excepthook` or `faulthandler.enable()` replaces ours, as it would replace
    Python's; the runner that catches the final exception itself calls `write_error_file`, so nothing is lost by that.
    """
    global _armed_pid, _spare_fd
    if not error_file:  # torchrun's way to say "no error files": --log-dir /dev/null
        return
    try:
        _armed_pid = os.getpid()
        error_file = os.path.abspath(error_file)  # the program may chdir
        if _spare_fd < 0:
            _spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        _chain_hooks(error_file)
        _start_fault_log(os.path.dirname(error_file))
        _start_stacks_log(os.path.dirname(error_file))
    except Exception:  # observing fails open: the program must run in any case
        return


def write_error_file(exc: BaseException, error_file: str) -> None:
    """Write `exc`, the exception that ends this rank, to `error_file`; the first writer wins. Never raises.

    A `SystemExit` goes to EXIT_FILE next to it; with status 0 it is a normal end without a file. A process forked by
    the rank (a dataloader worker, a helper of the user) writes nothing: the file belongs to the rank.
    """
    if not isinstance(exc, SystemExit):
        _write_words(exc, error_file)
    elif error_file and exit_status(exc) != 0:
        _write_words(exc, os.path.join(os.path.dirname(error_file), EXIT_FILE))


def exit_status(exc: BaseException) -> int:
    """Return the status that Python itself would exit with after `exc`; 130 for a KeyboardInterrupt, as in a shell."""
    if isinstance(exc, KeyboardInterrupt):
        return 130
    if not isinstance(exc, SystemExit):
        return 1
    if exc.code is None:
        return 0
    if not isinstance(exc.code, int):
        return 1
    return exc.code & 0xFF if -(1 << 63) <= exc.code < 1 << 63 else 255  # what does not fit a C long becomes -1


def user_traceback(exc: BaseException) -> TracebackType | None:
    """Return the traceback of `exc` from the first frame of the user's program on, as `python script.py` shows it."""
    frame = exc.__traceback__
    while frame is not None and _is_ours(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    if frame is None and not isinstance(exc, SyntaxError):  # a script that does not parse has no frame
        return exc.__traceback__
    return frame


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OUR_FRAMES) or filename in _RUNPY_FRAMES


def _chain_hooks(error_file: str) -> None:
    previous_hook, previous_thread_hook = sys.excepthook, threading.excepthook
    thread_file = os.path.join(os.path.dirname(error_file), THREAD_ERROR_FILE)

    def on_exception(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        write_error_file(exc, error_file)
        previous_hook(kind, exc, trace)

    def on_thread_exception(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            _write_words(args.exc_value, thread_file, thread=args.thread.name if args.thread else "")
        previous_thread_hook(args)

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception


def _start_fault_log(directory: str) -> None:
    global _fault_fd
    if faulthandler.is_enabled():  # the user's own, by PYTHONFAULTHANDLER or -X: its stacks go to stderr
        return
    _fault_fd = _open_log(directory, FAULT_FILE)
    faulthandler.enable(file=_fault_fd, all_threads=True)


def _start_stacks_log(directory: str) -> None:
    """Let the launcher request the stacks: faulthandler's handler is C, and works while the GIL is held."""
    global _stacks_fd
    if _stacks_fd < 0:
        _stacks_fd = _open_log(directory, STACKS_FILE)
        faulthandler.register(STACKS_SIGNAL, file=_stacks_fd, all_threads=True, chain=False)


def _open_log(directory: str, name: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(os.path.join(directory, name), flags, 0o600)


def _write_words(exc: BaseException, path: str, thread: str = "") -> None:
    before = _without_sigchld()
    try:
        if not path or _armed_pid not in (None, os.getpid()):
            return
        _give_back_spare_fd()
        _write_once(path, json.dumps(_words(exc, thread)).encode("ascii"))
    except (
        BaseException
    ):  # even a second Ctrl-C or a MemoryError: the rank is ending, and the way it ends must not change
        return
    finally:
        if before is not None:
            with contextlib.suppress(Exception):
                signal.signal(signal.SIGCHLD, before)


def _without_sigchld() -> Any:
    """Remove SIGCHLD's handler temporarily; return it, or None if there was none to remove.

    torch's raises, between any two instructions of the main thread, when a dataloader worker has died: just when a
    rank fails because of that, it would cut off the traceback or the whole file.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    for _ in range(8):  # setting a handler runs the old one first, if the signal is pending: it raises here
        try:
            if not callable(signal.getsignal(signal.SIGCHLD)):
                return None
            return signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except Exception:  # noqa: S112 - see above
            continue
    return None


def _give_back_spare_fd() -> None:
    """Close it, unless the program has closed all descriptors and the number now belongs to its own file."""
    global _spare_fd
    fd, _spare_fd = _spare_fd, -1
    with contextlib.suppress(OSError):
        if fd >= 0 and os.path.samestat(os.fstat(fd), os.stat(os.devnull)):
            os.close(fd)


def _words(exc: BaseException, thread: str) -> dict[str, object]:
    """Describe `exc` in torch's layout; torch's reader wants `timestamp` as a string of whole seconds."""
    kind = type(exc).__name__
    extra: dict[str, object] = {
        "py_callstack": _cap(_callstack(exc), _TRACEBACK_CAP),
        "timestamp": str(int(time.time())),
        "version": VERSION,
        "type": kind,
        "module": str(type(exc).__module__),
        "pid": os.getpid(),
        "wall_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
    }
    if thread:
        extra["thread"] = thread
    return {"message": {"message": f"{kind}: {_cap(_text(exc), _MESSAGE_CAP)}", "extraInfo": extra}}


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # a user's __str__ that raises; Python prints the same text
        return "<exception str() failed>"


def _callstack(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(exc), exc, user_traceback(exc)))
    except (
        Exception
    ):  # out of memory or stack, or an exception object that breaks the formatter: the message is still available
        return ""


def _cap(text: str, limit: int) -> str:
    """Keep both ends of a text that is too long: a traceback says where at its start and what at its end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _write_once(path: str, data: bytes) -> None:
    """Write `path` atomically, and never over an existing file."""
    part = f"{path}.{os.getpid()}-{threading.get_ident()}"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        try:
            os.link(part, path)  # unlike rename, link fails if the name exists
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            if not os.path.lexists(path):
                os.rename(part, path)
    finally:
        if os.path.lexists(part):
            os.unlink(part)
