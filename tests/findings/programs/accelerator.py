"""A stand-in for a GPU, on torch's `meta` device: it computes nothing, and takes its time as a GPU does.

What is launched runs beside the program, one thing after the other. Who asks for a value waits for all of it; so does a
copy, unless it comes out of pinned memory and was asked not to block: that is launched, too. How long each takes is
made up, but the program really stands still, and it is the program's clock that says for how long.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVICE = "meta"


class Pinned(torch.Tensor):
    """A tensor in pinned memory, which a CPU alone cannot have."""

    def is_pinned(self, *_: Any) -> bool:  # type: ignore[override]
        return True


class Accelerator(TorchFunctionMode):
    """What stands between torch and the device that is none; in force as long as its `with` block."""

    def __init__(self, *, copy_s: float) -> None:
        super().__init__()
        self._copy_s = copy_s
        self._done_s = 0.0

    def launch(self, seconds: float) -> None:
        """Have it compute for so long, after everything else."""
        self._done_s = max(self._done_s, time.monotonic()) + seconds

    def wait(self) -> None:
        """Until it has done everything."""
        time.sleep(max(0.0, self._done_s - time.monotonic()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "item" and args[0].is_meta:
            self.wait()
            return 0.5
        result = func(*args, **(kwargs or {}))
        if name == "to" and type(args[0]) in (torch.Tensor, Pinned) and result.is_meta and not args[0].is_meta:
            self.launch(self._copy_s)
            if not (type(args[0]) is Pinned and (kwargs or {}).get("non_blocking")):
                self.wait()
        return result
