"""Measures which share of the targets of a batch a loss ignores, now and then.

Collators for masked language modelling mark the tokens that are not asked for with -100, which is what the losses of
torch ignore unless they are told another number. A part of the batch whose only negative numbers are that has targets.

The fact "targets" has the means of the batches that were looked at:

    rows     targets of a batch, those that are ignored included
    ignored  the share of those
"""

from __future__ import annotations

from collections import UserDict
from itertools import islice
from typing import Any, Final

from gpulaunch.profiler.probe.facts import set_fact
from gpulaunch.profiler.probe.tensor_memory import whole_numbers

_IGNORED: Final = -100
"""`ignore_index` of torch.nn.functional.cross_entropy."""
_EVERY: Final = 8
"""Of the batches whose contents are inspected, this one is looked at. Targets of 32 x 512 take 30 us."""
_MOST_PARTS: Final = 8
_MOST_ELEMENTS: Final = 1 << 16
_MEAN_OF: Final = 8
"""Batches; later ones weigh more than the first, so that it follows a change."""


class Targets:
    """The targets of a rank's training; only its training thread calls it."""

    __slots__ = ("_at", "_count", "_ignored", "_rows", "_skip")

    def __init__(self) -> None:
        self._skip = self._count = 0
        self._rows = self._ignored = 0.0
        self._at: Any = None  # the key of the part of a batch that has them

    def look(self, batch: Any, tensor: type[Any]) -> None:
        """Take a batch of a dataloader; most are skipped. It may raise what a type of the program's raises.

        Args:
            batch: as the loader has returned it.
            tensor: torch's type; its functions must be disabled.
        """
        self._skip -= 1
        if self._skip > 0:
            return
        self._skip = _EVERY
        if isinstance(batch, UserDict):  # as collators of Transformers give
            batch = batch.data
        kind = type(batch)  # another mapping or sequence may run code of the program
        parts = batch.items() if kind is dict else enumerate(batch) if kind in (list, tuple) else ()
        for at, part in islice(parts, _MOST_PARTS):
            if type(part) is not tensor or not 0 < len(part.shape) < 3 or self._at not in (None, at):
                continue
            if (values := whole_numbers(part, _MOST_ELEMENTS)) is None or values.dtype.kind != "i":
                continue
            negative = values[values < 0]
            if len(negative) != int((negative == _IGNORED).sum()) or not (len(negative) or self._count):
                continue
            self._at, self._count = at, min(self._count + 1, _MEAN_OF)
            self._rows += (values.size - self._rows) / self._count
            self._ignored += (len(negative) / values.size - self._ignored) / self._count
            set_fact("targets", {"rows": round(self._rows), "ignored": round(self._ignored, 2)})
            return
