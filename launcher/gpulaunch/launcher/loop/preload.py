"""What the fork server imports before it forks, and the checks that make it safe. Standard library only.

Third-party packages are imported in a fork of the fork server first ("trial"): if they pass the checks, the trial
BECOMES the fork server and the old one exits; if not, the trial exits without any effect.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import sys
from collections.abc import Generator, Set
from typing import Any

from gpulaunch.launcher.loop import import_state, linux
from gpulaunch.launcher.loop.import_watch import Watch
from gpulaunch.launcher.loop.preload_finder import PreloadFinder

# A package that reads one of these at import time would fix one rank's value for all: lightning does.
PER_RANK_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    )
)


_PRINTED_BYTES = 1 << 20


class CapturedOutput:
    """Captures the output of imports: the ranks show it, since each of them would have printed it.

    Otherwise it would appear once, as if from the launcher, and twice where ranks import for themselves.
    """

    def __init__(self) -> None:
        """Capture stdout and stderr from now on."""
        self._real = [os.dup(fd) for fd in (1, 2)]
        self._kept = [os.memfd_create(f"gpulaunch-printed-{fd}") for fd in (1, 2)]
        for fd, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, fd)

    def sizes(self) -> list[int]:
        """The number of bytes captured of each."""
        return [os.fstat(kept).st_size for kept in self._kept]

    def forget_since(self, sizes: list[int]) -> None:
        """Drop what was captured since: the package that printed it is left to the ranks."""
        for kept, size in zip(self._kept, sizes, strict=True):
            os.ftruncate(kept, size)
            os.lseek(kept, size, os.SEEK_SET)

    def end(self) -> tuple[bytes, bytes]:
        """Restore stdout and stderr; return what was printed to each."""
        out, err = (os.pread(kept, _PRINTED_BYTES, 0) for kept in self._kept)
        for fd, real, kept in zip((1, 2), self._real, self._kept, strict=True):
            os.dup2(real, fd)
            os.close(real)
            os.close(kept)
        return out, err


def open_sockets() -> set[str]:
    """The sockets that this process holds, by the kernel's names."""
    return {link for link in _open_links() if link.startswith("socket:")}


def _open_links() -> list[str]:
    links: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return links


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def unsafe_to_fork(sockets_before: set[str], asked: Set[str]) -> str:
    """Why children of this process could not train, or "": the checks after an import that read variables."""
    if any(link.startswith("/dev/nvidia") for link in _open_links()):
        return "it opened the GPU driver, which a forked child cannot use"
    opened = open_sockets() - sockets_before
    if opened:
        return f"it opened {len(opened)} socket(s), which all ranks would share"
    if _num_threads() > 1:
        # OpenBLAS and libgomp end their threads before a fork and start them again after: then one is left.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if _num_threads() > 1:
            return f"it left {_num_threads() - 1} thread(s) running, which a forked child would lose"
    read = sorted(asked & PER_RANK_VARIABLES)
    if read:
        return f"it reads {', '.join(read)} while it is imported, so all ranks would get the same values"
    return ""


@contextlib.contextmanager
def _set_num_threads_noted(torch: Any, calls: list[Any]) -> Generator[None]:
    """Record calls of torch.set_num_threads in `calls`.

    It makes a thread pool (caffe2/utils/threadpool/pthreadpool-cpp.cc), which the first thread to use it in a forked
    child replaces, without a lock: of several threads that autograd starts at once, one may find none ("Invalid thread
    pool!", pytorch/pytorch#178535). A fork server that has made one forks no rank.
    """
    plain = getattr(torch, "set_num_threads", None)
    if plain is None:
        yield
        return

    def set_num_threads(count: int) -> None:
        calls.append(count)
        plain(count)

    torch.set_num_threads = set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = plain


def _import_all(names: list[str], tell: int, watch: Watch, before_torch: Set[str], of_a_rank: Set[str]) -> bool:
    """Import each, writing to the pipe `tell` which one is next and why one must not be shared. True if all may be.

    A package that cannot be imported is left to the ranks: the program's own traceback explains it better.
    """
    sockets_before = open_sockets()
    preload_finder = PreloadFinder(
        watch.packages
    )  # as in a rank: some packages behave differently if torch is loaded before
    preload_finder.fill(frozenset())
    for name in names:
        if name not in before_torch:
            importlib.import_module("torch")
        os.write(tell, f"{name}\n".encode())
        why = ""
        gc.freeze()  # objects not frozen afterwards were made by this import
        before, hooks_before = import_state.Before(), preload_finder.import_hooks()
        threads_set: list[Any] = []
        try:
            with watch.importing(name, keeps=True), _set_num_threads_noted(preload_finder.module("torch"), threads_set):
                importlib.import_module(name)
        except BaseException as problem:  # an import may raise anything, SystemExit included
            why = f"importing it raised {type(problem).__name__}"
        if threads_set:
            why = why or "it calls torch.set_num_threads, and torch's thread pool does not survive a fork"
        why = why or unsafe_to_fork(sockets_before, watch.asked) or import_state.for_one_process(before)
        if preload_finder.import_hooks() != hooks_before:
            why = why or "it installs an import hook"
        if not why and (told := sorted(watch.asked & of_a_rank)):
            why = f"it reads {', '.join(told)} while it is imported, which only ranks have"
        if why:
            os.write(tell, f": {why}\n".encode())
            return False
    preload_finder.empty()
    os.write(tell, b"all\n")
    return True


