"""torchrun as a library, on gpulaunch's engine: the API of `torch.distributed.run` and `torch.distributed.launcher`.

For programs that build a torchrun command line in Python and run it (accelerate, torchtune and others):

    from gpulaunch.compat import torchrun

    args = torchrun.parse_args(["--nproc-per-node", "2", "train.py", "--lr", "0.1"])
    torchrun.run(args)

    torchrun.elastic_launch(torchrun.LaunchConfig(1, 1, 2, rdzv_backend="c10d"), train)(lr)  # {rank: return value}

The engine runs in a separate process: threads, CUDA, children and signal handlers of the caller do not affect it,
and it ends with the caller. gpulaunch's own options come from the environment (GPULAUNCH_JOB_DIR and so on).

torch is imported only by `config_from_args` and to raise torch's own exceptions.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from gpulaunch.compat.config import LaunchConfig, LogSettings
from gpulaunch.compat.launch import Entrypoint, elastic_launch, launch_agent, run_script_path
from gpulaunch.launcher.job.option_table import OPTIONS
from gpulaunch.launcher.job.options import Converter, Option, UsageError, integer, logs_specs, number, text

__all__ = [
    "LaunchConfig",
    "config_from_args",
    "determine_local_world_size",
    "elastic_launch",
    "get_args_parser",
    "launch_agent",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

# torchrun reads no PET_ variable for these two.
_WITHOUT_VARIABLE = ("logs_specs", "numa_binding")
_CHOICES = {
    "start_method": ("spawn", "fork", "forkserver"),
    "numa_binding": ("node", "socket", "exclusive", "core-complex"),
}
# Like a plain argparse user's, so that argparse's own messages and notations (1e3, inf) apply.
_TYPES: dict[Converter, Converter] = {text: str, integer: int, number: float}


# -- the command line


def get_args_parser() -> argparse.ArgumentParser:
    """A parser of torchrun's command line; its namespace has torchrun's names, types and defaults, PET_ included."""
    parser = argparse.ArgumentParser(description="Torch Distributed Elastic Training Launcher (gpulaunch)")
    for option in OPTIONS:
        if option.ours:
            continue
        strings = (*((f"-{option.short}",) if option.short else ()), *option.torchrun_strings)
        if option.is_flag:
            parser.add_argument(*strings, action="store_true", default=_default(option), help=option.help)
        else:
            parser.add_argument(
                *strings,
                type=_TYPES.get(option.convert, option.convert) if option.dest not in _CHOICES else str,
                choices=_CHOICES.get(option.dest),
                default=_default(option),
                metavar=option.metavar,
                help=option.help,
            )
    parser.add_argument(
        "--print-completion", "--print_completion", action=_PrintCompletion, help="print a completion script, and end"
    )
    parser.add_argument("training_script", help="the program to run on every rank, followed by its arguments")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


class _PrintCompletion(argparse.Action):
    """As in torch 2.14: print the script for a shell, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, _namespace: Any, shell: Any, _option: Any = None) -> None:
        from gpulaunch.launcher.cli.completion import completion
        from gpulaunch.launcher.job.options import UsageError

        try:
            sys.stdout.write(completion(shell))
        except UsageError as err:
            parser.error(str(err))
        parser.exit()


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse torchrun's command line; None: this process's own."""
    return get_args_parser().parse_args(args)


def _default(option: Option) -> Any:
    default = "spawn" if option.dest == "start_method" else option.default
    default = list(default) if isinstance(default, tuple) else default
    if option.dest in _WITHOUT_VARIABLE:
        return default
    variable = f"PET_{option.dest.upper()}"
    if option.is_flag:
        return bool(int(os.environ.get(variable, "0")))
    return os.environ.get(variable, default)  # argparse converts a default that is text


# -- from the namespace to the job


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, Entrypoint, list[str]]:
    """Convert a namespace to a configuration, the entrypoint and its arguments, as torch's function of that name.

    The configuration holds torch's own DefaultLogsSpecs and NumaOptions, so it imports torch.
    """
    config, entrypoint, entrypoint_args = _read(args)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    logs: LogSettings = config.logs_specs
    config.logs_specs = DefaultLogsSpecs(
        log_dir=logs.log_dir,
        redirects=Std.from_str(logs.redirects),
        tee=Std.from_str(logs.tee),
        local_ranks_filter={int(rank) for rank in logs.local_ranks_filter.split(",") if rank} or None,
    )
    if config.numa_options is not None:
        from torch.numa.binding import AffinityMode, NumaOptions

        config.numa_options = NumaOptions(affinity_mode=AffinityMode(config.numa_options.affinity_mode))
    return config, entrypoint, entrypoint_args


def run(args: argparse.Namespace) -> None:
    """Run the job that a namespace of `parse_args` describes, as torchrun does.

    Raises torch's ChildFailedError when ranks fail, its SignalException when a signal ended the job, and ValueError for
    an invalid job.
    """
    single = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (single and parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    config, entrypoint, entrypoint_args = _read(args)
    launch_agent(config, entrypoint, entrypoint_args)


def main(args: Sequence[str] | None = None) -> None:
    """torchrun itself. Under another launcher, which names an error file, its own failure is recorded there."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import record

        record(_main)(args)
    else:
        _main(args)


