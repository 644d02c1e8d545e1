"""Counts the bytes that `torch.save` writes although the checkpoint has no tensor of them.

It writes all of the memory of a tensor, also if that is a view of a larger one: with `vectors[:4000]` all of `vectors`
(torch's notes on serialization, "Saving and loading tensors preserves views"). The fact "saved" has the newest such
save:

    site          the line that saves
    bytes         the memory of all of its tensors
    spare_bytes   what none of them has of it
"""

from __future__ import annotations

import sys
from typing import Any, Final

from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.tensor_memory import storage_of, without_functions

_MOST_OBJECTS: Final = 10_000
"""Containers and what is in them; of more nothing is told."""
_PLAIN: Final = (int, float, bool, str, type(None))
"""Besides tensors, what takes no time to write."""


def look_at_save(saved: object, site: str) -> None:
    """Set the fact about a save of this object."""
    written, spare = bytes_of_save(saved)
    if spare or "saved" in facts.rank_facts.known:
        facts.set_fact("saved", {"site": site, "bytes": written, "spare_bytes": spare})


def bytes_of_save(saved: object) -> tuple[int, int]:
    """Return the bytes that a save of an object writes for tensors, and those of them that no tensor in it has.

    (0, 0): it has too many objects, or others than tensors of torch's own types on a device, containers, numbers and
    texts. They may be most of what is written, or have that memory, as a module does. None of their code runs.
    """
    torch: Any = sys.modules["torch"]
    own_types = (torch.Tensor, torch.nn.Parameter)
    held: dict[int, int] = {}  # by the address of the memory: its bytes, and those of its tensors
    used: dict[int, int] = {}
    todo: list[Any] = [saved]
    with without_functions():
        for thing in todo:
            kind = type(thing)
            if kind in own_types:
                if thing.is_meta or (found := storage_of(thing)) is None:
                    return 0, 0
                storage, at = found
                held[at] = storage.nbytes()
                used[at] = used.get(at, 0) + thing.nbytes
            elif issubclass(kind, dict) and len(todo) + dict.__len__(thing) <= _MOST_OBJECTS:
                todo += dict.values(thing)
            elif kind in (list, tuple) and len(todo) + len(thing) <= _MOST_OBJECTS:
                todo += thing
            elif kind not in _PLAIN:
                return 0, 0
    return sum(held.values()), sum(max(0, size - used[at]) for at, size in held.items())
