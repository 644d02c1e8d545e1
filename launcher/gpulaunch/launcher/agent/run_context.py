"""What all attempts of a run share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpulaunch.launcher.agent.rundir import RunDir
from gpulaunch.launcher.agent.segments import Segments
from gpulaunch.launcher.failure.evidence import OomWatch
from gpulaunch.launcher.job.spec import JobSpec
from gpulaunch.launcher.logs.capture import LogHub
from gpulaunch.launcher.loop.loop import Loop


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What all attempts of a run share."""

    loop: Loop
    spec: JobSpec
    rundir: RunDir
    hub: LogHub
    segments: Segments | None
    base_env: Mapping[str, str]
    use_agent_store: bool
    """Where torch is, to host the store with."""
    foreign_children: bool
    """This process had children before it became a launcher, or is PID 1: not every child is ours to end."""
    oom: OomWatch
    control_path: str
    """The segment in which ranks read what is asked of them."""
    timer_file: str
    """The pipe of `torch.distributed.elastic.timer`; "" where it is not asked for."""
    checkpoint_dirs: tuple[str, ...]
    """Absolute paths or URLs; `gpulaunch.checkpoint` saves in the first."""
