"""Starts torch's own trace client in this rank when a trace is requested, and not before.

torch includes a client of the dynolog daemon: two threads of Kineto, its profiler, which ask a socket every 5 s whether
there is something to trace, and trace it without Python. Where KINETO_USE_DAEMON is set, torch starts it at import.
That is not suitable here:

- The fork server imports torch for all ranks, and a forked rank loses threads.
- Every rank would have the threads and their socket all the time, for a trace that most jobs never make.

So a rank checks once a second whether the socket exists, which is one stat(), and then calls what torch would have
called: `torch::global_kineto_init`, exported from libtorch_cpu. From then on the client stays, and asks every 5 s.

The environment variables that Kineto reads are set for C only (putenv): neither the program nor the processes that it
starts must assume that there is a daemon.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from gpulaunch.profiler.channel import tracing
from gpulaunch.profiler.channel.layout import Hook

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.state import Probe
    from gpulaunch.profiler.probe.taps import Undo


TORCH_FLOOR: Final = (2, 7)
"""Before it, the client's threads race with the start of the program, and on a GPU wait for CUDA (kineto#1035)."""

_INIT: Final = "_ZN5torch18global_kineto_initEv"  # void torch::global_kineto_init()
_API: Final = "_ZN9libkineto3apiEv"  # libkineto::LibkinetoApi& libkineto::api()
_API_WORDS: Final = 3
"""What that begins with: the configuration (a reference), the profiler (a pointer, null until there is one), torch's
side of it (a pointer, set when torch is loaded)."""
_TEARDOWN_CUDA: Final = (12, 6)
"""From this version on CUPTI can be detached after a trace (pytorch#146604). Else it stays, and slows every step."""


class CannotTraceError(Exception):
    """This process cannot be traced; the message gives the reason to the requester."""


class TraceClient:
    """Checks whether a trace is requested, and then starts torch's client, once."""

    def __init__(self, torch: Any, directory: str, rank: int) -> None:
        self._torch = torch
        self._directory = directory
        self._rank = rank
        self._socket = tracing.socket_path(directory)
        self._settled = False

    def look(self) -> None:
        """Called about once a second by the training thread; raises nothing."""
        if self._settled or not os.path.exists(self._socket):
            return
        self._settled = True
        try:
            start(self._torch, self._directory)
        except Exception as error:  # a rank that cannot be traced continues to train
            with suppress(Exception):
                tracing.refuse(self._directory, self._rank, str(error) or repr(error))


def install(probe: Probe, torch: Any, undo: Undo) -> Hook:
    """Make this rank's probe check once a second. No tap is placed."""
    door = TraceClient(torch, os.environ["GPULAUNCH_CHANNEL_DIR"], int(os.environ["RANK"]))
    undo.append(probe.each_second(Hook(0), door.look))
    return Hook(0)


def start(torch: Any, directory: str) -> None:
    """Start torch's client of the socket in `directory`.

    Raises:
        CannotTraceError: it would not work, or it would not be safe.
    """
    _check(torch, directory)
    import ctypes

    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        # PyDLL: no other thread of the program runs meanwhile, so that none sees the environment or forks with it.
        library = ctypes.PyDLL(path)
        init, api = library[_INIT], library[_API]
    except (OSError, AttributeError):
        raise CannotTraceError(f"torch {torch.__version__} has no trace client at the expected place") from None
    api.argtypes, api.restype = [], ctypes.c_void_p
    init.argtypes, init.restype = [], None
    configuration, profiler, client = (ctypes.c_void_p * _API_WORDS).from_address(api())
    if not configuration or not client:
        raise CannotTraceError(f"the internals of Kineto in torch {torch.__version__} are not as expected")
    if profiler:
        # A second one would replace it, and would never be initialised.
        raise CannotTraceError("the program has used torch.profiler, and Kineto then accepts no requests from outside")
    with _environment(torch, directory):
        init()
    os.register_at_fork(after_in_child=_end_without_destructors)


def _check(torch: Any, directory: str) -> None:
    if _version(str(torch.__version__)) < TORCH_FLOOR:
        raise CannotTraceError(f"torch {torch.__version__} is older than {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]}")
    if "KINETO_USE_DAEMON" in os.environ:
        raise CannotTraceError("the program uses its own trace daemon (KINETO_USE_DAEMON is set)")
    if not tracing.fits(directory):
        raise CannotTraceError(f"the path of {directory} is too long for torch's socket")


@contextmanager
def _environment(torch: Any, directory: str) -> Generator[None]:
    """Set what Kineto reads from C's environment: the first two at its start, the others later, repeatedly."""
    os.putenv("KINETO_USE_DAEMON", "1")
    if "KINETO_LOG_LEVEL" not in os.environ:
        os.putenv("KINETO_LOG_LEVEL", "5")  # silent: otherwise each missing answer is a line on the rank's stderr
    os.putenv("KINETO_IPC_SOCKET_DIR", directory)
    os.putenv("KINETO_ONDEMAND_TRACE_DIR", directory)  # newer versions write only there
    if "TEARDOWN_CUPTI" not in os.environ and _version(str(torch.version.cuda)) >= _TEARDOWN_CUDA:
        os.putenv("TEARDOWN_CUPTI", "1")
    try:
        yield
    finally:
        os.unsetenv("KINETO_USE_DAEMON")
        if "KINETO_LOG_LEVEL" not in os.environ:
            os.unsetenv("KINETO_LOG_LEVEL")


def _end_without_destructors() -> None:
    """Make this child, if it exits as a C program does, exit before Kineto waits for threads that it does not have.

    A child of a Python rank ends by `os._exit` anyway (`loop.rank_end`); the child of another command may not, and
    would wait forever. torch.profiler leaves a program in the same state.
    """
    import ctypes

    with suppress(Exception):
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # called in reverse order of registration, with the exit code


def _version(text: str) -> tuple[int, int]:
    """`2.13.0+cpu` -> (2, 13); (0, 0) if it is not a version."""
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