def third_party(
    names: list[str],
    agent_pid: int,
    printed: CapturedOutput,
    watch: Watch,
    *,
    before_torch: Set[str],
    of_a_rank: Set[str],
) -> tuple[list[str], dict[str, str]]:
    """Import `names` in trials until those left pass; return what is loaded and what was refused, with the reason.

    `before_torch`: those of them that the program imports first; `of_a_rank`: variables that all ranks have and this
    process does not.

    On return the process may not be the caller's: it may be a trial that passed.
    """
    refused: dict[str, str] = {}
    wanted = list(names)
    while wanted:
        gc.freeze()
        original, sizes = os.getpid(), printed.sizes()
        read, tell = os.pipe()
        trial = os.fork()
        if trial == 0:
            os.close(read)
            if not _import_all(wanted, tell, watch, before_torch, of_a_rank):
                os._exit(0)
            os.close(tell)
            wait_until_orphaned(original)
            linux.die_with_parent(agent_pid)
            return wanted, refused
        os.close(tell)
        with os.fdopen(read, encoding="utf-8") as pipe:
            *before, last = pipe.read().splitlines() or [wanted[0]]
        if last == "all":
            os._exit(0)  # the trial continues instead
        os.waitpid(trial, 0)
        printed.forget_since(sizes)
        bad, why = (before[-1], last[2:]) if last.startswith(": ") else (last, "importing it ended the process")
        refused[bad] = why
        wanted.remove(bad)
    return [], refused


def wait_until_orphaned(parent: int) -> None:
    """Wait, 10 s at most, until the process that forked this one has ended."""
    pidfd = -1
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(parent) if os.getppid() == parent else -1
    if pidfd >= 0:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(10_000)
        os.close(pidfd)
    # A pidfd is readable when its process has become a zombie, which is after its children were re-parented.


@contextlib.contextmanager
def environment(settings: dict[str, str]) -> Generator[None]:
    """Apply what the program will set before its imports during the preload; ranks set it themselves."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def import_torch(with_dynamo: bool, watch: Watch) -> str:
    """Import torch (and what DDP imports lazily); return why not, or ""."""
    # With this set, torch asks NVML instead of the driver whether there are GPUs, so that no cuInit happens here.
    # Dynamo's import sets TORCHINDUCTOR_CACHE_DIR; a rank that never compiles should not inherit it.
    try:
        with environment({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}), watch.importing("torch", keeps=False):
            importlib.import_module("torch")
            # DistributedDataParallel.__init__ imports torch._dynamo: 1.4 s once here, or in every rank at once.
            for name in ("torch._dynamo", "torch.distributed", "torch.nn.parallel") if with_dynamo else ():
                importlib.import_module(name)
    except BaseException as problem:  # leave a broken torch to the ranks, which show their own traceback
        return f"importing torch raised {type(problem).__name__}: {problem}"
    return ""


def take_finalizers() -> list[Any]:
    """Keep the ranks from finalizing at exit what was made before the fork: the first would do it for all.

    Return the finalizers that leave something on disk; the fork server runs them at its own exit.
    """
    import weakref

    taken: list[Any] = []
    with contextlib.suppress(Exception):  # private, and ranks also exit without it; see test_preload
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False
            alive = finalizer.peek()
            if alive is not None and alive[1].__module__ == "tempfile":
                taken.append(finalizer)
    return taken


def import_rank_modules() -> None:
    """Import what every rank needs of this package; a rank runs without anything that is missing."""
    modules = (
        "launcher.loop.rank_main",
        "launcher.loop.restart_plain",
        "launcher.failure.inside",
        "profiler.channel.segment",
        *(f"profiler.probe.{name}" for name in ("inject", "hooks", "state", "teardown", "tempdir")),
        "mark",
    )
    standard = ("atexit", "importlib.machinery", "runpy", "threading")
    for name in (*(f"gpulaunch.{module}" for module in modules), *standard):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    with contextlib.suppress(Exception):  # takes 8 ms, in each rank again after every restart
        cost = importlib.import_module("gpulaunch.profiler.probe.cost")
        cost.call_ns(sys.modules["torch"].compiler.is_dynamo_compiling)
