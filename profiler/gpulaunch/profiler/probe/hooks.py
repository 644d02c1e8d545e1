"""Where the edges are tapped in torch, and how the taps come out again.

    dataloader  `_BaseDataLoaderIter.__next__`: every loop over a DataLoader goes through it, whoever wrote the loop
    backward    `torch.autograd._engine_run_backward`: `Tensor.backward`, `autograd.backward`, `autograd.grad` end there
    optimizer   torch's own global step hooks

No module is hooked: a hook on a module makes torch.compile break the graph, or fail with fullgraph=True. What is hooked
here lies outside compiled regions; where torch.compile does trace a tap, `is_dynamo_compiling()` folds it away, and
where it would compile the tap as a function of its own, `_keep_out` tells it not to.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.probe.batch import samples_in
from gpulaunch.profiler.probe.edges import Probe, tap_after_step, tap_backward, tap_before_step, tap_next
from gpulaunch.profiler.probe.step import StepMachine

__all__ = ["TORCH_FLOOR", "HookError", "Hooks"]

TORCH_FLOOR: Final = (2, 6)
"""The oldest torch whose inside is known here; in a newer one each tap is looked at before it is placed."""


class HookError(Exception):
    """A tap's place in torch does not look as expected; the text says how."""


class Hooks:
    """The taps of one probe in one torch."""

    def __init__(self, probe: Probe, torch: Any) -> None:
        self._probe = probe
        self._torch = torch
        self._undo: list[Callable[[], None]] = []

    def place(self) -> None:
        """Place every tap that can be placed; the page tells which could not, and why. Raises nothing."""
        places = {Hook.DATALOADER: self._dataloader, Hook.BACKWARD: self._backward, Hook.OPTIMIZER: self._optimizer}
        for hook, place in places.items():
            try:
                self._check_version()
                place()
            except Exception as error:
                self._probe.unavailable(hook, str(error) if isinstance(error, HookError) else repr(error))
            else:
                self._probe.armed(hook)

    def remove(self) -> None:
        """Take the taps out again, unless somebody has put another on top since."""
        while self._undo:
            self._undo.pop()()

    def _check_version(self) -> None:
        major, minor, *_ = str(self._torch.__version__).split(".")
        if (int(major), int(minor)) < TORCH_FLOOR:
            raise HookError(f"torch {self._torch.__version__} is older than {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]}")

    def _dataloader(self) -> None:
        dataloader = importlib.import_module("torch.utils.data.dataloader")
        iterator_class = dataloader._BaseDataLoaderIter
        original = _function(iterator_class.__dict__["__next__"], parameters=("self",), variadic=False)
        tap = tap_next(self._probe, self._torch, original)
        self._keep_out(tap)
        self._set(iterator_class, "__next__", tap)

    def _backward(self) -> None:
        # autograd imports the name from autograd.graph; torch.compiler sets both to what graph has when it has traced.
        # With the same tap in both, what it puts back is ours.
        autograd = importlib.import_module("torch.autograd")
        graph = importlib.import_module("torch.autograd.graph")
        original = _function(autograd._engine_run_backward, parameters=("t_outputs",), variadic=True)
        if graph._engine_run_backward is not original:
            raise HookError("torch.autograd and torch.autograd.graph differ in _engine_run_backward")
        tap = tap_backward(self._probe, self._torch, original)
        self._keep_out(tap)
        self._set(graph, "_engine_run_backward", tap)
        self._set(autograd, "_engine_run_backward", tap)

    def _optimizer(self) -> None:
        optimizer = importlib.import_module("torch.optim.optimizer")
        before = tap_before_step(self._probe, self._torch)
        after = tap_after_step(self._probe, self._torch)
        self._keep_out(before)
        self._keep_out(after)
        self._undo.append(optimizer.register_optimizer_step_pre_hook(before).remove)
        self._undo.append(optimizer.register_optimizer_step_post_hook(after).remove)

    def _set(self, owner: Any, name: str, tap: object) -> None:
        original = getattr(owner, name)
        setattr(owner, name, tap)

        def undo() -> None:
            if getattr(owner, name) is tap:
                setattr(owner, name, original)

        self._undo.append(undo)

    def _keep_out(self, tap: Any) -> None:
        """Have torch.compile run this tap as it is, and not compile it, when it meets it outside a graph.

        Only the tap: what it wraps calls code of the user's (an autograd.Function, a dataset) that is to be compiled as
        ever. What a tap calls of ours is kept out with all that it calls.

        torch does so with its own files, by their path. The switch is in torch's C part, which is there without the
        1.4 s of importing torch._dynamo. Where it is missing, taps are compiled away: silent in such programs.
        """
        try:
            eval_frame = self._torch._C._dynamo.eval_frame
            skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
            eval_frame.set_code_exec_strategy(tap.__code__, eval_frame._FrameExecStrategy(skip, default))
            for ours in (samples_in, *vars(Probe).values(), *vars(StepMachine).values()):
                if isinstance(ours, FunctionType):
                    eval_frame.set_code_exec_strategy(ours.__code__, eval_frame._FrameExecStrategy(skip, skip))
        except AttributeError:
            pass


def _function(found: object, *, parameters: tuple[str, ...], variadic: bool) -> FunctionType:
    """`found`, if it is a Python function of just this shape."""
    if not isinstance(found, FunctionType):
        raise HookError(f"{found!r} is not a function")
    code = found.__code__
    has = code.co_varnames[: code.co_argcount]
    takes_rest = bool(code.co_flags & 0x04) and bool(code.co_flags & 0x08)  # CO_VARARGS, CO_VARKEYWORDS
    if has != parameters or code.co_kwonlyargcount or takes_rest != variadic:
        raise HookError(f"{found.__qualname__} takes {has}, not {parameters}")
    return found