def _main(args: Sequence[str] | None) -> None:
    run(parse_args(args))


def _read(args: argparse.Namespace) -> tuple[LaunchConfig, Entrypoint, list[str]]:
    """`config_from_args` without torch."""
    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    rdzv_configs = _rdzv_configs(args.rdzv_conf)
    rdzv_endpoint = args.rdzv_endpoint
    if args.rdzv_backend == "static":
        rdzv_configs["rank"] = args.node_rank
        rdzv_endpoint = rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    try:
        logs_specs(args.logs_specs)
    except UsageError as err:
        raise ValueError(f"--logs-specs: {err}") from None
    config = LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=determine_local_world_size(args.nproc_per_node),
        run_id=args.rdzv_id,
        role=args.role,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_backend=args.rdzv_backend,
        rdzv_configs=rdzv_configs,
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=getattr(args, "log_line_prefix_template", "")
        or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        local_addr=args.local_addr,
        logs_specs=LogSettings(
            log_dir=args.log_dir,
            redirects=args.redirects,
            tee=args.tee,
            local_ranks_filter=args.local_ranks_filter,
        ),
        event_log_handler=args.event_log_handler,
        numa_options=None if args.numa_binding is None else argparse.Namespace(affinity_mode=args.numa_binding),
        signals_to_handle=args.signals_to_handle,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
    )
    return config, *_entrypoint(args)


def _entrypoint(args: argparse.Namespace) -> tuple[Entrypoint, list[str]]:
    # `use_env` is from torch.distributed.launch, which gives each rank its number as an argument.
    local_rank = [] if getattr(args, "use_env", True) else ["--local-rank=${local_rank}"]
    rest = [*local_rank, *args.training_script_args]
    if args.run_path:
        return run_script_path, [args.training_script, *rest]
    if args.no_python:
        if args.module:
            raise ValueError("--no-python and --module contradict each other: a module is run by python; remove one")
        return args.training_script, rest
    module = ["-m"] if args.module else []
    return os.environ.get("PYTHON_EXEC", sys.executable), ["-u", *module, args.training_script, *rest]


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """`2` -> (2, 2), `1:4` -> (1, 4)."""
    numbers = [int(part) for part in str(nnodes).split(":")]
    if len(numbers) > 2:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')
    return numbers[0], numbers[-1]


def determine_local_world_size(nproc_per_node: str) -> int:
    """The number of ranks on this node: a number, or `auto`, `gpu`, `cpu` or `xpu` counted."""
    try:
        return int(nproc_per_node)
    except ValueError:
        pass
    from gpulaunch.launcher.job import accelerators
    from gpulaunch.launcher.job.host_info import detect

    host = detect(os.environ)
    if nproc_per_node == "cpu":
        return host.cores
    if nproc_per_node in ("auto", "gpu", "xpu"):
        found = 0 if nproc_per_node == "xpu" else len(host.gpus)
        found = found or accelerators.count(nproc_per_node, os.environ)
        if found or nproc_per_node == "auto":
            return found or host.cores
        why = f"there is no GPU here: {host.gpus_why}" if nproc_per_node == "gpu" else "there is no Intel GPU here"
        raise ValueError(f"--nproc-per-node {nproc_per_node}: {why}; use auto, cpu or a number")
    raise ValueError(f"--nproc-per-node: expected a number, auto, gpu, cpu or xpu, got {nproc_per_node!r}")


def _rdzv_configs(conf: str) -> dict[str, Any]:
    configs: dict[str, Any] = {}
    for pair in conf.strip().split(",") if conf.strip() else ():
        key, _, value = (each.strip() for each in pair.partition("="))
        if not key or not value:
            raise ValueError(f"--rdzv-conf: expected KEY=VALUE,KEY=VALUE, got {conf!r}")
        configs[key] = value
    return configs


if __name__ == "__main__":
    main()
