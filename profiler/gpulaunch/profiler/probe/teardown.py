"""Fixes the order in which a DistributedDataParallel releases its parts, so that a finished program also exits.

torch 2.13 occasionally deadlocks, under every launcher, in a finished program (2.14 does not): after
`destroy_process_group()` the C++ reducer of a DistributedDataParallel is the last to hold the process group. When the
program releases its model, `~Reducer` runs `~ProcessGroupGloo` with the GIL held, which joins a thread that waits for
the GIL to release the state of the last allreduce. The module holds the group as a Python object as well, whose
destructor releases the GIL (pytorch/pytorch#154976): it only has to be the last. Attributes go in the order of an
object's `__dict__`, where torch has the group before the reducer.
"""

from __future__ import annotations

import sys
from typing import Any


def release_process_group_last() -> None:
    """Have every DistributedDataParallel keep its process group behind its reducer. Idempotent."""
    distributed = sys.modules.get("torch.nn.parallel.distributed")
    kind: Any = getattr(distributed, "DistributedDataParallel", None)
    build = getattr(kind, "_ddp_init_helper", None)  # makes the reducer, in __init__ and in __setstate__
    if build is None or getattr(build, "__module__", "") == __name__:
        return

    def build_and_order(self: Any, *args: Any, **kwargs: Any) -> Any:
        built = build(self, *args, **kwargs)
        own = vars(self)
        if "process_group" in own:
            own["process_group"] = own.pop("process_group")
        return built

    kind._ddp_init_helper = build_and_order
