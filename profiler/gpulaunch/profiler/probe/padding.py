"""Measures how much of the batches of token sequences is padding, from their attention masks, now and then.

Collators of Transformers give a batch as a mapping with an `attention_mask` of samples x tokens: 1 for a token, 0 for
padding. A column that no sample of the batch needs is computed for nothing: the batch could be so much narrower.

The fact "padding" has the means of the batches that were looked at:

    width     tokens of each sample, padding included
    unneeded  the share of the columns that no sample needs
    padded    the share of all elements that is padding
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpulaunch.profiler.probe.facts import set_fact
from gpulaunch.profiler.probe.tensor_memory import whole_numbers

_KEY: Final = "attention_mask"
_EVERY: Final = 8
"""Of the batches whose size is inspected, this one is looked at. A mask of 32 x 512 takes 20 us."""
_MOST_ELEMENTS: Final = 1 << 18
_ROUND: Final = 8
"""Batches after which the fact is set; later ones weigh as much as all before, so that it follows a change."""


class Padding:
    """The padding of the batches of a rank's training; only its training thread calls it."""

    __slots__ = ("_count", "_padded", "_skip", "_unneeded", "_width")

    def __init__(self) -> None:
        self._skip = self._count = 0
        self._width = self._unneeded = self._padded = 0.0

    def look(self, batch: Any, tensor: type[Any]) -> None:
        """Take a batch of a dataloader; most are skipped. It may raise what a type of the program's raises.

        Args:
            batch: as the loader has returned it.
            tensor: torch's type; its functions must be disabled.
        """
        self._skip -= 1
        if self._skip > 0 or not isinstance(batch, Mapping) or _KEY not in batch:
            return
        self._skip = _EVERY
        mask: Any = batch[_KEY]
        if type(mask) is not tensor or len(mask.shape) != 2:
            return
        if (array := whole_numbers(mask, _MOST_ELEMENTS)) is None:
            return
        samples, width = array.shape
        self._count += 1
        self._width += width
        self._unneeded += 1.0 - int(array.any(axis=0).sum()) / width
        self._padded += 1.0 - int((array != 0).sum()) / (samples * width)
        if self._count >= _ROUND:
            set_fact(
                "padding",
                {
                    "width": round(self._width / self._count),
                    "unneeded": round(self._unneeded / self._count, 2),
                    "padded": round(self._padded / self._count, 2),
                },
            )
            self._count //= 2
            self._width, self._unneeded, self._padded = self._width / 2, self._unneeded / 2, self._padded / 2
