"""torch's LaunchConfig, field by field, and its mapping to gpulaunch's options."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """The content of torch's DefaultLogsSpecs, in the form of the command line."""

    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: str = ""


@dataclass
class LaunchConfig:
    """torch's `torch.distributed.launcher.api.LaunchConfig`: the same fields, order and defaults.

    What differs: `logs_specs` may stay None (torch makes a temporary directory then); `start_method`,
    `monitor_interval` and `metrics_cfg` have no effect: ranks are forked where that is safe and start fresh either way,
    and nothing polls. One node runs without any rendezvous backend.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict[str, Any])
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict[str, str])
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", 900)
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        elif self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must be non-negative, got {self.shutdown_timeout}")


def options_of(config: LaunchConfig) -> dict[str, Any]:
    """The options by destination, with all of torchrun's, so that no PET_ variable is read a second time.

    Raises:
        ValueError: the configuration contains a setting that has no meaning here.
    """
    logs = _log_settings(config.logs_specs)
    numa = getattr(config.numa_options, "affinity_mode", None)
    options = {
        "nproc_per_node": str(config.nproc_per_node),
        **_rendezvous(config),
        "standalone": False,
        "local_addr": config.local_addr,
        "role": config.role,
        "max_restarts": int(config.max_restarts),
        "monitor_interval": float(config.monitor_interval),
        "shutdown_timeout": config.shutdown_timeout,
        "signals_to_handle": config.signals_to_handle,
        "event_log_handler": config.event_log_handler,
        "log_dir": logs.log_dir,
        "redirects": logs.redirects,
        "tee": logs.tee,
        "local_ranks_filter": logs.local_ranks_filter,
        "log_line_prefix_template": config.log_line_prefix_template or "",
        "logs_specs": None,
        "duplicate_stdout_filters": list(config.duplicate_stdout_filters or ()),
        "duplicate_stderr_filters": list(config.duplicate_stderr_filters or ()),
        "virtual_local_rank": config.virtual_local_rank,
        "numa_binding": None if numa is None else str(getattr(numa, "value", numa)),
    }
    # torch's default is "spawn", so a "spawn" here is no request. In torch it means that a function must not inherit
    # the caller's state, which it never does here. Only a separate variable requests ranks that are not forked.
    if "PET_START_METHOD" not in os.environ:
        options["start_method"] = "auto"
    # A caller that relies on max_restarts attempts gets them, even if they look like repetitions.
    if "GPULAUNCH_NO_PROGRESS_LIMIT" not in os.environ:
        options["no_progress_limit"] = 0
    return options


def _rendezvous(config: LaunchConfig) -> dict[str, Any]:
    several = config.max_nodes > 1
    backend, endpoint = config.rdzv_backend, config.rdzv_endpoint
    if not several and backend != "static":
        backend, endpoint = "c10d", ""  # there are no other nodes, so the backend is not used
    node_rank = config.rdzv_configs.get("rank", None if several else 0)
    if backend == "static" and node_rank is None:
        raise ValueError('rdzv_configs has no "rank": each of several nodes needs its own, from 0 (--node-rank)')
    timeout = config.rdzv_configs["timeout"]
    nodes = f"{config.min_nodes}:{config.max_nodes}" if config.min_nodes != config.max_nodes else config.max_nodes
    return {
        "nnodes": str(nodes),
        "node_rank": int(node_rank or 0),
        "rdzv_backend": backend,
        "rdzv_endpoint": endpoint,
        "rdzv_id": config.run_id,
        "rdzv_conf": f"timeout={timeout if isinstance(timeout, str) else int(timeout)}",
        "master_addr": "127.0.0.1",
        "master_port": None,
    }


def _log_settings(logs_specs: object) -> LogSettings:
    """Read torch's own DefaultLogsSpecs without importing torch: a caller that has one has imported torch."""
    if logs_specs is None:
        return LogSettings()
    if isinstance(logs_specs, LogSettings):
        return logs_specs
    torchs = sys.modules.get("torch.distributed.elastic.multiprocessing.api")
    if torchs is None or type(logs_specs) is not torchs.DefaultLogsSpecs:
        kind = type(logs_specs)
        raise ValueError(
            f"logs_specs: a {kind.__module__}.{kind.__qualname__} decides itself where output goes, which is not "
            "supported; use torch's DefaultLogsSpecs, or None"
        )
    specs: Any = logs_specs
    return LogSettings(
        log_dir=specs._root_log_dir,
        redirects=_std_text(specs._redirects),
        tee=_std_text(specs._tee),
        local_ranks_filter=",".join(str(rank) for rank in sorted(specs._local_ranks_filter or ())),
    )


def _std_text(streams: int | Mapping[int, int]) -> str:
    """`3`, or `0:3,1:1`, in the form of -r and -t."""
    if isinstance(streams, Mapping):
        return ",".join(f"{rank}:{int(std)}" for rank, std in streams.items()) or "0"
    return str(int(streams))
