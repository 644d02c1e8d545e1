"""Reports a failure: on the console for people, in failure.json for machines, and to a launcher above this one.

The console text keeps the lines that log scrapers know from torchrun (`train.py FAILED`, `Root Cause (first observed
failure):`, `rank      : 3 (local_rank: 3)`, `exitcode  : -9 (pid: 123) (SIGKILL)`). It is meant to be read from its
end: the last lines are the first cause, the reason for choosing it, what to do, and the path of the full report.

failure.json, version 1:

    {"version": 1, "script", "attempt", "world_size", "exit_code", "started_wall_s", "host", "torch",
     "first": {"rank", "kind", "why", "advice", "headline"},  kind "elsewhere", rank null: on another node
     "ranks": [{"rank", "local_rank", "pid", "host", "kind", "part": "first" | "also" | "echo" | "stopped" | "finished",
                "code", "signal", "signal_name", "failed_after_s", "wall_time_s", "stopped",
                "error": {"type", "message", "traceback", "at_monotonic_s", "at_wall_s"} | null,
                "tail": [...], "fault", "evidence": [...], "hang"}]}

Everything shown passes `redact`; nothing of the environment is written.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator

from gpulaunch.launcher.failure.blame import Blame, exit_code, failed_at_s, torch_exit_code
from gpulaunch.launcher.failure.classify import ADVICE, Kind, classify, root_exception
from gpulaunch.launcher.failure.ends import RankEnd, describe_end, signal_meaning, signal_name
from gpulaunch.launcher.failure.errors import READ_CAP_BYTES, load_json, read_bounded
from gpulaunch.launcher.failure.redact import inert
from gpulaunch.launcher.loop.files import write_json
from gpulaunch.profiler.redact import redact, redact_all

VERSION = 1

_WIDTH = 60  # torchrun's
_LINE_CAP = 2_000
_FAULT_LINES = 20
_MAX_GROUPS = 8
_RANK_PREFIX = re.compile(r"^\s*\[rank\d+\]: ?")

_ECHO_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "connection was likely closed",
    "connection closed by remote peer",
    "remote process exited",
    "wait timeout",
    "timed out",
    "timeout",
)

# Frames between the interpreter and the user's program: torch's @record and this package.
_MACHINERY = re.compile(
    r'\s*File ".*(?:torch/distributed/elastic/multiprocessing/errors/__init__|gpulaunch/launcher/.*)\.py"'
)


def render(
    blame: Blame | None, *, script: str, report_path: str, started_s: float, attempt: int = 0, elsewhere: str = ""
) -> str:
    """Return the console text of a failed attempt, safe for a terminal, without a final newline.

    Args:
        blame: the verdict; None: nothing failed on this node.
        script: the program as the user named it.
        report_path: where failure.json is.
        started_s: when the attempt started, on the monotonic clock of the ends.
        attempt: its number.
        elsewhere: what failed first, on another node, in one line; "": nothing.
    """
    if blame is None or elsewhere:
        here = f"here     : {_headline(blame.first, blame.kind)}" if blame is not None else ""
        lines = ["=" * _WIDTH, f"{script} FAILED", "-" * _WIDTH, f"first cause, on another node: {elsewhere}"]
        lines += [*([here] if here else []), f"report: {report_path}", "=" * _WIDTH]
        return inert(redact("\n".join(lines)))
    first = blame.first
    if blame.kind is Kind.PREEMPTED:
        lines = [f"{script} was asked to end: {_headline(first, blame.kind)}", f"what to do: {ADVICE[blame.kind]}"]
        return inert(redact("\n".join(lines)))
    after = f"{max(0.0, failed_at_s(first) - started_s):.1f} s after the start"
    moment = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(first.wall_time_s))
    lines = [
        "=" * _WIDTH,
        f"{script} FAILED",
        "-" * _WIDTH,
        *_others(blame),
        "Root Cause (first observed failure):",
        f"[{first.local_rank}]:",
        f"  time      : {moment} ({after}, attempt {attempt})",
        f"  host      : {first.host}",
        f"  rank      : {first.rank} (local_rank: {first.local_rank})",
        f"  exitcode  : {_torch_exitcode(first)} (pid: {first.pid})"
        + ("" if first.signal is None else f" ({signal_name(first.signal)})"),
        *_traceback(first),
        *_tail(first),
        *_fault(first),
        *([f"  hang      : {first.hang}"] if first.hang else []),
        *(f"  evidence  : {fact}" for fact in first.evidence),
        "-" * _WIDTH,
        f"first cause, {after}: {_headline(first, blame.kind)}",
        f"why this one: {blame.why}",
        f"what to do: {ADVICE[blame.kind]}",
        f"report: {report_path}",
        "=" * _WIDTH,
    ]
    return inert(redact("\n".join(lines)))


def headline(blame: Blame) -> str:
    """Return the first cause in one line, safe for a terminal: for an attempt after which the job continues."""
    return inert(redact(_headline(blame.first, blame.kind)))


def _first(blame: Blame) -> dict[str, object]:
    return {
        "rank": blame.first.rank,
        "kind": blame.kind.value,
        "why": blame.why,
        "advice": ADVICE[blame.kind],
        "headline": _headline(blame.first, blame.kind),
    }


def _first_elsewhere(headline: str) -> dict[str, object]:
    """Of a node whose ranks failed later, or were only told to end: the node that failed has its own report."""
    return {"rank": None, "kind": "elsewhere", "why": "another node failed first", "advice": "", "headline": headline}


def write_report(
    path: str,
    blame: Blame | None,
    *,
    script: str,
    started_s: float,
    started_wall_s: float,
    world_size: int,
    attempt: int = 0,
    torch_version: str | None = None,
    elsewhere: str = "",
) -> str | None:
    """Write failure.json atomically; return why it could not be written, None on success."""
    ends: tuple[RankEnd, ...] = ()
    parts: dict[int, str] = {}
    if blame is not None:
        ends = blame.ends
        parts = {end.rank: part for part, them in (("echo", blame.echoes), ("also", blame.also)) for end in them}
        parts[blame.first.rank] = "also" if elsewhere else "first"
    document = {
        "version": VERSION,
        "script": script,
        "attempt": attempt,
        "world_size": world_size,
        "exit_code": exit_code(blame.first) if blame is not None else None,
        "started_wall_s": started_wall_s,
        "host": blame.first.host if blame is not None else os.uname().nodename,
        "torch": torch_version,
        "first": _first_elsewhere(elsewhere) if blame is None or elsewhere else _first(blame),
        "ranks": [_rank_document(end, parts.get(end.rank), started_s) for end in ends],
    }
    return _write_json(path, redact_all(document))


def tell_parent(first: RankEnd, error_file: str, parent_file: str) -> str | None:
    """Copy the first cause's error file to `parent_file`, with the exit code in `message.errorCode`.

    This is what torch's agent does for a launcher above it, which sets TORCHELASTIC_ERROR_FILE in the agent's own
    environment. A rank that left no error file (a signal) is described in the same layout. As in torch, the code of a
    signal is negative, and an old-style error file (`message` a string) is copied unchanged. A rank that had raised and
    was stopped before it could exit has the code 1, like the launcher in that case.

    Returns:
        Why it could not be written; None on success.
    """
    document = load_json(read_bounded(error_file, READ_CAP_BYTES) or b"")
    if not isinstance(document, dict) or "message" not in document:
        extra = {"py_callstack": "\n".join(first.tail), "timestamp": str(int(first.wall_time_s))}
        document = {"message": {"message": _headline(first, classify(first)), "extraInfo": extra}}
    if isinstance(document["message"], dict):
        document = {**document, "message": {**document["message"], "errorCode": torch_exit_code(first) or 1}}
    return _write_json(parent_file, redact_all(document))


def _others(blame: Blame) -> Iterator[str]:
    """Yield one line for each group of the ranks that are not the first cause."""
    stopped = [end for end in blame.ends if end.stopped and end is not blame.first]
    groups: dict[str, list[int]] = {}
    for end in blame.also:
        groups.setdefault(_what(end, classify(end)), []).append(end.rank)
    shown = sorted(groups.items(), key=lambda group: group[1])
    for what, ranks in shown[:_MAX_GROUPS]:
        yield f"{_ranks(ranks)} failed too: {what}"
    if len(shown) > _MAX_GROUPS:
        yield f"{_ranks([rank for _, ranks in shown[_MAX_GROUPS:] for rank in ranks])} failed too, for other reasons"
    if blame.echoes:
        phrases = sorted({_echo_phrase(end) for end in blame.echoes})
        yield f"{_ranks([end.rank for end in blame.echoes])} followed: {', '.join(phrases)} (echo)"
    if stopped:
        yield f"{_ranks([end.rank for end in stopped])} stopped by the launcher"
    if shown or blame.echoes or stopped:
        yield "-" * _WIDTH


def _echo_phrase(end: RankEnd) -> str:
    text = (end.error.message if end.error else "\n".join(end.tail)).lower()
    return next((phrase for phrase in _ECHO_PHRASES if phrase in text), "lost a peer")


def _headline(end: RankEnd, kind: Kind) -> str:
    return f"rank {end.rank} (local rank {end.local_rank}, {end.host}, pid {end.pid}) {_what(end, kind)}"


def _what(end: RankEnd, kind: Kind) -> str:
    """Return in one line what happened to a rank: its exception, else how the process ended and what that means."""
    if kind is Kind.PREEMPTED:
        return f"saved and ended as requested: {describe_end(end)}"
    what = describe_end(end)
    if end.hang and kind in (Kind.HANG, Kind.GPU_HARDWARE):
        what = f"hung: {_first_line(end.hang)}"
    elif end.error is not None and kind not in (Kind.STOPPED, Kind.EARLY_EXIT_0):
        root = _first_line(root_exception(end.error.traceback))
        said = _first_line(end.error.headline)
        what = f"raised {said}" if root.endswith(said) or not root else f"raised {said} (after {root})"
    elif root := _first_line(root_exception("\n".join(end.tail))) if kind in (Kind.EXCEPTION, Kind.PEER) else "":
        what += f"; its last lines: {root}"
    elif kind is Kind.HOST_OOM:
        what += ": out of memory"
    elif explanation := signal_meaning(end):
        what += f": {explanation}"
    if kind is Kind.GPU_HARDWARE:
        what = "; ".join([what, *(_first_line(fact) for fact in end.evidence if "Xid" in fact or "ECC" in fact)])
    return what


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 300 else f"{line[:300]} ..."


def _torch_exitcode(end: RankEnd) -> int:
    return -end.signal if end.signal is not None else end.code or 0


def _traceback(end: RankEnd) -> Iterator[str]:
    if end.error is None:
        return
    text = end.error.traceback or end.error.headline
    yield "  traceback :"
    yield from (f"    {line[:_LINE_CAP]}" for line in _user_frames(text.rstrip("\n").splitlines()))


def _user_frames(lines: Iterable[str]) -> Iterator[str]:
    """Drop the frames of the machinery: their `File` line and the source and marker lines below it."""
    leaving_out = False
    for line in lines:
        if _MACHINERY.match(line):
            leaving_out = True
        elif line.startswith("  File ") or not line.startswith("    "):
            leaving_out = False
        if not leaving_out:
            yield line


def _tail(end: RankEnd) -> Iterator[str]:
    """Yield the rank's last lines, without those that only repeat the traceback."""
    told = {line.strip() for line in end.error.traceback.splitlines()} if end.error else set[str]()
    # torch's own excepthook prefixes every line of a traceback with the rank.
    lines = [line for line in end.tail if line.strip() and _RANK_PREFIX.sub("", line).strip() not in told]
    if lines:
        yield "  last lines:"
        yield from (f"    {line[:_LINE_CAP]}" for line in lines)


