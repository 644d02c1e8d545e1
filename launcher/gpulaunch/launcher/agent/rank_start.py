"""What the ranks of one attempt on this node are started with: environment, command line, logs and cores."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence

from gpulaunch.launcher.agent import timers
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.job import plan
from gpulaunch.launcher.job.spec import Std
from gpulaunch.launcher.rendezvous.base import World
from gpulaunch.launcher.rendezvous.listen import interface_of


class RankStart:
    """What the ranks of one attempt are started with, by local rank."""

    def __init__(
        self,
        context: RunContext,
        world: World,
        *,
        resume_from: str | None,
        resume_args: Sequence[str],
        resume_named: bool,
        visible_devices: Sequence[str],
    ) -> None:
        """See `RankGroup`."""
        self._context = context
        self._world = world
        self._resume_from = resume_from
        self._resume_args = list(resume_args)
        self._resume_named = resume_named
        self._visible_devices = list(visible_devices)
        self.dirs: dict[int, str] = {}
        """Where each rank's own files are."""

    def make_dirs(self) -> None:
        """Make the directory of every rank. Raises OSError."""
        for local_rank in range(self._context.spec.nproc):
            rank = self.rank_of(local_rank)
            self.dirs[local_rank] = self._context.rundir.rank_dir(self._world.attempt, rank, local_rank)

    def rank_of(self, local_rank: int) -> int:
        """The global rank of one of this node's ranks."""
        return self._world.first_rank + local_rank

    @property
    def tracer_pid(self) -> int:
        """The process that may read the ranks' stacks: the agent, for the sidecar and the hang helper."""
        return os.getpid() if self._context.spec.profile else 0

    def open_logs(self, local_rank: int) -> tuple[int, int]:
        """Open the capture of its output; the descriptors of stdout and stderr. Raises OSError."""
        spec, hub, rank = self._context.spec, self._context.hub, self.rank_of(local_rank)
        filtered = spec.local_ranks_filter is None or local_rank in spec.local_ranks_filter  # as torchrun
        filter_dir = self._context.rundir.streams_dir(self._world.attempt) if filtered else ""
        fds: list[int] = []
        for stream, name in ((Std.OUT, "stdout.log"), (Std.ERR, "stderr.log")):
            fds.append(
                hub.open(
                    rank=rank,
                    local_rank=local_rank,
                    stream=stream,
                    path=os.path.join(self.dirs[local_rank], name),
                    show=plan.shown(spec, local_rank, stream),
                    prefix=plan.line_prefix(spec, local_rank, rank, stream),
                    alone=plan.prints_alone(spec, local_rank),
                    filter_dir=filter_dir,
                )
            )
        return fds[0], fds[1]

    @functools.cached_property
    def _gloo_interface(self) -> str:
        """What GLOO_SOCKET_IFNAME is set to in every rank, unless the user has; "" for nothing."""
        return interface_of(self._world.local_addr) if "GLOO_SOCKET_IFNAME" not in os.environ else ""

    def environment(self, local_rank: int, *, agent_store: bool) -> dict[str, str]:
        """What a rank has in addition to the job's environment; `agent_store`: whether the agent hosts the store."""
        context, world = self._context, self._world
        env = plan.rank_environment(
            context.spec,
            local_rank=local_rank,
            attempt=world.attempt,
            master_port=world.master_port,
            error_file=os.path.join(self.dirs[local_rank], "error.json"),
            use_agent_store=agent_store,
        )
        rank = str(self.rank_of(local_rank))
        # Nodes may run different numbers of ranks: the agreed values take precedence over this node's arithmetic.
        world_size, group_rank = str(world.world_size), str(world.node_rank)
        env.update(RANK=rank, ROLE_RANK=rank, WORLD_SIZE=world_size, ROLE_WORLD_SIZE=world_size)
        env.update(MASTER_ADDR=world.master_addr)
        if context.spec.host_share is None:
            env.update(GROUP_RANK=group_rank, GROUP_WORLD_SIZE=str(world.nnodes))
        env["GPULAUNCH_RUN_DIR"] = context.rundir.path
        env["GPULAUNCH_CONTROL"] = context.control_path
        env["GPULAUNCH_CHECKPOINT_DIR"] = context.checkpoint_dirs[0]
        if self._gloo_interface:  # gloo takes what the machine's own name means, which Debian makes 127.0.1.1
            env.setdefault("GLOO_SOCKET_IFNAME", self._gloo_interface)
        if world.job:  # rank 0, which saves, may be on another node the next time
            env.update(GPULAUNCH_JOB=world.job, GPULAUNCH_GENERATION=str(world.generation))
        env["GPULAUNCH_ATTEMPT"] = str(context.rundir.number_of(world.attempt))
        if context.spec.replicates:
            env["GPULAUNCH_CHECKPOINT_PER_NODE"] = "named" if self._resume_named else "1"
        if self._resume_from is not None:
            env["GPULAUNCH_RESUME_FROM"] = self._resume_from
        if self._visible_devices:
            virtual = context.spec.virtual_local_rank
            env["CUDA_VISIBLE_DEVICES"] = (
                self._visible_devices[local_rank] if virtual else ",".join(self._visible_devices)
            )
        if context.segments is not None:
            env["GPULAUNCH_CHANNEL_DIR"] = context.segments.directory
            env["GPULAUNCH_TRACER_PID"] = str(self.tracer_pid)
        if context.timer_file:
            env[timers.FILE] = context.timer_file
        return env

    def program(self, local_rank: int) -> dict[str, object]:
        """What runs in it, as `loop.rank_main` reads it."""
        program = self._context.spec.program
        return {
            "kind": program.kind,
            "target": program.target,
            "args": [*plan.rank_args(self._context.spec, local_rank), *self._resume_args],
            "python": program.python,
            "call_dir": program.call_dir,
            "error_file": os.path.join(self.dirs[local_rank], "error.json"),
        }

    def title(self, local_rank: int) -> list[str]:
        """The command line that `python` would have."""
        return [*plan.rank_argv(self._context.spec, local_rank), *self._resume_args]

    def command(self, local_rank: int) -> list[str]:
        """The command that starts it in an interpreter of its own."""
        program = self._context.spec.program
        if program.kind == "exec":
            return self.title(local_rank)
        from gpulaunch.launcher.loop import rank_main

        return [program.python, "-u", rank_main.__file__, json.dumps(self.program(local_rank))]

    def cpus(self, local_rank: int) -> list[int]:
        """The cores that it may use; none: all."""
        sets = self._context.spec.cpu_sets
        return sorted(sets[local_rank]) if sets else []
