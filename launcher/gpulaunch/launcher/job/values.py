"""Converts values that depend on the number of ranks or the rest of the job; each error is a `UsageError`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from gpulaunch.launcher.job.host_info import Gpu, find
from gpulaunch.launcher.job.options import UsageError, did_you_mean
from gpulaunch.launcher.job.spec import Std

N = TypeVar("N", int, float)

_TORCHS_LOGS_SPECS = "torch.distributed.elastic.multiprocessing:DefaultLogsSpecs"


def at_least(least: int) -> Callable[[N], N]:
    """A check for a lower bound."""

    def check(value: N) -> N:
        if value < least:
            raise UsageError(f"must be at least {least}, got {value}")
        return value

    return check


def if_given(check: Callable[[N], N]) -> Callable[[N | None], N | None]:
    """The same check for an option that has no default."""
    return lambda value: None if value is None else check(value)


def fraction(value: float | None) -> float | None:
    """Check: greater than 0 and at most 1."""
    if value is not None and not 0 < value <= 1:
        raise UsageError(f"must be more than 0 and at most 1, got {value}")
    return value


def percent(value: float) -> float:
    """Check: from 0 to 100."""
    if not 0 <= value <= 100:
        raise UsageError(f"must be from 0 to 100, got {value:g}")
    return value


def std_by_rank(text: str, nproc: int) -> dict[int, Std]:
    """`3`, or `0:1,1:2` -> the streams of every local rank. Ranks beyond the last are ignored, as in torchrun."""
    text = text.strip()
    if text in _STD:
        return dict.fromkeys(range(nproc), _STD[text])
    chosen: dict[int, Std] = {}
    for part in text.split(","):
        rank, colon, std = part.partition(":")
        if not colon or not _is_number(rank) or std not in _STD:
            raise UsageError(
                f"expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or RANK:STD,... such as 0:3,1:1, got {text!r}"
            )
        chosen[int(rank)] = _STD[std]
    return {rank: chosen.get(rank, Std.NONE) for rank in range(nproc)}


_STD = {str(int(std)): std for std in (Std.NONE, Std.OUT, Std.ERR, Std.ALL)}


def rank_filter(text: str) -> frozenset[int] | None:
    """`0,2` -> those local ranks; empty: no filter."""
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(_is_number(part) for part in parts):
        raise UsageError(f"expected local ranks separated by commas, such as 0,2, got {text!r}")
    return frozenset(int(part) for part in parts)


def console(text: str, nproc: int) -> str:
    """`all`, `none`, or ranks and ranges of ranks, written out as ranks."""
    text = text.strip()
    if text in ("all", "none"):
        return text
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = (each.strip() for each in part.partition("-"))
        if not _is_number(first) or not _is_number(last or first) or int(last or first) < int(first):
            near = did_you_mean(text, ("all", "none"))
            raise UsageError(f"expected all, none, or local ranks such as 0,3 or 0-3, got {text!r}{near}")
        if int(last or first) >= nproc:
            raise UsageError(f"local rank {last or first} does not exist: the last of {nproc} is {nproc - 1}")
        ranks.update(range(int(first), int(last or first) + 1))
    return ",".join(str(rank) for rank in sorted(ranks))


def packages(text: str) -> tuple[str, ...] | None:
    """`auto` -> None, `none` -> (), else the names of the packages."""
    if text in ("auto", "none"):
        return None if text == "auto" else ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"expected auto, none, or package names separated by commas, got {text!r}")
    return names


def signal_names(text: str) -> tuple[str, ...]:
    """Names of signals that a process can catch."""
    import signal

    known = sorted(each.name for each in signal.Signals if each.name not in ("SIGKILL", "SIGSTOP"))
    names = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    for name in names:
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"{name} cannot be handled by any process; leave it out")
        if name == "SIGCHLD":
            raise UsageError("SIGCHLD is how the launcher hears of its ranks; leave it out")
        if name not in known:
            wanted = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
            raise UsageError(f"unknown signal {name!r}{did_you_mean(wanted, known)}")
    return names


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(text: str) -> float:
    """`90`, `90s`, `10m`, `2h` or `1d` in seconds."""
    text = text.strip()
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS_S else (text, "s")
    try:
        seconds = float(number) * _UNITS_S[unit]
    except ValueError:
        seconds = float("nan")
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"expected a time such as 90, 30s, 10m or 2h, got {text!r}")
    return seconds


def rate(text: str | None) -> tuple[int, float] | None:
    """`5/10m`: five within ten minutes."""
    if text is None:
        return None
    count, slash, window = text.partition("/")
    if not slash or not _is_number(count.strip()) or (window_s := duration_s(window)) <= 0:
        raise UsageError(f"expected a number within a time, such as 5/10m, got {text!r}")
    return int(count), window_s


def not_empty(text: str) -> str:
    """Check: not empty."""
    if not text.strip():
        raise UsageError("must not be empty")
    return text


def directories(text: str | None) -> tuple[str, ...]:
    """Paths or URLs separated by commas."""
    if text is None:
        return ()
    return tuple(not_empty(part).strip() for part in text.split(","))


def logs_specs(name: str | None) -> str | None:
    """--logs-specs names an entry point; torch registers its own as `default`, and no other can be honoured."""
    if name is None:
        return None
    from importlib import metadata

    found = {entry.value for entry in metadata.entry_points(group="torchrun.logs_specs", name=name)}
    if not found:
        raise UsageError(f"{name}: no installed package has an entry point torchrun.logs_specs[{name}]")
    if found != {_TORCHS_LOGS_SPECS}:
        raise UsageError(f"{name}: {found.pop()} decides by itself where output goes: not supported here")
    return name


def gpu_entries(text: str, inherited: Sequence[str] | None, gpus: Sequence[Gpu]) -> dict[str, Gpu]:
    """`0,2` or UUIDs -> entries for CUDA_VISIBLE_DEVICES, with the GPU that each names.

    An index counts the GPUs that are already visible: under CUDA_VISIBLE_DEVICES=4,5,6,7 the GPU 0 is card 4, as in
    torch's own numbering.
    """
    chosen: dict[str, Gpu] = {}
    for part in text.split(","):
        entry = part.strip()
        if _is_number(entry):
            if int(entry) >= len(gpus):
                raise UsageError(f"GPU {entry} does not exist: {len(gpus)} visible, numbered from 0")
            gpu = gpus[int(entry)]
            # CUDA cannot address one of several MIG instances by an index.
            own = gpu.uuid if gpu.uuid.startswith("MIG-") else str(gpu.index)
            entry = own if inherited is None else inherited[int(entry)]
        elif not entry.startswith(("GPU-", "MIG-")):
            raise UsageError(f"expected indices or UUIDs (GPU-..., MIG-...) separated by commas, got {part!r}")
        else:
            named = find(gpus, entry)
            if named is None:
                raise UsageError(f"no visible GPU has the UUID {entry}; `nvidia-smi -L` lists them")
            gpu = named
        if gpu in chosen.values():
            raise UsageError(f"GPU {part.strip()} is named twice")
        chosen[entry] = gpu
    return chosen


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
