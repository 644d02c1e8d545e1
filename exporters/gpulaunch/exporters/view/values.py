"""Looks up the newest values of a node by name and first label. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import overload

from gpulaunch.exporters.store.series import LABELS, Key


class Values:
    """Values whose first label is one rank or GPU or, without a label, those of the node."""

    def __init__(self, values: Mapping[Key, float], label: str | None = None) -> None:
        """`label`: the first label."""
        self._values: dict[str, dict[Key, float]] = {}
        for key, value in values.items():
            name, labels = key[0], key[1:]
            if label is not None:
                if not labels or labels[0] != label:
                    continue
                labels = labels[1:]
            self._values.setdefault(name.removeprefix("gpulaunch_"), {})[labels] = value

    def __bool__(self) -> bool:
        return bool(self._values)

    @overload
    def get(self, name: str, *labels: str) -> float | None: ...
    @overload
    def get(self, name: str, *labels: str, default: float) -> float: ...
    def get(self, name: str, *labels: str, default: float | None = None) -> float | None:
        """Return a value; `default` if unknown."""
        return self._values.get(name, {}).get(labels, default)

    def whole(self, name: str, *labels: str) -> int | None:
        """Return a value as a count; None if unknown."""
        value = self.get(name, *labels)
        return None if value is None else round(value)

    def count(self, name: str, *labels: str) -> int:
        """Return a value as a count; 0 if there is none."""
        return round(self.get(name, *labels, default=0.0))

    def by(self, name: str) -> Iterator[tuple[Key, float]]:
        """Yield all values of a name, with the remaining labels."""
        yield from self._values.get(name, {}).items()

    def of_rank(self) -> dict[str, float]:
        """Return all values of a rank, named as /metrics names them: without prefix and rank.

        A GPU may have the number of a rank.
        """
        return {
            _named(name, labels): value
            for name, values in self._values.items()
            if LABELS.get(f"gpulaunch_{name}", ())[:1] == ("rank",)
            for labels, value in values.items()
        }

    def one(self, name: str) -> dict[str, float]:
        """Return all values of a name that has one remaining label, by that label."""
        return {labels[0]: value for labels, value in self.by(name) if len(labels) == 1}


def _named(name: str, values: Key) -> str:
    if not values:
        return name
    labels = zip(LABELS.get(f"gpulaunch_{name}", ())[1:], values, strict=False)
    return f"{name}{{{','.join(f'{label}={json.dumps(value)}' for label, value in labels)}}}"


def whole(value: object) -> int | None:
    """Return a whole number from a file; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else None


def by_label(values: Mapping[Key, float]) -> dict[str, dict[Key, float]]:
    """Group values by their first label."""
    divided: dict[str, dict[Key, float]] = {}
    for key, value in values.items():
        if len(key) > 1:
            divided.setdefault(key[1], {})[key] = value
    return divided
