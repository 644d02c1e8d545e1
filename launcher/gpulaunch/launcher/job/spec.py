"""The resolved job: one frozen value that everything after `load` reads.

Nothing here decides or reads the outside: `load.py` fills it in, `plan.py` derives command lines and environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Literal

from gpulaunch.launcher.job.host_info import Gpu
from gpulaunch.launcher.job.option_table import PROFILE_BUDGET

METRICS_HOST = "127.0.0.1"
"""Where metrics are served unless the user names another address: this machine only."""

METRICS_PORT_BASE = 9464
"""First port tried for metrics; 9464 is the usual port of OpenTelemetry's Prometheus exporter."""

STATIC_MASTER_PORT = 29500
"""MASTER_PORT of a multi-node job without a port of the user's, as in torchrun."""

LINE_PREFIX = "[${role_name}${local_rank}]:"
"""What torchrun writes in front of a teed line; TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE replaces it."""


class Std(IntFlag):
    """Standard streams of a rank, numbered as torchrun's `-r` and `-t` number them."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, kw_only=True)
class Program:
    """The user's program: its kind, what to run, and with which arguments."""

    kind: Literal["script", "module", "run_path", "exec", "function"]
    """script: `python FILE`; module: `python -m NAME`; run_path: runpy.run_path(FILE); exec: a command, no Python;
    function: a call that a library user sends to the ranks (gpulaunch.compat), never on the command line."""
    target: str
    args: tuple[str, ...]
    python: str
    """The interpreter of the ranks: PYTHON_EXEC, or the one that runs gpulaunch."""
    call_dir: str = ""
    """function: the caller's private directory with the call, where the ranks write their return values."""


@dataclass(frozen=True, kw_only=True)
class Etcd:
    """Where and how the nodes of a job reach etcd."""

    endpoints: tuple[tuple[str, int], ...]
    tls: bool
    cacert: str
    cert: str
    key: str
    user: str
    password_file: str
    prefix: str


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """A group of nodes that may change while the job runs."""

    min_nodes: int
    max_nodes: int
    order: int | None
    """This node's number among all, if it was given one."""
    leads: bool | None = None
    """Whether the other nodes meet here; None: found out from the endpoint."""
    join_timeout_s: float
    last_call_s: float
    away_s: float
    etcd: Etcd | None = None
    """None: the nodes meet at a leader."""

    @property
    def range(self) -> str:
        """The numbers of nodes, as text."""
        least, most = self.min_nodes, self.max_nodes
        return str(most) if least == most else f"{least} to {most}"


