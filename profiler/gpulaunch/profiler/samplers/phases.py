"""Which phase of a step a stack was taken in: by the rank's segment, and by what is on the stack.

The segment tells the region that the training thread was in just before the stack was taken and just after. Where it
has passed no edge in between, that is sure; else only torch's own frames can tell, or nothing can. The same holds where
not every step is observed: the others pass an edge after their batch and one at their end, and none between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gpulaunch.profiler.channel.layout import PHASES, REGION_BITS, Region
from gpulaunch.profiler.samplers.pyspy import Frame

STARTUP: Final = "startup"
"""Before the first edge of the training loop: imports, construction, the first look at the data."""
UNSETTLED: Final = "unsettled"
"""The region changed while the stack was taken, and the stack itself does not tell."""
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

_OF_BARE_STEPS: Final = (Region.FORWARD, Region.OTHER)

# What has no region of its own and happens within one, by the file and the name of a frame. The probe takes this time
# out of the region's phase, too.
_WITHIN: Final = (
    ("checkpoint", re.compile(r"/torch/serialization\.py |/torch/distributed/checkpoint/")),
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


def phase_of(frames: Sequence[Frame], before: int, after: int, *, every_step: bool = True) -> str:
    """Name the phase that a stack, deepest frame first, was taken in.

    Args:
        frames: the stack.
        before: LAST_EDGE of the rank's segment just before it was taken.
        after: the same just after. Equal: no edge was passed meanwhile.
        every_step: whether all steps are observed, but for some that are compared with the others.
    """
    if not before:
        return STARTUP
    places = [f"{frame.file} {frame.name}" for frame in frames]
    if phase := _marked(places, _WITHIN):
        return phase
    region = Region(after & (1 << REGION_BITS) - 1)
    if before == after and (every_step or region not in _OF_BARE_STEPS):
        return _REGION_PHASES[region]
    return _marked(places, _REGION_MARKS) or UNSETTLED


def _marked(places: Sequence[str], marks: Sequence[tuple[str, re.Pattern[str]]]) -> str:
    """The phase of the deepest place that is marked, or ""."""
    return next((phase for place in places for phase, mark in marks if mark.search(place)), "")
