"""Classifies how a rank ended: a table of rules, first match wins, and one sentence of advice for each kind.

The most important distinction is between a cause and an echo. When one rank dies, all the others lose a connection and
die of that a moment later: their errors are correct, numerous and useless. Kind.PEER is the echo. Its rules match only
messages of the communication libraries: a plain `ConnectionResetError` is no echo (a dead DataLoader worker or a failed
download raises one too), and a gloo error about sizes that differ is a bug of the program.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from enum import Enum

from gpulaunch.launcher.failure.ends import SHM, RankEnd
from gpulaunch.profiler.xid import PROGRAM_XIDS


class Kind(Enum):
    """What ended a rank; the value is its name in failure.json."""

    EXCEPTION = "exception"
    SYNTAX = "syntax"
    IMPORT = "import"
    PEER = "peer"
    LOADER_WORKER = "loader_worker"
    GPU_OOM = "gpu_oom"
    GPU_FAULT = "gpu_fault"
    GPU_HARDWARE = "gpu_hardware"
    HOST_OOM = "host_oom"
    SHM_FULL = "shm_full"
    DISK_FULL = "disk_full"
    PORT_IN_USE = "port_in_use"
    SEGFAULT = "segfault"
    BUS_ERROR = "bus_error"
    ABORT = "abort"
    SIGNAL = "signal"
    INTERRUPT = "interrupt"
    EXIT_CODE = "exit_code"
    EARLY_EXIT_0 = "early_exit_0"
    HANG = "hang"
    PREEMPTED = "preempted"
    CHECKPOINT_IN_USE = "checkpoint_in_use"
    STOPPED = "stopped"
    NODE_LOSS = "node_loss"
    """Never of a rank's end: a lost node reports nothing, its peers detect the loss."""


ADVICE: dict[Kind, str] = {
    Kind.EXCEPTION: "the program itself raised this; the traceback above names the line.",
    Kind.SYNTAX: "Python cannot parse the program; a restart would fail the same way.",
    Kind.IMPORT: "a module is missing or broken in this Python environment; a restart would fail the same way.",
    Kind.PEER: "it only lost its peers; look for the first failure on other nodes, or for a rank that never got here.",
    Kind.LOADER_WORKER: "a DataLoader worker process died; num_workers=0 shows its own error, and a killed one often "
    "means too little host memory.",
    Kind.GPU_OOM: "the GPU's memory is full; try a smaller batch, activation checkpointing or FSDP sharding, and "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation; the rank's gpu-memory.pickle, if it "
    "exists, shows the allocations (pytorch.org/memory_viz).",
    Kind.GPU_FAULT: "the GPU or its driver reported an error; CUDA_LAUNCH_BLOCKING=1 names the line, and an Xid "
    "line in dmesg means that the hardware or the driver is at fault.",
    Kind.GPU_HARDWARE: "the GPU, its memory or its driver is at fault, not the program; use another GPU or node, reset "
    "this one (nvidia-smi -r), check it (dcgmi diag -r 3), and replace it if the error recurs.",
    Kind.HOST_OOM: "the host, or this job's cgroup, ran out of memory; use fewer or smaller DataLoader workers, cache "
    "less, or raise the memory limit.",
    Kind.SHM_FULL: f"{SHM} is too small for the DataLoader workers; enlarge it (docker --shm-size, in Kubernetes an "
    "emptyDir with medium Memory) or use fewer workers.",
    Kind.DISK_FULL: "a file system is full; df -h and df -i show which.",
    Kind.PORT_IN_USE: "the program binds a port that is in use; let it use MASTER_PORT, or a free port.",
    Kind.SEGFAULT: "native code accessed invalid memory; the stack above shows the Python line that called it, and "
    "therefore the extension.",
    Kind.BUS_ERROR: f"memory without a backing page was accessed; check df -h {SHM}, and look for a memory-mapped "
    "file that was truncated.",
    Kind.ABORT: "native code aborted; its last lines above contain the reason.",
    Kind.SIGNAL: "a process outside this job sent the signal; the job manager's log or dmesg may show the sender.",
    Kind.INTERRUPT: "the rank was interrupted by Ctrl-C or another SIGINT.",
    Kind.EXIT_CODE: "the program, or a library in it, exited with this code (sys.exit or os._exit).",
    Kind.EARLY_EXIT_0: "it exited with 0 while others still needed it; all ranks must run the same number of steps.",
    Kind.HANG: "the stacks show where it stopped; if the wait is expected, increase --hang-timeout, or use "
    "--on-hang report, which takes no action.",
    Kind.PREEMPTED: "the job was asked to end and has saved; run it again with the same --job-dir to resume.",
    Kind.CHECKPOINT_IN_USE: "another live run saves there; use one directory per run (Checkpoint(dir=...), "
    "--checkpoint-dir), or try again when that run has ended.",
    Kind.NODE_LOSS: "a node no longer responds; check that machine, its network, and the job manager's log.",
    Kind.STOPPED: "the launcher stopped this rank; it did not fail by itself.",
}