def _fault(end: RankEnd) -> Iterator[str]:
    """Yield the stack of the thread that the signal hit, from faulthandler's dump of all threads."""
    if not end.fault or end.signal is None:
        return
    lines = end.fault.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread 0x")), 0)
    stack = lines[start : start + _FAULT_LINES]
    stop = next((i for i, line in enumerate(stack) if not line.strip()), len(stack))
    yield "  stack     :"
    yield from (f"    {line[:_LINE_CAP]}" for line in _user_frames(stack[:stop]))


def _ranks(ranks: list[int]) -> str:
    """Return `rank 3` or `ranks 0-2,4-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _rank_document(end: RankEnd, part: str | None, started_s: float) -> dict[str, object]:
    error = end.error
    return {
        "rank": end.rank,
        "local_rank": end.local_rank,
        "pid": end.pid,
        "host": end.host,
        "kind": classify(end).value,
        "part": part or ("stopped" if end.stopped else "finished"),
        "code": end.code,
        "signal": end.signal,
        "signal_name": None if end.signal is None else signal_name(end.signal),
        "failed_after_s": round(failed_at_s(end) - started_s, 6),
        "wall_time_s": end.wall_time_s,
        "stopped": end.stopped,
        "error": error
        and {
            "type": error.type,
            "message": error.message,
            "traceback": error.traceback,
            "at_monotonic_s": error.at_monotonic_s,
            "at_wall_s": error.at_wall_s,
        },
        "tail": [line[:_LINE_CAP] for line in end.tail],
        "fault": end.fault,
        "evidence": end.evidence,
        "hang": end.hang,
    }


def _write_json(path: str, document: object) -> str | None:
    try:
        write_json(path, document)
    except OSError as err:
        return f"could not write {path}: {err.strerror or err}"
    return None
