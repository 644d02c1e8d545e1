"""Notes the losses of a trial of `gpulaunch tune`, so that a change that alters what the program learns is noticed.

Installed in trials only. What `backward` is called on is kept, detached, and read once a second: on a GPU that waits
for it, in all trials alike. The fact "losses" has the mean of each `BLOCK` of them in turn; null: not finite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.probe.facts import set_fact
from gpulaunch.profiler.probe.taps import Undo, exclude_from_compile, put

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.state import Probe

BLOCK: Final = 4
"""Losses in a mean."""
MOST_BLOCKS: Final = 256
_DIGITS: Final = 6


class Losses:
    """The losses of the training thread."""

    def __init__(self, probe: Probe, torch: Any) -> None:
        self._probe = probe
        self._torch = torch
        self._kept: list[Any] = []
        self._means: list[float | None] = []

    def install(self, autograd: Any, graph: Any, undo: Undo) -> None:
        """Tap the entry to the autograd engine, above the tap that is there.

        Args:
            autograd: torch.autograd.
            graph: torch.autograd.graph.
            undo: gets what takes it out again.
        """
        tap = self.tap(autograd._engine_run_backward)
        exclude_from_compile(self._torch, tap)
        put(graph, "_engine_run_backward", tap, undo)
        put(autograd, "_engine_run_backward", tap, undo)
        undo.append(self._probe.each_second(Hook.FACTS, self.look))

    def tap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The entry to the autograd engine, keeping what a backward is of."""
        is_compiling = self._torch.compiler.is_dynamo_compiling

        @functools.wraps(original)
        def tapped_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and kwargs.get("accumulate_grad", False):
                try:
                    self._keep(t_outputs)
                except Exception as error:
                    self._probe.unavailable(Hook.FACTS, repr(error))
            return original(t_outputs, *args, **kwargs)

        return tapped_run_backward

    def _keep(self, outputs: Any) -> None:
        if len(self._means) + len(self._kept) // BLOCK >= MOST_BLOCKS or not self._probe.trains_here():
            return
        with self._torch._C.DisableTorchFunction():
            if len(outputs) == 1 and outputs[0].numel() == 1:
                self._kept.append(outputs[0].detach())

    def look(self) -> None:
        """Publish the means of the blocks that are complete."""
        if len(self._kept) < BLOCK:
            return
        whole = len(self._kept) - len(self._kept) % BLOCK
        with self._torch._C.DisableTorchFunction():
            values = [float(each) for each in self._kept[:whole]]
        del self._kept[:whole]
        for first in range(0, whole, BLOCK):
            mean = sum(values[first : first + BLOCK]) / BLOCK
            self._means.append(float(f"{mean:.{_DIGITS}g}") if math.isfinite(mean) else None)
        set_fact("losses", list(self._means))
