"""Places the taps at the edges in torch, and removes them.

    dataloader  `_BaseDataLoaderIter.__next__`: every loop over a DataLoader goes through it
    backward    `torch.autograd._engine_run_backward`: `Tensor.backward`, `autograd.backward`, `autograd.grad` end there
    optimizer   torch's own global step hooks, and `GradScaler.step`, which may skip a step

and the taps of other modules of the probe: `nested`, `copies`, `worker`, `program`, `kineto`.

No module is hooked: a hook on a module makes torch.compile break the graph, or fail with fullgraph=True. The hooks
here are outside of compiled regions; if torch.compile traces a tap, `is_dynamo_compiling()` folds it away, and
`taps.exclude_from_compile` prevents that it compiles the tap as a separate function.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.probe import copies, kineto, nested, program, worker
from gpulaunch.profiler.probe.account import Account
from gpulaunch.profiler.probe.batch import LoaderWatch
from gpulaunch.profiler.probe.budget import Budget
from gpulaunch.profiler.probe.cost import Cost, call_ns
from gpulaunch.profiler.probe.device import accelerator_types, write_memory
from gpulaunch.profiler.probe.edges import (
    tap_after_step,
    tap_backward,
    tap_before_step,
    tap_get_iterator,
    tap_next,
    tap_reset,
    tap_scaler,
    tap_shutdown,
)
from gpulaunch.profiler.probe.graph import GraphNodes
from gpulaunch.profiler.probe.noted import NotedSteps
from gpulaunch.profiler.probe.observed import ObservedSteps
from gpulaunch.profiler.probe.publish import Publisher
from gpulaunch.profiler.probe.service import Service
from gpulaunch.profiler.probe.state import Probe
from gpulaunch.profiler.probe.step import StepMachine
from gpulaunch.profiler.probe.taps import HookError, Undo, exclude_from_compile, function_of, put
from gpulaunch.profiler.probe.unobserved import UnobservedSteps

TORCH_FLOOR: Final = (2, 6)
"""The oldest torch whose internals are known here; in a newer one each tap's target is checked before it is placed."""

Installer = Callable[[Probe, Any, Undo], Hook | None]
"""Places a module's taps; appends the removal to the list. Returns what is in service, None for all of it."""


class Hooks:
    """The taps of one probe in one torch."""

    def __init__(self, probe: Probe, torch: Any) -> None:
        self._probe = probe
        self._torch = torch
        self._undo: list[Undo] = []

    def install(self) -> None:
        """Place every tap that can be placed; the segment records which could not, and why. Raises nothing."""
        places: dict[Hook, Installer] = {
            Hook.DATALOADER | Hook.LOADER_QUEUE | Hook.SAMPLES: _dataloader,
            Hook.BACKWARD: _backward,
            Hook.OPTIMIZER: _optimizer,
            Hook.NESTED: nested.install,
            Hook.COPIES | Hook.SYNCS: copies.install,
            Hook.WORKERS: worker.install,
            Hook.FACTS: program.install,
            Hook.GPU_MEMORY: _gpu_memory,
            Hook(0): kineto.install,
        }
        for hook, place in places.items():
            undo: Undo = []
            try:
                self._check_version()
                in_service = place(self._probe, self._torch, undo)
            except Exception as error:
                _run(undo)
                if hook is Hook.OPTIMIZER:
                    self._probe.machine.compiled()  # has the same effect: its steps are not observed
                self._probe.unavailable(hook, str(error) if isinstance(error, HookError) else repr(error))
            else:
                self._undo.append(undo)  # itself: later taps are entered there
                self._probe.armed(hook if in_service is None else in_service)
        with suppress(Exception):  # without it, the cost of the calls is unknown
            cost = self._probe.cost
            cost.call_ns = cost.call_ns or call_ns(self._torch.compiler.is_dynamo_compiling)

    def remove(self) -> None:
        """Remove the taps, unless another one has replaced them since."""
        while self._undo:
            _run(self._undo.pop())

    def _check_version(self) -> None:
        major, minor, *_ = str(self._torch.__version__).split(".")
        if (int(major), int(minor)) < TORCH_FLOOR:
            raise HookError(f"torch {self._torch.__version__} is older than {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]}")


