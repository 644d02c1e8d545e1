"""Where copies between CPU and GPU, and waits for the GPU, are tapped in torch.

    torch.Tensor   to, cuda, cpu, copy_, pin_memory; item, tolist, numpy, nonzero, bool(), float(), int(), index()
    nn.Module      to, cuda, cpu: as a whole, not parameter by parameter
    torch.cuda     synchronize, Event.synchronize, Stream.synchronize; torch.accelerator.synchronize

Only where there may be an accelerator: elsewhere no method of Tensor is touched. Not seen are copies and waits that
torch's C++ makes by itself, as for a boolean mask, and `torch.nonzero(x)`: who overrides that function knows it by
identity, and is handed what no tap can be. A warning that C++ gives within a tapped call names a line of ours.

Most calls have nothing to do with a GPU: an optimizer asks hundreds of CPU tensors for their `item`. So a tap looks at
the tensor first, and goes to the ledger only for one that is not a plain tensor on the CPU.

torch.compile knows methods of tensors by name. Where it traces a tap all the same (under `torch.set_default_device`),
the tap is the call by name again, which is what it would have traced without. Functions of modules it knows by
identity: so those taps say what they stand for (`_torchdynamo_inline`, as torch.jit's do).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from gpulaunch.profiler.channel.layout import SITE_KINDS, SYNCS, Hook, TextSlot
from gpulaunch.profiler.probe.device import accelerator_types, watch_out_of_memory
from gpulaunch.profiler.probe.gpu_time import Events, GpuClock
from gpulaunch.profiler.probe.originals import Originals
from gpulaunch.profiler.probe.state import Probe
from gpulaunch.profiler.probe.taps import HookError, Undo, keep_out, put
from gpulaunch.profiler.probe.transfers import Transfers

_D2H: Final = SITE_KINDS.index("d2h")
_CPU: Final = SITE_KINDS.index("cpu")
_SYNCHRONIZE: Final = SYNCS.index("synchronize")
_READS: Final = {
    "item": "item",
    "__float__": "item",
    "__int__": "item",
    "__index__": "item",
    "__bool__": "bool",
    "tolist": "tolist",
}
"""Methods without arguments that wait, and what they wait by."""

Tap = Callable[..., Any]


def place(probe: Probe, torch: Any, undo: Undo) -> Hook:
    """Tap all of them, if there may be an accelerator.

    Returns:
        What is in service.

    Raises:
        HookError: torch does not look as expected.
    """
    words = probe.writer.words
    types = accelerator_types(torch, os.environ)
    if not types:
        return Hook(0)
    clock = GpuClock(words, torch.cuda)
    ledger = Transfers(probe, torch, types, clock)
    probe.bare.can_do_without(Hook.COPIES | Hook.SYNCS, ledger.do_without)
    _tensors(ledger, torch, undo)
    _modules(ledger, torch, undo)
    _functions(ledger, torch, undo)
    calling = {name: function for name, function in vars(Transfers).items() if name in Transfers.CALLING}
    rest = (function for name, function in vars(Transfers).items() if name not in calling)
    keep_out(torch, *calling.values(), Originals.call, ours=(*rest, *vars(GpuClock).values(), *vars(Events).values()))
    if "cuda" in types:
        watch_out_of_memory(
            torch,
            words,
            os.environ,
            lambda why: probe.writer.write_text(TextSlot.FAULT, f"no snapshot when GPU memory runs out: {why}"),
        )
    probe.clock = clock
    undo.append(lambda: setattr(probe, "clock", None))
    return Hook.COPIES | Hook.SYNCS | Hook.GPU_TIME


def _tensors(ledger: Transfers, torch: Any, undo: Undo) -> None:
    taps: dict[str, Tap] = {
        "to": tap_to(ledger, torch, _original(torch, "to")),
        "cuda": tap_moving(ledger, torch, "cuda", _D2H, _original(torch, "cuda")),
        "cpu": tap_moving(ledger, torch, "cpu", _CPU, _original(torch, "cpu")),
        "copy_": tap_filling(ledger, torch, _original(torch, "copy_")),
        "pin_memory": tap_pinning(ledger, torch, _original(torch, "pin_memory")),
    }
    for name, sync in _READS.items():
        taps[name] = tap_reading(ledger, torch, name, SYNCS.index(sync), _original(torch, name))
    for name in ("numpy", "nonzero"):
        taps[name] = tap_waiting(ledger, torch, name, SYNCS.index(name), _original(torch, name))
    for name, tap in taps.items():
        # As methods of Tensor have that are written in Python: who pickles one, or writes its name into the code that
        # torch.fx makes, is understood.
        tap.__module__, tap.__qualname__ = "torch._tensor", f"Tensor.{name}"
        keep_out(torch, tap)
        put(torch.Tensor, name, tap, undo)
    _tell_dynamo(taps, undo)
    _tell_overrides(torch, taps)


def _original(torch: Any, name: str) -> Any:
    original = getattr(torch.Tensor, name, None)
    if not callable(original):
        raise HookError(f"torch.Tensor has no {name}")
    return original


def _tell_dynamo(taps: dict[str, Tap], undo: Undo) -> None:
    """torch._dynamo keeps what it found in torch.Tensor when it was imported, and compares it with what is there."""
    tensor = sys.modules.get("torch._dynamo.variables.tensor")
    known = getattr(tensor, "all_tensor_attrs", None)
    if isinstance(known, dict):
        before = {name: known[name] for name in taps if name in known}
        known.update(taps)
        undo.append(functools.partial(known.update, before))


def _tell_overrides(torch: Any, taps: dict[str, Tap]) -> None:
    """torch.overrides keeps which functions are methods of tensors from when it was first asked; torch.fx asks it, and
    what is no method becomes a call of a function of that name, which there is none of."""
    overrides = torch.overrides
    if _has_answered(overrides, "_get_overridable_functions"):
        names = overrides._get_overridable_functions()[1]
        names.update({tap: f"torch.Tensor.{name}" for name, tap in taps.items()})
    if _has_answered(overrides, "_get_tensor_methods"):
        overrides._get_tensor_methods().update(taps.values())


def _has_answered(owner: Any, name: str) -> bool:
    """Whether a function of no arguments keeps its answer, and has given it; if not, it will find the taps."""
    cache_info = getattr(getattr(owner, name, None), "cache_info", None)
    return cache_info is not None and bool(cache_info().currsize)


def _modules(ledger: Transfers, torch: Any, undo: Undo) -> None:
    for name in ("to", "cuda", "cpu"):
        tap = tap_module(ledger, torch, getattr(torch.nn.Module, name))
        keep_out(torch, tap)
        put(torch.nn.Module, name, tap, undo)


def _functions(ledger: Transfers, torch: Any, undo: Undo) -> None:
    owners = [torch.cuda, torch.cuda.Event, torch.cuda.Stream, getattr(torch, "accelerator", None)]
    for owner in owners:
        if owner is not None:
            tap: Any = tap_synchronize(ledger, torch, owner.synchronize)
            tap._torchdynamo_inline = tap.__wrapped__
            keep_out(torch, tap)
            put(owner, "synchronize", tap, undo)


# --- the taps ---------------------------------------------------------------------------------------------------------


def _function(torch: Any, method: Tap) -> Tap:
    """The same as a function: torch.compile, when it traces a tap, can have no other callable of ours in it.

    An exception of the user's call passes without the frames that lie below.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            error.__traceback__ = _below_ours(error.__traceback__)
            raise

    keep_out(torch, call)
    return call


