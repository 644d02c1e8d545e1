"""Computes each rank's command line, environment, and console visibility from the job. Pure."""

from __future__ import annotations

import os
import socket

from gpulaunch.launcher.job.spec import JobSpec, Std


def rank_environment(
    spec: JobSpec,
    *,
    local_rank: int,
    attempt: int,
    master_port: int,
    error_file: str,
    use_agent_store: bool,
) -> dict[str, str]:
    """All variables that the launcher sets in one rank, in addition to the inherited environment.

    They are torchrun's, name by name and value by value (indistinguishable for a worker), over the [env] table.
    Assumes that every node runs the same number of ranks.
    """
    world_size = str(spec.nnodes * spec.nproc)
    rank = str(spec.node_rank * spec.nproc + local_rank)
    env = dict(spec.env)
    env.update(
        RANK=rank,
        LOCAL_RANK="0" if spec.virtual_local_rank else str(_on_host(spec, local_rank)),
        GROUP_RANK=str(spec.node_rank),
        ROLE_RANK=rank,
        ROLE_NAME=spec.role,
        LOCAL_WORLD_SIZE=str(spec.nproc),
        WORLD_SIZE=world_size,
        GROUP_WORLD_SIZE=str(spec.nnodes),
        ROLE_WORLD_SIZE=world_size,
        MASTER_ADDR=spec.master_addr,
        MASTER_PORT=str(master_port),
        TORCHELASTIC_RESTART_COUNT=str(attempt),
        TORCHELASTIC_MAX_RESTARTS=str(spec.max_restarts),
        TORCHELASTIC_RUN_ID=spec.run_id,
        TORCHELASTIC_USE_AGENT_STORE=str(use_agent_store),  # torch compares with "True", in Python and in C++
        TORCHELASTIC_ERROR_FILE="" if spec.log_dir == os.devnull else error_file,
        TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(spec.signals),
        TORCH_NCCL_ASYNC_ERROR_HANDLING=spec.nccl_async_error_handling,
    )
    if spec.host_share is not None:
        share = spec.host_share
        env.update(LOCAL_WORLD_SIZE=str(share.local_world_size))
        env.update(GROUP_RANK=str(share.host_rank), GROUP_WORLD_SIZE=str(share.num_hosts))
    if spec.omp_num_threads is not None:
        env["OMP_NUM_THREADS"] = str(spec.omp_num_threads)
    if spec.virtual_local_rank:
        visible = spec.visible_devices
        env["CUDA_VISIBLE_DEVICES"] = str(local_rank) if visible is None else visible[local_rank]
    elif spec.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    if spec.gpu_memory_fraction is not None:
        env["GPULAUNCH_GPU_MEMORY_FRACTION"] = str(spec.gpu_memory_fraction)
    if spec.profile and spec.origins.get("profile-budget", "default") != "default":
        env["GPULAUNCH_PROFILE_BUDGET"] = f"{spec.profile_budget_percent:g}"
    return env


def _on_host(spec: JobSpec, local_rank: int) -> int:
    """The number of one of this launcher's ranks on its host, which others of the job may share."""
    return local_rank + (spec.host_share.first_local_rank if spec.host_share is not None else 0)


def rank_args(spec: JobSpec, local_rank: int) -> list[str]:
    """The program's arguments in one rank, with ${local_rank} filled in."""
    return [_fill(arg, local_rank=_on_host(spec, local_rank)) for arg in spec.program.args]


def rank_argv(spec: JobSpec, local_rank: int) -> list[str]:
    """The whole command line of one rank, as torchrun would start it."""
    program = spec.program
    args = rank_args(spec, local_rank)
    if program.kind == "exec":  # the command's own name is no argument: torchrun leaves it unchanged
        return [program.target, *args]
    module = ["-m"] if program.kind == "module" else []
    return [program.python, "-u", *module, _fill(program.target, local_rank=_on_host(spec, local_rank)), *args]


def shown(spec: JobSpec, local_rank: int, stream: Std) -> bool:
    """Whether a stream of a rank goes to the console (it always goes to its file)."""
    if spec.console != "all" and str(local_rank) not in spec.console.split(","):
        return False
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        return False
    return bool(spec.tee[local_rank] & stream) or not spec.redirects[local_rank] & stream


def prints_alone(spec: JobSpec, local_rank: int) -> bool:
    """Whether the console shows nothing of any other rank of this node."""
    others = (each for each in range(spec.nproc) if each != local_rank)
    return not any(shown(spec, each, stream) for each in others for stream in (Std.OUT, Std.ERR))


def line_prefix(spec: JobSpec, local_rank: int, rank: int, stream: Std) -> bytes:
    """What torchrun writes in front of a teed line; empty for other lines, which have gpulaunch's own prefix."""
    if not spec.tee[local_rank] & stream:
        return b""
    number = _on_host(spec, local_rank)
    values = {"role_name": spec.role, "local_rank": number, "rank": rank, "hostname": socket.gethostname()}
    return _fill(spec.line_prefix, **values).encode()


def prefix_is_unused(spec: JobSpec) -> bool:
    """Whether --log-line-prefix-template was given, but no --tee: only teed lines have that prefix, as in torchrun.

    A variable in the environment may be meant for other jobs.
    """
    origin = spec.origins.get("log-line-prefix-template", "default")
    return origin != "default" and not origin.startswith("environment ") and not any(spec.tee.values())


def _fill(template: str, **values: object) -> str:
    if "$" not in template:
        return template
    from string import Template

    return Template(template).safe_substitute(values)
