"""DeepSpeed's checkpoints: `latest` names a tag (`global_step100/`) with the states of every rank.

DeepSpeed writes `latest` after every rank has finished, so a tag newer than the one it names was never finished; older
tags are the fallback if that one is damaged. The checkpoint's path is the directory of the tag: DeepSpeed's
load_checkpoint takes the directory above it and the tag.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from gpulaunch.launcher.checkpoint import torchfile
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.files import Files
from gpulaunch.launcher.checkpoint.names import step_of
from gpulaunch.launcher.checkpoint.source import join

LATEST = "latest"
_TAG_CAP_BYTES = 4096

# zero_pp_rank_1_mp_rank_00_model_states.pt with ZeRO 3, mp_rank_00_model_states.pt otherwise.
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
# The underscore before `optim` is missing in old versions.
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")


def matches(names: Collection[str]) -> bool:
    """Whether a directory with these names is a tag, finished or not."""
    return any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in names)


def check(files: Files, directory: str) -> int | None:
    """Verify a tag that `latest` does not contradict; return its step. Raises Damaged."""
    above, _, tag = directory.rpartition("/")
    latest = files.look(join(above, LATEST)) if directory else None
    if latest is not None and not latest.is_dir:
        named = files.content(latest.path, _TAG_CAP_BYTES).decode("utf-8", "replace").strip()
        files.seen.pop(latest.path)
        check_not_after(files, directory, named, LATEST, latest.changed_s)
    check_tag(files, directory)
    return step_of(tag)


def check_not_after(files: Files, directory: str, named: str, tracker: str, changed_s: float) -> None:
    """Reject a checkpoint newer than the one that a tracker file names: its save was not finished. Raises Damaged.

    Newer by step; if the names contain none, by time: written after the tracker was.
    """
    tag = directory.rpartition("/")[2]
    own, named_step = step_of(tag), step_of(named)
    if tag == named or not named:
        return
    if own is not None and named_step is not None:
        newer = own > named_step
    else:
        newer = max((entry.changed_s for entry in files.listing(directory).values()), default=0.0) > changed_s
    if newer:
        raise Damaged(f"{tracker} still names {named[:80]}: the save was not finished")


def check_tag(files: Files, directory: str) -> None:
    """Verify every rank's files. Raises Damaged."""
    names = files.listing(directory)
    models = {name: found for name in names if (found := _MODEL.fullmatch(name))}
    optimizers = {name: found for name in names if (found := _OPTIMIZER.fullmatch(name))}
    if not models:
        raise Damaged(f"{files.label(join(directory, 'mp_rank_00_model_states.pt'))} is missing")
    for name in sorted(names):
        if name.endswith((".pt", ".pth")):
            torchfile.check(files, names[name])
    said = torchfile.summary(files, names[min(models)])
    ranks = torchfile.integer(said.get("dp_world_size"))
    slices = {int(found[2]) for found in (*models.values(), *optimizers.values())}
    for kind, row in (("model", models), ("optim", optimizers)):
        cells = {(int(found[1]), int(found[2])) for found in row.values() if found[1] is not None}
        # ZeRO splits over the data parallel ranks; if it does not say how many, use the highest one present.
        columns = (ranks or 1 + max(rank for rank, _ in cells)) if cells else 0
        wanted = {(rank, part) for rank in range(columns) for part in range(1 + max(slices))}
        if missing := sorted(wanted - cells):
            rank, part = missing[0]
            prefix = "bf16_" if min(row).startswith("bf16_") else ""
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{part:02d}_{kind}_states.pt"
            raise Damaged(f"{files.label(join(directory, name))} is missing")
    whole = {int(found[2]) for found in models.values() if found[1] is None}
    if whole and (missing_parts := sorted(set(range(1 + max(slices))) - whole)):
        name = f"mp_rank_{missing_parts[0]:02d}_model_states.pt"
        raise Damaged(f"{files.label(join(directory, name))} is missing")
