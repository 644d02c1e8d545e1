"""Determines in which phase of a step a stack was sampled, from the rank's segment and the frames of the stack.

The segment has the region of the training thread just before the sample and just after. If the thread passed no edge in
between, the region is certain; otherwise only torch's own frames can decide it, if any can. The same holds where not
every step is observed: the other steps have an edge after their batch and one at their end, and none between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gpulaunch.profiler.channel.layout import PHASES, REGION_BITS, Region
from gpulaunch.profiler.stack import Frame

STARTUP: Final = "startup"
"""Before the first edge of the training loop: imports, construction, first access to the data."""
UNSETTLED: Final = "unsettled"
"""The region changed while the stack was taken, and the stack itself does not decide it."""
STACK_PHASES: Final = (STARTUP, *PHASES, UNSETTLED)

_REGION_PHASES: Final = {
    Region.NONE: STARTUP,
    Region.LOADER: "data_wait",
    Region.FORWARD: "forward",
    Region.BACKWARD: "backward",
    Region.STEPPING: "other",
    Region.OPTIMIZER: "optimizer",
    Region.OTHER: "other",
    Region.VALIDATION: "validation",
}

_OF_UNOBSERVED_STEPS: Final = (Region.FORWARD, Region.OTHER)

# Activities without a region of their own, by file and name of a frame. The probe also subtracts their time from the
# region's phase.
_WITHIN: Final = (
    ("checkpoint", re.compile(r"/torch/serialization\.py \w*save$|/torch/distributed/checkpoint/")),
    ("checkpoint", re.compile(r"/gpulaunch/checkpoint/_(saver|copies|store|state|votes)\.py ")),  # not its loop
    ("compile", re.compile(r"/torch/_dynamo/convert_frame\.py |/torch/_inductor/compile_fx\.py ")),
    ("comm", re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py ")),
    ("sync", re.compile(r"/torch/cuda/(__init__|streams)\.py (\S+\.)?synchronize$")),
)
# The same for the phases that have a region.
_REGION_MARKS: Final = (
    ("data_wait", re.compile(r"/torch/utils/data/dataloader\.py ")),
    ("backward", re.compile(r"/torch/autograd/(graph|__init__)\.py ")),
    ("optimizer", re.compile(r"/torch/optim/(?!lr_scheduler\.py|swa_utils\.py)")),
    ("forward", re.compile(r"/torch/nn/modules/module\.py (\S+\.)?_call_impl$")),
)
# An optimizer may run the forward pass, in a closure: that of Lightning, or of a program with LBFGS.
_OPTIMIZER_MARKS: Final = (
    ("optimizer", re.compile(r"/torch/optim/")),
    ("forward", re.compile(r" (\S+\.)?(closure|Closure\.__call__)$")),
)


def phase_of(frames: Sequence[Frame], before: int, after: int, *, every_step: bool = True) -> str:
    """Return the phase in which a stack, deepest frame first, was taken.

    Args:
        frames: the stack.
        before: LAST_EDGE of the rank's segment just before it was taken.
        after: the same just after. If equal, no edge was passed meanwhile.
        every_step: whether all steps are observed; in others the rank passes only the edges to these two regions.
    """
    if not before:
        return STARTUP
    places = [f"{frame.file} {frame.name}" for frame in frames]
    if phase := _marked(places, _WITHIN):
        return phase
    region = Region(after & (1 << REGION_BITS) - 1)
    if before == after and (every_step or region not in _OF_UNOBSERVED_STEPS):
        inside = _marked(places, _OPTIMIZER_MARKS) if region == Region.OPTIMIZER else ""
        return inside or _REGION_PHASES[region]
    return _marked(places, _REGION_MARKS) or UNSETTLED


def _marked(places: Sequence[str], marks: Sequence[tuple[str, re.Pattern[str]]]) -> str:
    """The phase of the deepest place that matches a mark, or ""."""
    return next((phase for place in places for phase, mark in marks if mark.search(place)), "")
