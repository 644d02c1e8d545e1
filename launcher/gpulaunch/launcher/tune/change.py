"""A change to a job that a trial applies in the ranks, through the environment, without touching the program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

TRIAL: Final = "GPULAUNCH_TRIAL"
"""Set in trials: no report page is written, and the next one need not wait for it."""

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change, or several that are applied together. Every part is optional."""

    loaders: Mapping[str, Settings] = field(default_factory=dict[str, Settings])
    """Arguments of the DataLoader that each line of the program (`train.py:41 main`) constructs."""
    ddp: Settings = field(default_factory=dict[str, Any])
    """Arguments of DistributedDataParallel."""
    torch: Settings = field(default_factory=dict[str, Any])
    """`num_threads`, `cudnn_benchmark`, `float32_matmul_precision`."""
    gc_freeze: bool = False
    predicted_s: float | None = None
    """What a finding says that it saves of every step; None: no finding does."""
    because: str = ""
    """The rule of that finding; "": none."""

    @property
    def name(self) -> str:
        """Its settings, as a user would write them."""
        return ", ".join(f"{name}={value}" for name, value in self._settings())

    @property
    def where(self) -> str:
        """The lines of the program that it is about, and the constructor where it is about all."""
        places = [*map(line_of, self.loaders), *(["DistributedDataParallel"] if self.ddp else [])]
        return ", ".join([*places, *(["the program's start"] if self.torch or self.gc_freeze else [])])

    @property
    def keys(self) -> frozenset[tuple[str, str]]:
        """What it sets: two changes that set the same exclude each other."""
        of_loaders = {(site, name) for site, settings in self.loaders.items() for name in settings}
        others = {("", name) for settings in (self.ddp, self.torch) for name in settings}
        return frozenset(of_loaders | others | ({("", "gc_freeze")} if self.gc_freeze else set()))

    @property
    def applied_names(self) -> frozenset[str]:
        """As the probe calls what it has applied: see `profiler.probe.changes`."""
        places = [*self.loaders.items(), ("ddp", self.ddp), ("torch", self.torch)]
        names = {f"{place} {name}" for place, settings in places for name in settings}
        return frozenset(names | ({"gc_freeze"} if self.gc_freeze else set()))

    def as_env(self) -> str:
        """The value of `job_json.CHANGES`."""
        return json.dumps(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """Its parts that are not empty."""
        parts = {
            "loaders": {site: dict(settings) for site, settings in self.loaders.items()},
            "ddp": dict(self.ddp),
            "torch": dict(self.torch),
            "gc_freeze": self.gc_freeze,
        }
        return {name: part for name, part in parts.items() if part}

    def _settings(self) -> Iterable[tuple[str, Any]]:
        for settings in (*self.loaders.values(), self.ddp, self.torch):
            yield from settings.items()
        if self.gc_freeze:
            yield "gc.freeze", True


def line_of(site: str) -> str:
    """`train.py:41` of `train.py:41 main`."""
    return site.rpartition(" ")[0] or site  # the name of a function has no space, a path may


def together(changes: Iterable[Change]) -> Change:
    """All of these at once; of two that set the same the last one counts."""
    loaders: dict[str, dict[str, Any]] = {}
    ddp: dict[str, Any] = {}
    torch: dict[str, Any] = {}
    freeze = False
    for change in changes:
        for site, settings in change.loaders.items():
            loaders.setdefault(site, {}).update(settings)
        ddp.update(change.ddp)
        torch.update(change.torch)
        freeze = freeze or change.gc_freeze
    return Change(loaders=loaders, ddp=ddp, torch=torch, gc_freeze=freeze)
