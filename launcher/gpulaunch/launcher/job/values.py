"""Converts values that depend on the number of ranks or the rest of the job; each error is a `UsageError`."""

from __future__ import annotations

from collections.abc import Sequence

from gpulaunch.launcher.job.host_info import Gpu, find
from gpulaunch.launcher.job.options import UsageError, did_you_mean, is_number
from gpulaunch.launcher.job.spec import Std


def std_by_rank(text: str, nproc: int) -> dict[int, Std]:
    """`3`, or `0:1,1:2` -> the streams of every local rank. Ranks beyond the last are ignored, as in torchrun."""
    text = text.strip()
    if text in _STD:
        return dict.fromkeys(range(nproc), _STD[text])
    chosen: dict[int, Std] = {}
    for part in text.split(","):
        rank, colon, std = part.partition(":")
        if not colon or not is_number(rank) or std not in _STD:
            raise UsageError(
                f"expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or RANK:STD,... such as 0:3,1:1, got {text!r}"
            )
        chosen[int(rank)] = _STD[std]
    return {rank: chosen.get(rank, Std.NONE) for rank in range(nproc)}


_STD = {str(int(std)): std for std in (Std.NONE, Std.OUT, Std.ERR, Std.ALL)}


def console(text: str, nproc: int) -> str:
    """`all`, `none`, or ranks and ranges of ranks, written out as ranks."""
    text = text.strip()
    if text in ("all", "none"):
        return text
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = (each.strip() for each in part.partition("-"))
        if not is_number(first) or not is_number(last or first) or int(last or first) < int(first):
            near = did_you_mean(text, ("all", "none"))
            raise UsageError(f"expected all, none, or local ranks such as 0,3 or 0-3, got {text!r}{near}")
        if int(last or first) >= nproc:
            raise UsageError(f"local rank {last or first} does not exist: the last of {nproc} is {nproc - 1}")
        ranks.update(range(int(first), int(last or first) + 1))
    return ",".join(str(rank) for rank in sorted(ranks))


def gpu_entries(text: str, inherited: Sequence[str] | None, gpus: Sequence[Gpu]) -> dict[str, Gpu]:
    """`0,2` or UUIDs -> entries for CUDA_VISIBLE_DEVICES, with the GPU that each names.

    An index counts the GPUs that are already visible: under CUDA_VISIBLE_DEVICES=4,5,6,7 the GPU 0 is card 4, as in
    torch's own numbering.
    """
    chosen: dict[str, Gpu] = {}
    for part in text.split(","):
        entry = part.strip()
        if is_number(entry):
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
