"""Measures intervals nested in the phases: compilations and saves; garbage collections are in `garbage`, collectives in
`collectives` and `ddp`.

    compile     torch._dynamo's own callbacks, for frames and for backwards that are compiled at their first use
    checkpoint  `torch.save`, `torch.distributed.checkpoint.save` and `async_save`, the function by which safetensors
                writes, and the saves of Accelerate, Lightning and the Hugging Face Trainer

Most of these are imported late or never: they are searched for at the first edge and once a second. If a program
imports `save` from torch.distributed.checkpoint by name before that, its calls bypass the tap.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any, Final

from gpulaunch.profiler.channel.layout import SITE_KINDS, Hook
from gpulaunch.profiler.channel.quantities import Pauses
from gpulaunch.profiler.probe import collectives, ddp, garbage
from gpulaunch.profiler.probe.account import CHECKPOINT, COMPILE
from gpulaunch.profiler.probe.saved_views import look_at_save
from gpulaunch.profiler.probe.sites import line_of_user
from gpulaunch.profiler.probe.state import Nested, Probe
from gpulaunch.profiler.probe.taps import Undo, exclude_from_compile, put, take_out
from gpulaunch.profiler.probe.training_thread import OFF
from gpulaunch.profiler.probe.user_signals import raised_by_program

_SAVE: Final = SITE_KINDS.index("save")
_CHECKPOINT: Final = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_saver")
_LATE: Final = (
    (_CHECKPOINT, "", "save"),
    (_CHECKPOINT, "", "async_save"),
    (("safetensors.torch",), "", "serialize_file"),
    (("accelerate.accelerator",), "Accelerator", "save_state"),
    (("lightning.pytorch.trainer.trainer",), "Trainer", "save_checkpoint"),
    (("pytorch_lightning.trainer.trainer",), "Trainer", "save_checkpoint"),
    (("transformers.trainer",), "Trainer", "_save_checkpoint"),
)
"""Modules that have it, their class if it is a method, and its name."""


def install(probe: Probe, torch: Any, undo: Undo) -> None:
    """Observe all of them; those not imported yet, once they are.

    Raises:
        HookError: torch does not look as expected.
    """
    collectives.install(probe, torch, undo)
    ddp.install(probe, torch, undo)
    saves = _Saves(probe, torch, undo)
    compilations = Compilations(probe)
    undo.append(compilations.forget)
    for look in (saves.look, compilations.look):
        look()
        undo.append(probe.each_second(Hook.NESTED, look))
    exclude_from_compile(torch, ours=vars(Compilations).values())
    garbage.install(probe, torch, undo)


class Compilations:
    """Compilations that torch.compile reports. One at a time is counted: nested ones are part of it."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._handler: Any = None
        self._began_ns = 0
        self._nested: Nested | None = None
        self._nested_before_ns: int | None = None  # of one that the training thread waits for

    def look(self) -> None:
        """Register the callbacks, if torch._dynamo is imported; `torch._dynamo.reset()` drops them."""
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is None or self._began in handler.start_callbacks:
            return
        handler.register_start_callback(self._began)
        handler.register_end_callback(self._ended)
        self._handler = handler

    def forget(self) -> None:
        """Unregister the callbacks."""
        if self._handler is not None:
            take_out(self._handler.start_callbacks, self._began)
            take_out(self._handler.end_callbacks, self._ended)

    def _began(self, *_: object) -> None:  # torch 2.6 gives no arguments
        probe = self._probe
        if probe.thread == OFF:
            return
        try:
            self._began_ns = monotonic_ns()
            self._nested = probe.nested()
            probe.machine.compiled()
            # On CUDA a backward is compiled in autograd's thread for the device, and the training thread waits for it.
            waits = self._nested is None and probe.is_in_backward()
            self._nested_before_ns = probe.machine.nested_ns if waits else None
        except Exception as error:
            probe.fail(error)

    def _ended(self, *_: object) -> None:
        probe = self._probe
        if probe.thread == OFF or not self._began_ns:
            return
        try:
            began_ns, self._began_ns = self._began_ns, 0
            if self._nested is not None:
                probe.nested_end(COMPILE, self._nested)
            elif self._nested_before_ns is not None and probe.is_in_backward():
                probe.machine.nest(COMPILE, began_ns, monotonic_ns(), self._nested_before_ns)
            words = probe.writer.words
            words[Pauses.compiles] += 1
            words[Pauses.compile_ns_total] += monotonic_ns() - began_ns
        except Exception as error:
            probe.fail(error)


class _Saves:
    """The functions that save."""

    def __init__(self, probe: Probe, torch: Any, undo: Undo) -> None:
        self._probe = probe
        self._torch = torch
        self._undo = undo
        self._rows: dict[str, int] = {}
        self._awaited = set(_LATE)
        self._tap((torch, torch.serialization), "save")

    def look(self) -> None:
        """Tap what has been imported since."""
        for late in tuple(self._awaited):
            modules, of_class, name = late
            owners: list[Any] = [sys.modules.get(module) for module in modules]
            if of_class:
                owners = [getattr(owner, of_class, None) for owner in owners]
            if all(hasattr(owner, name) for owner in owners):
                self._awaited.discard(late)
                self._tap(owners, name)

    def _tap(self, owners: Sequence[Any], name: str) -> None:
        """One tap for a function, in each of the modules that have it, or for a method."""
        original = getattr(owners[0], name)
        tap = self._tapped(original)
        exclude_from_compile(self._torch, tap)
        for owner in owners:
            if getattr(owner, name) is original:
                put(owner, name, tap, self._undo)

    def _tapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that saves: its whole duration, including collectives, is checkpoint time."""
        probe = self._probe
        is_compiling = self._torch.compiler.is_dynamo_compiling
        writes_memory = original is self._torch.save

        @functools.wraps(original)
        def tapped_save(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            began = probe.nested()
            try:
                return original(*args, **kwargs)
            finally:
                if began is not None:
                    self._saved(probe.nested_end(CHECKPOINT, began), args[0] if writes_memory and args else None)

        return tapped_save

    def _saved(self, blocked_ns: int, saved: object) -> None:
        """Count it at the line that saves; `saved`: the object, if the memory of its tensors is written."""
        probe = self._probe
        if probe.thread == OFF:
            return
        try:
            where, _ = line_of_user()
            row = self._rows.get(where)
            if row is None:
                row = self._rows[where] = probe.writer.add_site(_SAVE, where)
            probe.writer.site(row, blocked_ns=blocked_ns)
            if saved is not None:
                look_at_save(saved, where)
        except Exception as error:
            if raised_by_program(error):
                raise
            probe.unavailable(Hook.NESTED, repr(error))