@dataclass(frozen=True)
class Rule:
    """One row of the table: every given condition must hold."""

    kind: Kind
    says: str = ""
    """A pattern for one line of the exception's text; without an exception, of the rank's last lines."""
    evidence: str = ""
    """A pattern for one sentence of evidence."""
    signals: frozenset[int] = frozenset()
    """The rank was ended by one of these signals."""
    has_error: bool = False
    hung: bool = False
    stopped: bool = False
    code: int | None = None


_ABORTS = frozenset({signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})
_NATIVE = _ABORTS | {signal.SIGSEGV, signal.SIGBUS}
_ANY_SIGNAL = frozenset(range(1, signal.NSIG))
_LOADER = r"DataLoader worker \(pid"

# Raised by a pipe or socket when its peer process is gone: never the first cause. DataLoader reports a dead worker in
# the middle of one of these, so they come first in its chain.
_GONE = re.compile(r"(EOFError|ConnectionResetError|ConnectionRefusedError|BrokenPipeError|_?queue\.Empty)\b")

# Xid numbers caused by programs do not count, see profiler.xid.PROGRAM_XIDS.
_CARD = rf"\bECC\b|\bXid (?!(?:{'|'.join(map(str, sorted(PROGRAM_XIDS)))})\b)"
# Messages of a program, or of NCCL's watchdog, when its card fails.
_CARD_FAILED = (
    r"\b(CUDA|HIP) error: |(CUBLAS|CUDNN)_STATUS_[A-Z]|[Uu]nhandled cuda error"
    r"|Watchdog caught collective operation timeout|NCCL operations have failed or timed out"
)

