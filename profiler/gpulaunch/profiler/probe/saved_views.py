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
from gpulaunch.profiler.probe.tensor_memory import without_functions

_MOST_OBJECTS: Final = 10_000
"""Containers and what is in them; of more nothing is told."""


def look_at_save(saved: object, site: str) -> None:
    """Set the fact about a save of this object."""
    written, spare = bytes_of_save(saved)
    if spare or "saved" in facts.rank_facts.known:
        facts.set_fact("saved", {"site": site, "bytes": written, "spare_bytes": spare})


def bytes_of_save(saved: object) -> tuple[int, int]:
    """Return the bytes that a save of an object writes for tensors, and those of them that no tensor in it has.

    Tensors of types other than torch's own do not count. (0, 0): it has too many objects.
    """
    torch: Any = sys.modules["torch"]
    own_types = (torch.Tensor, torch.nn.Parameter)
    held: dict[int, int] = {}  # by the address of the memory: its bytes, and those of its tensors
    used: dict[int, int] = {}
    todo: list[Any] = [saved]
    with without_functions():
        for thing in todo:
            if type(thing) in own_types:
                if thing.layout is torch.strided and not thing.is_meta:
                    memory = thing.untyped_storage()
                    at = memory.data_ptr()
                    held[at] = memory.nbytes()
                    used[at] = used.get(at, 0) + thing.nbytes
            elif isinstance(thing, dict):
                todo += dict.values(thing)
            elif type(thing) in (list, tuple):
                todo += thing
            if len(todo) > _MOST_OBJECTS:
                return 0, 0
    return sum(held.values()), sum(max(0, size - used[at]) for at, size in held.items())