def _run(undo: Undo) -> None:
    while undo:
        undo.pop()()


def _dataloader(probe: Probe, torch: Any, undo: Undo) -> None:
    dataloader = importlib.import_module("torch.utils.data.dataloader")
    iterator_class = dataloader._BaseDataLoaderIter
    original = function_of(vars(iterator_class)["__next__"], parameters=("self",), variadic=False)
    tap = tap_next(probe, torch, original)
    _keep_out(torch, tap)
    put(iterator_class, "__next__", tap, undo)
    # Without it, starting workers anew is only known by the wait for a first batch.
    with suppress(HookError, KeyError, AttributeError):
        workers_iterator = dataloader._MultiProcessingDataLoaderIter
        create = function_of(vars(dataloader.DataLoader)["_get_iterator"], parameters=("self",), variadic=False)
        reset = function_of(
            vars(workers_iterator)["_reset"], parameters=("self", "loader", "first_iter"), variadic=False
        )
        shut = function_of(vars(workers_iterator)["_shutdown_workers"], parameters=("self",), variadic=False)
        taps = (
            (dataloader.DataLoader, "_get_iterator", tap_get_iterator(probe, torch, create)),
            (workers_iterator, "_reset", tap_reset(probe, torch, reset)),
            (workers_iterator, "_shutdown_workers", tap_shutdown(probe, shut)),
        )
        _keep_out(torch, *(tap for *_, tap in taps))
        for owner, name, tap in taps:
            put(owner, name, tap, undo)


def _backward(probe: Probe, torch: Any, undo: Undo) -> None:
    # autograd imports the name from autograd.graph; torch.compiler sets both to the one of graph after tracing.
    # With the same tap in both, it restores ours.
    autograd = importlib.import_module("torch.autograd")
    graph = importlib.import_module("torch.autograd.graph")
    original = function_of(autograd._engine_run_backward, parameters=("t_outputs",), variadic=True)
    if graph._engine_run_backward is not original:
        raise HookError("torch.autograd and torch.autograd.graph differ in _engine_run_backward")
    nodes = GraphNodes(probe.machine, torch)
    tap = tap_backward(probe, torch, nodes, original)
    _keep_out(torch, tap)
    put(graph, "_engine_run_backward", tap, undo)
    put(autograd, "_engine_run_backward", tap, undo)
    undo.append(probe.each_second(Hook(0), nodes.look))  # if it fails, no tap and no other fact is missing


def _optimizer(probe: Probe, torch: Any, undo: Undo) -> None:
    optimizer = importlib.import_module("torch.optim.optimizer")
    before = tap_before_step(probe, torch)
    after = tap_after_step(probe, torch)
    _keep_out(torch, before, after)
    undo.append(optimizer.register_optimizer_step_pre_hook(before).remove)
    undo.append(optimizer.register_optimizer_step_post_hook(after).remove)
    with suppress(ImportError, AttributeError):  # without it, skipped steps are not counted
        scaler = importlib.import_module("torch.amp.grad_scaler").GradScaler
        scaled = tap_scaler(probe, torch, scaler.step)
        _keep_out(torch, scaled)
        put(scaler, "step", scaled, undo)


def _gpu_memory(probe: Probe, torch: Any, undo: Undo) -> Hook | None:
    """No tap is placed: the allocator is polled, if there may be a GPU."""
    if "cuda" not in accelerator_types(torch, os.environ):
        return Hook(0)
    read = functools.partial(write_memory, probe.writer.words, torch.cuda)
    undo.append(probe.each_second(Hook.GPU_MEMORY, read))
    return None


def _keep_out(torch: Any, *taps: Any) -> None:
    parts = (
        *(Probe, ObservedSteps, UnobservedSteps, Cost, Budget, Service, Publisher),
        *(NotedSteps, StepMachine, Account, LoaderWatch, SegmentWriter, GraphNodes),
    )
    fetch = UnobservedSteps.fetch  # makes the user's call
    ours = (function for part in parts for function in vars(part).values() if function is not fetch)
    exclude_from_compile(torch, *taps, fetch, ours=ours)