RULES: tuple[Rule, ...] = (
    Rule(Kind.GPU_HARDWARE, evidence=_CARD, hung=True),
    Rule(Kind.HANG, hung=True),
    Rule(Kind.PREEMPTED, r"^(gpulaunch\.checkpoint[\w.]*\.)?Preempted\b", has_error=True),
    Rule(Kind.STOPPED, stopped=True),
    Rule(Kind.EARLY_EXIT_0, code=0),
    Rule(Kind.CHECKPOINT_IN_USE, r"^(gpulaunch\.checkpoint[\w.]*\.)?DirectoryInUse\b", has_error=True),
    # By message. The order matters if one text matches two rules.
    Rule(Kind.SHM_FULL, r"workers are out of shared memory|unable to (allocate|open|resize) shared memory"),
    Rule(Kind.HOST_OOM, _LOADER + r".* killed by signal: Killed", evidence=r"\bOOM killer\b"),
    Rule(Kind.PEER, _LOADER + r".* killed by signal: Terminated"),  # the worker received the end of the job first
    Rule(Kind.LOADER_WORKER, _LOADER),
    Rule(Kind.GPU_HARDWARE, r"[Uu]ncorrectable ECC error|\bNVML_ERROR_GPU_IS_LOST\b|[Ff]allen off the bus"),
    Rule(Kind.GPU_OOM, r"\bOutOfMemoryError\b|\b(CUDA|HIP|XPU)( error:)? out of memory|Cuda failure.*out of memory"),
    Rule(Kind.HOST_OOM, r"^[\w.]*MemoryError\b|DefaultCPUAllocator: can't allocate memory|[Cc]annot allocate memory"),
    Rule(Kind.GPU_HARDWARE, _CARD_FAILED, evidence=_CARD),
    Rule(Kind.PORT_IN_USE, r"EADDRINUSE|\[Errno 98\]|Address already in use"),
    Rule(Kind.PEER, r"gloo/.*(Connection (closed|reset) by peer|Connection refused|Broken pipe)"),
    Rule(Kind.PEER, r"gloo/.*(Timed out waiting|[Tt]imeout|SO_ERROR)|Gloo connectFullMesh failed"),
    Rule(Kind.PEER, r"(failed to pass|successfully reached) monitoredBarrier"),
    Rule(Kind.PEER, r"DistNetworkError\b|DistStoreError\b.*([Tt]imeout|[Tt]imed out)"),
    Rule(Kind.PEER, r"Failed to (recv|send), .*Connection was likely closed"),
    Rule(Kind.PEER, r"(sendBytes|recvBytes|recvValue|recvVector) failed on"),
    Rule(Kind.PEER, r"client socket has (failed to connect|timed out)"),
    Rule(Kind.PEER, r"ncclRemoteError|remote process exited or there was a network error"),
    Rule(Kind.PEER, r"Connection closed by remote peer|NCCL communicator was aborted"),
    Rule(Kind.PEER, r"Watchdog caught collective operation timeout|NCCL operations have failed or timed out"),
    Rule(Kind.DISK_FULL, r"\[Errno 28\]|No space left on device|\[Errno 122\]"),
    Rule(Kind.GPU_FAULT, r"\b(CUDA|HIP) error: |(CUBLAS|CUDNN)_STATUS_[A-Z]|unhandled cuda error"),
    Rule(Kind.SYNTAX, r"^(SyntaxError|IndentationError|TabError)\b"),
    Rule(Kind.IMPORT, r"^(ImportError|ModuleNotFoundError)\b"),
    # As runpy says it of `-m`.
    Rule(
        Kind.IMPORT, r"^SystemExit: .+: (No module named|No code object available for|Error while finding module spec)"
    ),
    Rule(Kind.INTERRUPT, r"^KeyboardInterrupt\b"),
    Rule(Kind.EXIT_CODE, r"^SystemExit\b"),
    Rule(Kind.EXCEPTION, has_error=True),
    # No message, and a signal ended it.
    Rule(Kind.HOST_OOM, evidence=r"\bOOM killer struck\b", signals=frozenset({signal.SIGKILL})),
    Rule(Kind.GPU_HARDWARE, evidence=_CARD, signals=_NATIVE),
    Rule(Kind.SHM_FULL, evidence=rf"{SHM}\b", signals=frozenset({signal.SIGBUS})),
    Rule(Kind.BUS_ERROR, signals=frozenset({signal.SIGBUS})),
    Rule(Kind.SEGFAULT, signals=frozenset({signal.SIGSEGV})),
    Rule(Kind.ABORT, signals=_ABORTS),
    Rule(Kind.INTERRUPT, signals=frozenset({signal.SIGINT})),
    Rule(Kind.SIGNAL, signals=_ANY_SIGNAL),
    # A program without our hooks (not Python, or in another interpreter) may still have printed a traceback.
    Rule(Kind.EXCEPTION, r"^Traceback \(most recent call last\):"),
    # A shell reports its child's SIGKILL by this code.
    Rule(Kind.HOST_OOM, evidence=r"\bOOM killer\b", code=128 + signal.SIGKILL),
    Rule(Kind.EXIT_CODE),
)


