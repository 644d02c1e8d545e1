"""Reads what change a trial asks for, and decides which arguments of a DataLoader change. Pure.

The change is JSON; every part is optional:

    loaders    arguments of DataLoader, by the line of the program that constructs it: "train.py:41", or with the
               function, as in the fact "loaders"
    ddp        arguments of DistributedDataParallel
    torch      num_threads, cudnn_benchmark, float32_matmul_precision
    gc_freeze  true: gc.collect() and gc.freeze() at the end of the first step

What is unknown or of the wrong type is refused. The range of values is left to torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

Settings = dict[str, Any]
"""Arguments or settings by name."""

MOST_REASON: Final = 200
"""Characters of the reason why something is refused."""

_MOST_CHARS: Final = 4096  # of the JSON: the facts, which repeat it, must stay below their limit
_NONE: Final = type(None)
_LOADER: Final[Mapping[str, tuple[type, ...]]] = {
    "num_workers": (int,),
    "prefetch_factor": (int, _NONE),
    "persistent_workers": (bool,),
    "pin_memory": (bool,),
    "in_order": (bool,),
    "multiprocessing_context": (str, _NONE),
}
_DDP: Final[Mapping[str, tuple[type, ...]]] = {
    "find_unused_parameters": (bool,),
    "static_graph": (bool,),
    "bucket_cap_mb": (int, float),
    "gradient_as_bucket_view": (bool,),
}
_TORCH: Final[Mapping[str, tuple[type, ...]]] = {
    "num_threads": (int,),
    "cudnn_benchmark": (bool,),
    "float32_matmul_precision": (str,),
}
_WITHOUT_WORKERS: Final[Mapping[str, Any]] = {
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
    "timeout": 0,
    "in_order": True,
}
"""Arguments of DataLoader that are for workers, and their values without any; with others its constructor raises,
except for `in_order`, which has no effect."""


@dataclass(kw_only=True)
class Asked:
    """The change that the variable asks for, as far as it is valid."""

    loaders: dict[str, Settings] = field(default_factory=dict[str, Settings])
    ddp: Settings = field(default_factory=dict[str, Any])
    torch: Settings = field(default_factory=dict[str, Any])
    gc_freeze: bool = False
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """The rest, with the reasons."""

    def at(self, where: str) -> tuple[str, Settings] | None:
        """The key and the settings for a DataLoader that is constructed at this place (`path:line function`)."""
        for key in (where, where.rpartition(" ")[0]):
            if key in self.loaders:
                return key, self.loaders[key]
        return None


def parsed(text: str) -> Asked:
    """Return what the variable's value asks for; raises nothing."""
    asked = Asked()
    if len(text) > _MOST_CHARS:
        asked.refused["GPULAUNCH_TUNE"] = f"longer than {_MOST_CHARS} characters"
        return asked
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        asked.refused["GPULAUNCH_TUNE"] = f"not JSON: {error}"[:MOST_REASON]
        return asked
    for name, part in _items("GPULAUNCH_TUNE", document, asked.refused):
        if name == "loaders":
            for site, settings in _items(name, part, asked.refused):
                asked.loaders[site] = _valid(site, settings, _LOADER, asked.refused)
        elif name == "ddp":
            asked.ddp = _valid(name, part, _DDP, asked.refused)
        elif name == "torch":
            asked.torch = _valid(name, part, _TORCH, asked.refused)
        elif name != "gc_freeze":
            asked.refused[name] = "unknown"
        elif type(part) is bool:
            asked.gc_freeze = part
        else:
            asked.refused[name] = "not a bool"
    return asked


def _items(name: str, part: Any, refused: dict[str, str]) -> list[tuple[str, Any]]:
    if isinstance(part, dict):
        return list(cast("dict[str, Any]", part).items())
    refused[name] = "not an object"
    return []


def _valid(place: str, part: Any, known: Mapping[str, tuple[type, ...]], refused: dict[str, str]) -> Settings:
    """The known settings of a part whose values have the right type."""
    valid: Settings = {}
    for name, value in _items(place, part, refused):
        if name not in known:
            refused[f"{place} {name}"] = "unknown"
        elif type(value) not in known[name]:
            refused[f"{place} {name}"] = f"{type(value).__name__}, not {known[name][0].__name__}"
        else:
            valid[name] = value
    return valid


def loader_arguments(
    asked: Mapping[str, Any], given: Mapping[str, Any], *, iterable: bool
) -> tuple[Settings, dict[str, str]]:
    """Decide which arguments of a DataLoader change.

    Args:
        asked: the settings asked for.
        given: the program's value, or the default, of each argument that this torch has.
        iterable: whether the dataset is an iterable one.

    Returns:
        The new values, including those that follow from them; and the refused settings, with the reasons.
    """
    new, refused = known_arguments(asked, given)
    if iterable and new.get("num_workers") and not given["num_workers"]:
        del new["num_workers"]
        refused["num_workers"] = "an iterable dataset without workers would return each sample once per worker"
    if new.get("num_workers", given["num_workers"]) == 0:
        for name, value in _WITHOUT_WORKERS.items():
            if new.get(name, value) != value:
                del new[name]
                refused[name] = "the DataLoader has no workers"
            if "num_workers" in new and name != "in_order" and given.get(name, value) != value:
                new[name] = value
    return new, refused


def known_arguments(asked: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Settings, dict[str, str]]:
    """The settings that are arguments in this torch, and the refusal of the others."""
    new = {name: value for name, value in asked.items() if name in given}
    return new, {name: "not an argument in this torch" for name in asked if name not in given}
