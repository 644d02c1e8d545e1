"""Observes the program's DistributedDataParallel modules: their own log, and whether they search in vain.

DDP reduces gradients during autograd, in C++. Its logger times that in the first ten iterations and then in one of a
hundred; the part that did not overlap with the backward is subtracted from the backward.

With `find_unused_parameters=True` it goes through the graph of each forward for parameters that no rank uses, and the
ranks tell each other which they have used: a tensor with the number of ranks for each parameter. On the CPU it is read
after each step of an optimizer (2 us for 160 parameters); on a GPU that would be a synchronization, so there nothing is
known of it. Nor is it where a step has several backward passes: each may use other parameters, and only what the last
one has used is seen. All of it is in the fact "ddp".
"""

from __future__ import annotations

import functools
import importlib
import weakref
from array import array
from collections.abc import Callable
from typing import Any, Final

from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.channel.quantities import Pauses
from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.sites import line_of_user
from gpulaunch.profiler.probe.state import Probe
from gpulaunch.profiler.probe.taps import Undo, exclude_from_compile, put
from gpulaunch.profiler.probe.user_signals import raised_by_program

_LOGGED: Final = 9  # steps whose median is used for all
_UNPAIRED: Final = 0.1
"""Of the steps: those that are not yet counted, or were skipped."""
SEARCHED: Final = 200
"""Backward passes in which all ranks used all parameters, until the search is taken to be in vain."""
_FACTS: Final = (
    *("backend_name", "world_size", "bucket_cap_bytes", "find_unused_parameters", "gradient_as_bucket_view"),
    *("broadcast_buffers", "static_graph", "comm_hook", "num_parameter_tensors"),
)


def install(probe: Probe, torch: Any, undo: Undo) -> None:
    """Observe modules of DistributedDataParallel.

    Raises:
        AttributeError: torch does not look as expected.
    """
    if not torch.distributed.is_available():
        return
    parallel = importlib.import_module("torch.nn.parallel.distributed").DistributedDataParallel
    reducers = Reducers(probe, torch, undo)
    put(parallel, "__init__", _tap_init(probe, reducers, parallel.__init__), undo)
    undo.append(probe.each_second(Hook.NESTED, reducers.look))


class Reducers:
    """The program's DistributedDataParallel modules."""

    def __init__(self, probe: Probe, torch: Any, undo: Undo) -> None:
        self._probe = probe
        self._torch = torch
        self._undo = undo
        self._modules: list[weakref.ref[Any]] = []
        self._logged = array("q")  # the exposed part of them, in the steps that were logged last
        self._iterations = 0  # that they are of
        self._per_step = 1  # how often each of them reduces: once for each backward, if gradients are accumulated
        self._per_optimizer_step = 1
        self._site = ""
        self._is_compiling = torch.compiler.is_dynamo_compiling
        self._is_hooked = False
        self._searching: weakref.ref[Any] | None = None
        self._searched = 0  # backward passes of which it was read which parameters the ranks had used
        self._skips = False  # in one of them, a parameter was not used by all

    def made(self, module: Any) -> None:
        """Add a new module."""
        self._modules.append(weakref.ref(module))
        self._site, _ = line_of_user()
        if module.find_unused_parameters and module.device_type == "cpu":
            self._searching, self._searched, self._skips = self._modules[-1], 0, False
            self._hook()

    def _hook(self) -> None:
        if not self._is_hooked:
            exclude_from_compile(self._torch, Reducers._stepped, ours=[Reducers._read_used])
            hooks = importlib.import_module("torch.optim.optimizer")
            self._undo.append(hooks.register_optimizer_step_post_hook(self._stepped).remove)
            self._is_hooked = True

    def look(self) -> None:
        """Publish their last logs, summed, since all of them are reduced in one step."""
        comm_ns = overlap_ns = exposed_ns = iterations = modules = 0
        logged: dict[str, Any] = {}
        machine = self._probe.machine
        machine.exposed_ns = 0  # in case the rest fails
        for ref in tuple(self._modules):
            module = ref()
            if module is None:
                self._modules.remove(ref)
                continue
            if getattr(module, "logger", None) is None:
                continue  # it does not reduce gradients itself, or not in C++
            logged = module._get_ddp_logging_data()
            modules += 1
            comm, overlap = logged.get("backward_comm_time", 0), logged.get("backward_compute_comm_overlap_time", 0)
            comm_ns += comm
            overlap_ns += overlap
            iterations += logged.get("iteration", 0)
            if module.device_type == "cpu":  # on CUDA these are the GPU's times, and the steps' phases the program's
                exposed_ns += max(0, comm - overlap)
        words = self._probe.writer.words
        words[Pauses.ddp_comm_ns] = comm_ns
        words[Pauses.ddp_overlap_ns] = overlap_ns
        if iterations != self._iterations:
            self._iterations = iterations
            self._logged = array("q", [*self._logged[1 - _LOGGED :], exposed_ns])
            # The log is of one iteration in a hundred, so this is never too high; of forwards, of which one backward
            # may have several.
            each = min(iterations / modules, machine.microsteps)
            self._per_step = max(1, round(each / max(1, machine.totals[0])))
            self._per_optimizer_step = max(1, round(each / max(1, machine.optimized)))
        if modules:
            told: dict[str, Any] = {
                **{key: logged[key] for key in _FACTS if key in logged},
                "modules": modules,
                "reductions_per_step": self._per_optimizer_step,
                "searched_in_vain": modules == 1 and self._is_in_vain(),
                "site": self._site,
            }
            facts.set_fact("ddp", told)
        # Only one step in a hundred is logged, and its wait may be an outlier.
        median_ns = sorted(self._logged)[len(self._logged) // 2] if self._logged else 0
        machine.exposed_ns = self._per_step * median_ns

    def _is_in_vain(self) -> bool:
        """Whether the one module searches for parameters that no step has left out so far."""
        if self._searching is None or self._searching() is None or self._searched < SEARCHED or self._skips:
            return False
        steps, passes = self._probe.machine.optimized, self._probe.machine.microsteps
        if abs(passes - steps) > _UNPAIRED * steps:
            self._searching = None  # no step is known as a whole, so none need be read
            return False
        return True

    def _stepped(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """An optimizer post-hook."""
        if self._is_compiling():
            return
        try:
            self._read_used()
        except Exception as error:
            self._searching = None
            if raised_by_program(error):
                raise

    def _read_used(self) -> None:
        """Count the backward pass before a step, and whether all ranks used all parameters in it."""
        module = None if self._searching is None or self._skips else self._searching()
        if module is None or module.static_graph or not self._probe.trains_here():
            return
        # To a list, because no mode of the program sees that, as it would an operation on the tensor.
        with self._torch._C.DisableTorchFunction():
            used = module.reducer._get_local_used_map().tolist()
        self._searched += 1
        self._skips = min(used) != max(used) or used[0] != module.process_group.size()


def _tap_init(probe: Probe, reducers: Reducers, original: Callable[..., None]) -> Callable[..., None]:
    """`DistributedDataParallel.__init__`, reporting each new module."""

    @functools.wraps(original)
    def tapped_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            reducers.made(self)
        except Exception as error:
            if raised_by_program(error):
                raise
            probe.unavailable(Hook.NESTED, repr(error))

    return tapped_init