def classify(end: RankEnd) -> Kind:
    """Name the kind of `end`.

    In a chain of exceptions the oldest decides whether it is an echo: whatever a program raises after a lost peer, the
    peer was lost first. If it is none, the newest one with its own kind decides (out of memory in an `except` block).
    """
    if end.hang and raised_before(end, end.hung_s):
        own = classify(replace(end, hang=""))  # it hung in its cleanup
        if own is not Kind.PEER:
            return own
    if end.stopped and end.error is not None and classify(replace(end, stopped=False)) is Kind.PEER:
        return Kind.PEER  # it had lost its peer before it was asked to stop
    kinds = _kinds(end)
    if kinds[0] is Kind.PEER:
        return Kind.PEER
    if kinds[0] is Kind.EXCEPTION and _lost_a_loader_worker(end):
        return Kind.LOADER_WORKER
    return next((kind for kind in reversed(kinds) if kind not in (Kind.EXCEPTION, Kind.PEER)), kinds[0])


def raised_before(end: RankEnd, when_s: float | None) -> bool:
    """Whether its exception is older than a moment of the monotonic clock; False if either is unknown."""
    error = end.error
    return (
        when_s is not None and error is not None and error.at_monotonic_s is not None and error.at_monotonic_s < when_s
    )


def _lost_a_loader_worker(end: RankEnd) -> bool:
    """Whether the training process was fetching a batch from a worker whose death was not yet detected.

    A batch is passed through a socket of the worker's: if the worker dies at that moment, the socket breaks first.
    """
    error = end.error
    return (
        error is not None
        and error.type in ("ConnectionResetError", "ConnectionRefusedError", "EOFError", "FileNotFoundError")
        and "/torch/multiprocessing/reductions.py" in error.traceback
        and "/torch/utils/data/dataloader.py" in error.traceback
    )


def mentions_peer(end: RankEnd) -> bool:
    """Whether an echo is further down the chain, though the oldest exception is none.

    Two cases look like this: a ValueError whose cleanup then lost its peers (a cause), and a harmless handled
    KeyError before a lost peer (an echo). This cannot be decided from one rank; `blame` compares it with the others.
    """
    kinds = _kinds(end)
    return kinds[0] is not Kind.PEER and Kind.PEER in kinds


def root_exception(traceback: str) -> str:
    """Return the text of the oldest exception of a printed chain: `ValueError: x`, with its further lines."""
    return next(iter(_chain(traceback)), "")


def _kinds(end: RankEnd) -> list[Kind]:
    """Return the kind of each exception of the chain, oldest first; one kind if there is no chain."""
    if end.error is not None:
        texts = _chain(end.error.traceback) or [end.error.headline]
    elif end.signal in (None, signal.SIGABRT):  # on abort the C++ runtime prints the exception
        texts = ["\n".join(end.tail)]
    else:  # output before a signal has nothing to do with the signal
        texts = [""]
    return [next(rule.kind for rule in RULES if _fits(rule, end, text)) for text in texts]


def _fits(rule: Rule, end: RankEnd, text: str) -> bool:
    return (
        (not rule.stopped or end.stopped)
        and (rule.code is None or end.code == rule.code)
        and (not rule.signals or end.signal in rule.signals)
        and (not rule.has_error or end.error is not None)
        and (not rule.hung or end.hang != "")
        and (not rule.evidence or any(re.search(rule.evidence, fact) for fact in end.evidence))
        and (not rule.says or re.search(rule.says, text, re.MULTILINE) is not None)
    )


def _chain(traceback: str) -> list[str]:
    """Split a printed chain into the texts of its exceptions, oldest first, without their frames."""
    parts = re.split(
        r"\n(?:During handling of the above exception, another exception occurred"
        r"|The above exception was the direct cause of the following exception):\n",
        traceback,
    )
    texts: list[str] = []
    for part in parts:
        lines = part.strip("\n").splitlines()
        # Frames and source lines are indented; the header and the exception are not.
        start = next(
            (i for i, line in enumerate(lines) if line[:1].strip() and not line.startswith("Traceback (")), None
        )
        if start is not None:
            texts.append("\n".join(lines[start:]))
    while len(texts) > 1 and _GONE.match(texts[0]):
        texts.pop(0)
    return texts