def _below_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("gpulaunch."):
        trace = trace.tb_next
    return trace


def tap_to(ledger: Transfers, torch: Any, original: Any) -> Tap:
    """`Tensor.to`. Models are full of `to(dtype)`, which moves nothing."""
    is_compiling = torch.compiler.is_dynamo_compiling
    copies, plain, dtype = _function(torch, ledger.copies), torch.Tensor, torch.dtype

    @functools.wraps(original)
    def tapped_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self.to(*args, **kwargs)
        if type(self) is plain and len(args) == 1 and type(args[0]) is dtype and not kwargs:
            return original(self, args[0])
        return copies(_D2H, original, (self, *args), kwargs)

    return tapped_to


def tap_moving(ledger: Transfers, torch: Any, name: str, kind: int, original: Any) -> Tap:
    """`Tensor.cuda` and `Tensor.cpu`."""
    is_compiling = torch.compiler.is_dynamo_compiling
    copies = _function(torch, ledger.copies)

    @functools.wraps(original)
    def tapped_move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return getattr(self, name)(*args, **kwargs)
        return copies(kind, original, (self, *args), kwargs)

    return tapped_move


def tap_filling(ledger: Transfers, torch: Any, original: Any) -> Tap:
    """`Tensor.copy_`. Most stay on one device."""
    is_compiling = torch.compiler.is_dynamo_compiling
    copies, plain = _function(torch, ledger.copies), (torch.Tensor, torch.nn.Parameter)
    has_mode = torch._C._is_torch_function_mode_enabled  # it would see that a tap looks at a tensor

    @functools.wraps(original)
    def tapped_copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self.copy_(*args, **kwargs)
        if args and type(self) in plain and type(args[0]) in plain and not has_mode():
            source = args[0]
            if self.get_device() == source.get_device() and self.is_cpu == source.is_cpu:
                return original(self, *args, **kwargs)
        return copies(_D2H, original, (self, *args), kwargs, into=True)

    return tapped_copy


