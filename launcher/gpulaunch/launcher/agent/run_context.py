"""Values shared by all attempts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpulaunch.launcher.agent.rundir import RunDir
from gpulaunch.launcher.agent.segments import Segments
from gpulaunch.launcher.failure.evidence import OomWatch
from gpulaunch.launcher.job.spec import JobSpec
from gpulaunch.launcher.logs.capture import LogHub
from gpulaunch.launcher.loop.forkserver import Inherited
from gpulaunch.launcher.loop.loop import Loop


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Values shared by all attempts of a run."""

    loop: Loop
    spec: JobSpec
    rundir: RunDir
    hub: LogHub
    segments: Segments | None
    base_env: Mapping[str, str]
    fork_server: Inherited | None
    """One that was started before this process, by `gpulaunch tune`."""
    use_agent_store: bool
    """Path of torch, to host the store with."""
    foreign_children: bool
    """This process had children before it became a launcher, or is PID 1: not every child may be ended."""
    oom: OomWatch
    control_path: str
    """The segment from which ranks read the agent's requests."""
    timer_file: str
    """The pipe of `torch.distributed.elastic.timer`; "" if not enabled."""
    checkpoint_dirs: tuple[str, ...]
    """Absolute paths or URLs; `gpulaunch.checkpoint` saves in the first."""
