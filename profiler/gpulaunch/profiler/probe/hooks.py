"""Where the edges are tapped in torch, and how the taps come out again.

    dataloader  `_BaseDataLoaderIter.__next__`: every loop over a DataLoader goes through it, whoever wrote the loop
    backward    `torch.autograd._engine_run_backward`: `Tensor.backward`, `autograd.backward`, `autograd.grad` end there
    optimizer   torch's own global step hooks

No module is hooked: a hook on a module makes torch.compile break the graph, or fail with fullgraph=True. What is hooked
here lies outside compiled regions; where torch.compile does trace a tap, `is_dynamo_compiling()` folds it away, and
where it would compile the tap as a function of its own, `_keep_out` tells it not to.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.probe.edges import Probe

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
        probe = self._probe
        is_compiling = self._torch.compiler.is_dynamo_compiling

        @functools.wraps(original)
        def tapped_next(self: Any) -> Any:
            if is_compiling():
                return original(self)
            probe.loader_enter(self)
            try:
                batch = original(self)
            except StopIteration:
                probe.loader_end()
                raise
            probe.loader_exit(batch)
            return batch

        self._keep_out(tapped_next)
        self._set(iterator_class, "__next__", tapped_next)

    def _backward(self) -> None:
        # autograd imports the name from autograd.graph; torch.compiler sets both to what graph has when it has traced.
        # With the same tap in both, what it puts back is ours.
        autograd = importlib.import_module("torch.autograd")
        graph = importlib.import_module("torch.autograd.graph")
        original = _function(autograd._engine_run_backward, parameters=("t_outputs",), variadic=True)
        if graph._engine_run_backward is not original:
            raise HookError("torch.autograd and torch.autograd.graph differ in _engine_run_backward")
        probe = self._probe
        is_compiling = self._torch.compiler.is_dynamo_compiling

        @functools.wraps(original)
        def tapped_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(t_outputs, *args, **kwargs)
            probe.backward_enter()
            try:
                return original(t_outputs, *args, **kwargs)
            finally:
                probe.backward_exit(kwargs.get("accumulate_grad", False))

        self._keep_out(tapped_run_backward)
        self._set(graph, "_engine_run_backward", tapped_run_backward)
        self._set(autograd, "_engine_run_backward", tapped_run_backward)

    def _optimizer(self) -> None:
        optimizer = importlib.import_module("torch.optim.optimizer")
        probe = self._probe
        is_compiling = self._torch.compiler.is_dynamo_compiling

        def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling():
                probe.optimizer_enter(id(optimizer))

        def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling():
                probe.optimizer_exit(id(optimizer))

        self._keep_out(before_step)
        self._keep_out(after_step)
        self._undo.append(optimizer.register_optimizer_step_pre_hook(before_step).remove)
        self._undo.append(optimizer.register_optimizer_step_post_hook(after_step).remove)

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
        ever. What the probe does at an edge is kept out with all that it calls.

        torch does so with its own files, by their path. The switch is in torch's C part, which is there without the
        1.4 s of importing torch._dynamo. Where it is missing, taps are compiled away: silent in such programs.
        """
        try:
            eval_frame = self._torch._C._dynamo.eval_frame
            skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
            eval_frame.set_code_exec_strategy(tap.__code__, eval_frame._FrameExecStrategy(skip, default))
            for edge in vars(Probe).values():
                if isinstance(edge, FunctionType):
                    eval_frame.set_code_exec_strategy(edge.__code__, eval_frame._FrameExecStrategy(skip, skip))
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