def tap_pinning(ledger: Transfers, torch: Any, original: Any) -> Tap:
    """`Tensor.pin_memory`."""
    is_compiling = torch.compiler.is_dynamo_compiling
    pins = _function(torch, ledger.pins)

    @functools.wraps(original)
    def tapped_pin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self.pin_memory(*args, **kwargs)
        return pins(original, (self, *args), kwargs)

    return tapped_pin


def tap_reading(ledger: Transfers, torch: Any, name: str, sync: int, original: Any) -> Tap:
    """A method without arguments that gives what is in a tensor to Python."""
    is_compiling = torch.compiler.is_dynamo_compiling
    waits, plain, has_mode = _function(torch, ledger.waits), torch.Tensor, torch._C._is_torch_function_mode_enabled

    @functools.wraps(original)
    def tapped_read(self: Any) -> Any:
        if is_compiling():
            return getattr(self, name)()
        if type(self) is plain and not has_mode() and self.is_cpu:
            return original(self)
        return waits(sync, self, original, (self,), {})

    return tapped_read


def tap_waiting(ledger: Transfers, torch: Any, name: str, sync: int, original: Any) -> Tap:
    """The same of a method with arguments."""
    is_compiling = torch.compiler.is_dynamo_compiling
    waits, plain, has_mode = _function(torch, ledger.waits), torch.Tensor, torch._C._is_torch_function_mode_enabled

    @functools.wraps(original)
    def tapped_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return getattr(self, name)(*args, **kwargs)
        if type(self) is plain and not has_mode() and self.is_cpu:
            return original(self, *args, **kwargs)
        return waits(sync, self, original, (self, *args), kwargs)

    return tapped_wait


def tap_module(ledger: Transfers, torch: Any, original: Any) -> Tap:
    """`Module.to`, `Module.cuda`, `Module.cpu`."""
    is_compiling = torch.compiler.is_dynamo_compiling
    module_moves = _function(torch, ledger.module_moves)

    @functools.wraps(original)
    def tapped_move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        return module_moves(original, (self, *args), kwargs)

    return tapped_move


def tap_synchronize(ledger: Transfers, torch: Any, original: Any) -> Tap:
    """What waits for a GPU, a stream or an event."""
    is_compiling = torch.compiler.is_dynamo_compiling
    waits = _function(torch, ledger.waits)

    @functools.wraps(original)
    def tapped_synchronize(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        return waits(_SYNCHRONIZE, None, original, args, kwargs)

    return tapped_synchronize