@dataclass(frozen=True, kw_only=True)
class SharedDir:
    """The default run directory of all nodes, which agree on it without a word."""

    name: str
    start: int
    """How often the job manager has started the job before: in each start, its runs use the directories NAME, NAME-1,
    NAME-2, ... one after the other, and so find those of the start before."""


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """This launcher's part of a host on which several launchers of one job run."""

    first_local_rank: int
    """LOCAL_RANK of its first rank."""
    local_world_size: int
    """The ranks of all of them on this host."""
    host_rank: int
    num_hosts: int


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job on one node, every option resolved and checked."""

    program: Program
    name: str
    run_id: str
    """TORCHELASTIC_RUN_ID: the rendezvous id; a fresh uuid4 for a plain single node, as torchrun does."""

    nnodes: int
    """Of an elastic job: the most."""
    node_rank: int
    """Of an elastic job: 0, until the rendezvous knows better."""
    elastic: Elastic | None = None
    """None: the number of nodes is fixed."""
    host_share: HostShare | None = None
    """None: the only launcher of the job on its host."""
    shared_dir: SharedDir | None = None
    """None: each node makes a default run directory of its own."""
    nproc: int
    master_addr: str
    master_port: int | None
    """None: a free port, bound by the agent before anything starts."""

    role: str
    max_restarts: int
    grace_s: float
    """Time between asking the ranks to stop and killing them."""
    failure_grace_s: float
    """The same after a failure, when the other ranks' further work is lost anyway."""
    signals: tuple[str, ...]
    """Names of the signals that the agent handles and forwards."""
    preempt_signals: tuple[str, ...]
    """Signals after which the ranks save and end, to be run again; not all of them need be in `signals`."""
    notify_signals: tuple[str, ...]
    """Signals after which the ranks save and continue."""
    restart_rate: tuple[int, float] | None
    """This many restarts within this many seconds; None: only `max_restarts` counts."""
    restart_backoff_s: float
    no_progress_limit: int | None
    """Failures in a row without progress after which the job is given up; 0: any number."""
    resume: str
    """`auto`, `never`, or the path or URL of a checkpoint."""
    resume_arg: str | None
    checkpoint_dirs: tuple[str, ...]
    """Directories or fsspec URLs; empty: `checkpoints` in the run directory."""
    checkpoint_pattern: str | None
    leftovers: Literal["leave", "wait", "end"]
    resume_search_s: float
    """How long checkpoints are read for damage before an attempt starts."""
    on_hang: Literal["restart", "stop", "report"]
    hang_timeout_s: float
    """0: no hang detection."""
    first_step_timeout_s: float
    monitor_interval_s: float
    """Kept for callers that read it back: the agent waits for the kernel and never polls."""

    redirects: Mapping[int, Std]
    tee: Mapping[int, Std]
    local_ranks_filter: frozenset[int] | None
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    console: str
    """`all`, `none`, or local ranks separated by commas."""
    line_prefix: str = LINE_PREFIX
    """Template with ${role_name}, ${local_rank}, ${rank} and ${hostname}."""

    job_dir: str | None
    log_dir: str | None

    gpus: tuple[str, ...] | None
    """--gpus as CUDA_VISIBLE_DEVICES entries, already mapped through the CUDA_VISIBLE_DEVICES that we were given."""
    visible_devices: tuple[str, ...] | None = None
    """What the ranks of this node may see: `gpus`, else the inherited CUDA_VISIBLE_DEVICES, else None (all)."""
    cards: tuple[Gpu, ...]
    """The GPUs that the ranks of this node may see, in their order, as far as NVML reports them."""
    gpu_memory_fraction: float | None
    virtual_local_rank: bool
    numa_binding: str | None
    cpu_sets: tuple[frozenset[int], ...] | None = None
    """The logical CPUs of each local rank when --numa-binding was given."""

    start_method: Literal["auto", "fork", "spawn"]
    preload: tuple[str, ...] | None
    """Packages to import in the fork server; None: read them from the script; (): none but torch."""

    profile: bool
    profile_budget_percent: float = PROFILE_BUDGET
    """The part of a step's time that observing may cost a rank; 0: no limit."""
    metrics_host: str
    metrics_port: int | None
    metrics_web_config: str
    """File that says how the endpoint is protected; "": unprotected."""
    metrics_run: str
    """The user's name for the run on all its nodes (--rdzv-id); "" if not given."""
    metrics_sd: str
    metrics_push: str
    metrics_otlp: str
    """None: the first free one from METRICS_PORT_BASE upwards; 0: chosen by the kernel."""

    omp_num_threads: int | None
    """None: leave OMP_NUM_THREADS alone (the user set it, or there is one rank)."""
    nccl_async_error_handling: str = "1"
    """TORCH_NCCL_ASYNC_ERROR_HANDLING: the user's value, else 1."""

    event_log_handler: str
    logs_specs: str | None
    rdzv_timeout_s: float
    replicate: bool = False
    """Every node keeps whole checkpoints in a directory of its own."""
    token_file: str = ""
    """File, or /dev/fd/N, with the secret that the nodes of this job share; "": none."""
    insecure: bool = False
    """Do not warn that there is none."""

    env: Mapping[str, str]
    """The [env] table of the job file: set in every rank, below the variables of the launcher itself."""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """Every option by its long name with the value that is used, for --dry-run and job.json."""
    origins: Mapping[str, str]
    """Option -> its value's source: `default`, the job file, `environment NAME`, `command line` or `detected: ...`."""

    @property
    def replicates(self) -> bool:
        """Whether nodes copy checkpoints to each other."""
        return self.replicate and self.nnodes > 1


@dataclass(frozen=True, kw_only=True)
class Request:
    """The result of the command line: a job, and whether only to describe it."""

    spec: JobSpec
    dry_run: bool
