"""Notes the losses of a trial of `gpulaunch tune`, so that a change that alters what the program learns is noticed.

Installed in trials only, and in rank 0. What `backward` is called on is kept, detached, and read once a second: on a
GPU that waits for it, in all trials alike. The fact "losses" has the mean of each `BLOCK` of them in turn; null: not
finite. There is none where a gradient scaler scales the losses, by a factor that changes.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.probe.facts import set_fact
from gpulaunch.profiler.probe.taps import Undo, exclude_from_compile, put
from gpulaunch.profiler.probe.user_signals import raised_by_program

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
        self._is_scaled = False

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
        with suppress(ImportError, AttributeError):
            scaler = importlib.import_module("torch.amp.grad_scaler").GradScaler
            put(scaler, "scale", self.tap_scale(scaler.scale), undo)

    def tap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The entry to the autograd engine, keeping what a backward is of."""
        is_compiling = self._torch.compiler.is_dynamo_compiling

        @functools.wraps(original)
        def tapped_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and kwargs.get("accumulate_grad", False):
                try:
                    self._keep(t_outputs)
                except Exception as error:
                    if raised_by_program(error):
                        raise
                    self._probe.unavailable(Hook.FACTS, repr(error))
            return original(t_outputs, *args, **kwargs)

        return tapped_run_backward

    def tap_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`GradScaler.scale`: from the first call on no losses are published."""

        @functools.wraps(original)
        def tapped_scale(*args: Any, **kwargs: Any) -> Any:
            self._is_scaled = True
            return original(*args, **kwargs)

        return tapped_scale

    def _is_captured(self) -> bool:
        """Whether the GPU's work is recorded for a CUDA graph now: nothing may wait for it."""
        cuda = self._torch.cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def _keep(self, outputs: Any) -> None:
        if len(self._means) + len(self._kept) // BLOCK >= MOST_BLOCKS or not self._probe.trains_here():
            return
        if self._is_scaled or self._is_captured():
            return
        with self._torch._C.DisableTorchFunction():
            if len(outputs) == 1 and outputs[0].numel() == 1:
                self._kept.append(outputs[0].detach())

    def look(self) -> None:
        """Publish the means of the blocks that are complete."""
        if self._is_scaled:
            self._kept.clear()
            set_fact("losses", [])
        if len(self._kept) < BLOCK or self._is_captured():
            return
        whole = len(self._kept) - len(self._kept) % BLOCK
        with self._torch._C.DisableTorchFunction():
            values = [float(each) for each in self._kept[:whole]]
        del self._kept[:whole]
        for first in range(0, whole, BLOCK):
            mean = sum(values[first : first + BLOCK]) / BLOCK
            self._means.append(float(f"{mean:.{_DIGITS}g}") if math.isfinite(mean) else None)
        set_fact("losses", list(self._means))
