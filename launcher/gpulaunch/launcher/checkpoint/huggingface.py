"""Checkpoints of the transformers Trainer (`checkpoint-N/`) and of accelerate's `save_state`.

Trainer writes the model, then optimizer, scheduler and RNG states, and `trainer_state.json` last. A run with
`save_only_model` writes no optimizer on purpose, recorded in its `training_args.bin`; its checkpoints are accepted,
because there are no better ones. In any other run, a missing optimizer is a missing part.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from gpulaunch.launcher.checkpoint import parts, torchfile
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.files import Files
from gpulaunch.launcher.checkpoint.source import Entry, join

STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"

_TRAINER = re.compile(r"checkpoint-(\d+)")
_WEIGHTS = re.compile(
    r"(model|adapter_model|pytorch_model|tf_model).*\.(safetensors|bin|h5)(\.index\.json)?|"
    r"pytorch_model_fsdp(_\d+)?|global_step\d+|pytorch_model"
)
_OPTIMIZER = re.compile(r"optimizer(_\d+)?(\.pt|\.bin)?|optimizer.*\.bin|rank\d+-of-\d+-optimizer\.pt|global_step\d+")
_BESIDE_OPTIMIZER = re.compile(r"scheduler\.pt|rng_state.*\.pth")
_RANDOM = r"random_states_(\d+)\.pkl"
_RNG = r"rng_state_(\d+)\.pth"


def is_trainer(name: str, names: Collection[str]) -> bool:
    """Whether a directory is a Trainer's, finished or not.

    The output directory itself is not: at the end of training, scripts save the model and `trainer_state.json` there.
    """
    if _TRAINER.fullmatch(name):
        return STATE in names or (not is_accelerate(names) and _any(_WEIGHTS, names))
    return STATE in names and _any(_OPTIMIZER, names)


def is_accelerate(names: Collection[str]) -> bool:
    """Whether a directory is accelerate's, finished or not: it holds an optimizer or RNG states under its names."""
    return _any(re.compile(_RANDOM), names) or (
        not {STATE, ARGUMENTS} & set(names)
        and _any(re.compile(r"optimizer(_\d+)?\.bin|optimizer_\d+"), names)
        and _any(_WEIGHTS, names)
    )


def check_trainer(files: Files, directory: str) -> int:
    """Verify the state and every part; return the step. Raises Damaged."""
    names = files.listing(directory)
    if STATE not in names:
        raise Damaged(f"{STATE} is missing: the save was not finished")
    step = torchfile.integer(files.json(join(directory, STATE)).get("global_step"))
    if step is None:
        raise Damaged(f"{STATE} has no global_step")
    named = _TRAINER.fullmatch(directory.rpartition("/")[2])
    if named and int(named[1]) != step:
        raise Damaged(f"{STATE} has global_step {step}, and the directory is of step {int(named[1])}")
    _check_parts(files, directory, names)
    parts.check_row(files, directory, names, _RNG)
    if not _any(_OPTIMIZER, names) and not _saves_only_model(files, names):
        raise Damaged("optimizer.pt is missing")
    return step


def check_accelerate(files: Files, directory: str) -> None:
    """Verify every part. Raises Damaged."""
    names = files.listing(directory)
    if not _any(re.compile(_RANDOM), names):
        raise Damaged("random_states_0.pkl is missing: the save was not finished")
    _check_parts(files, directory, names)
    parts.check_row(files, directory, names, _RANDOM)


def _check_parts(files: Files, directory: str, names: dict[str, Entry]) -> None:
    # Custom hooks save other directories instead of a model (a diffusion model's `unet/`).
    if not _any(_WEIGHTS, names) and not any(entry.is_dir for entry in names.values()):
        raise Damaged("it has no model")
    parts.check_all(files, directory)


def _saves_only_model(files: Files, names: dict[str, Entry]) -> bool:
    if ARGUMENTS in names:
        said = torchfile.summary(files, names[ARGUMENTS]).get("save_only_model")
        if isinstance(said, bool):
            return said
    return not _any(_BESIDE_OPTIMIZER, names)


def _any(expression: re.Pattern[str], names: Collection[str]) -> bool:
    return any(expression.fullmatch(name) for name in names)
