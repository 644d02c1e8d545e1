"""Merges command line, environment and job file into one checked job, with the source of each value.

Job file < environment < command line. Every check that is possible before anything starts is made here, and each
failure is one line that says what, why and what to do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gpulaunch.launcher.job import accelerators, slurm, values
from gpulaunch.launcher.job.host_info import Gpu, HostInfo, cpus_allowed, select
from gpulaunch.launcher.job.network import metrics_address, num_nodes, rendezvous
from gpulaunch.launcher.job.options import UsageError, at_least, did_you_mean, signal_names
from gpulaunch.launcher.job.parse import parse
from gpulaunch.launcher.job.settings import Settings
from gpulaunch.launcher.job.spec import LINE_PREFIX, HostShare, JobSpec, Program, Request, SharedDir
from gpulaunch.launcher.job.verbs import VERBS


def load(argv: Sequence[str], environ: Mapping[str, str], host: HostInfo) -> Request:
    """Read, merge and check everything.

    Raises:
        UsageError: something is impossible; `str()` is the line for the user.
        SystemExit: --help or --version was answered.
    """
    return resolve(parse(argv), environ, host)


def resolve(given: Mapping[str, Any], environ: Mapping[str, str], host: HostInfo) -> Request:
    """`load` for a command line that `parse` has already read (so that --help need not look at the machine)."""
    settings = Settings(given, environ)
    environ = {**environ, **settings.file.env}  # what a rank inherits
    program = _program(settings, environ)
    gpus, visible, seen = _gpus(settings, environ, host)
    task = slurm.task(environ) if _asks_slurm(settings) else None
    nproc = _nproc(settings, environ, host, seen, task)
    topology = rendezvous(settings, task)
    cores, share = host.cores, None
    if task is not None and not task.one_per_host:
        cores = slurm.cores_of_task(task, host.cores, environ)
        gpus_of = environ if gpus is None else {**environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        share = _host_share(task, nproc, gpus_of)
        if not slurm.has_own_gpus(task, gpus_of):
            mine = slice(share.first_local_rank, share.first_local_rank + nproc)
            seen = seen[mine]
            visible = visible[mine] if visible is not None and settings["virtual-local-rank"] else visible
    read = settings.read
    virtual = settings["virtual-local-rank"]
    if virtual and visible is not None and nproc > len(visible):
        named = f"CUDA_VISIBLE_DEVICES={','.join(visible)} names {len(visible)} GPUs"
        raise UsageError(f"--virtual-local-rank gives each rank its own GPU: {nproc} ranks, but {named}")
    metrics_host, metrics_port = read("metrics-addr", metrics_address)
    signals = read("signals-to-handle", signal_names)
    spec = JobSpec(
        **settings.fields(),
        program=program,
        name=_name(settings, program),
        run_id=topology.run_id,
        nnodes=topology.nnodes,
        node_rank=topology.node_rank,
        nproc=nproc,
        master_addr=topology.master_addr,
        master_port=topology.master_port,
        rdzv_timeout_s=topology.timeout_s,
        elastic=topology.elastic,
        host_share=share,
        shared_dir=_shared_dir(settings, program, task),
        grace_s=_grace_s(settings, environ),
        preempt_signals=_preempt_signals(settings, signals),
        notify_signals=_notify_signals(settings, signals),
        redirects=read("redirects", lambda text: values.std_by_rank(text, nproc)),
        tee=read("tee", lambda text: values.std_by_rank(text, nproc)),
        console=read("console", lambda text: values.console(text, nproc)),
        line_prefix=_line_prefix(settings, environ),
        gpus=gpus,
        visible_devices=visible,
        cards=seen,
        cpu_sets=_cpu_sets(settings, host, seen, nproc),
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        metrics_run=settings["rdzv-id"] if settings["rdzv-id"] != "none" else "",
        omp_num_threads=_omp_num_threads(settings, environ, host, nproc, cores),
        nccl_async_error_handling=environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        env=settings.file.env,
        options=settings.merged,
        origins=settings.origins,
    )
    return Request(spec=spec, dry_run=settings["dry-run"])


_OWN_TOPOLOGY = ("standalone", "node-rank", "rdzv-backend", "rdzv-endpoint")


def _asks_slurm(settings: Settings) -> bool:
    """Whether the user has left it to Slurm which nodes there are."""
    given = {name for name, origin in settings.origins.items() if origin != "default"}
    if given.intersection(_OWN_TOPOLOGY):
        return False
    return "nnodes" not in given or num_nodes(settings)[1] > 1


def _host_share(task: slurm.Task, nproc: int, environ: Mapping[str, str]) -> HostShare:
    return HostShare(
        first_local_rank=slurm.first_local_rank(task, nproc, environ),
        local_world_size=task.num_local * nproc,
        host_rank=task.host,
        num_hosts=len(task.hosts),
    )


def _shared_dir(settings: Settings, program: Program, task: slurm.Task | None) -> SharedDir | None:
    """All tasks use one run directory; a requeued job finds it again, and the checkpoints in it."""
    if task is None:
        return None
    name = "-".join(filter(None, (_name(settings, program), task.cluster, task.name)))
    return SharedDir(name=name, start=task.restart)


def _program(settings: Settings, environ: Mapping[str, str]) -> Program:
    python = environ.get("PYTHON_EXEC", sys.executable)
    target = settings.script
    kind: Literal["script", "module", "run_path", "exec"]
    if settings["run-path"]:
        kind = "run_path"
    elif settings["no-python"]:
        if settings["module"]:
            raise UsageError("--no-python and --module contradict each other: a module is run by python; remove one")
        kind = "exec"
    else:
        kind = "module" if settings["module"] else "script"
    if not target:
        raise UsageError("the program's name is empty")
    if kind == "exec":
        _require_command(target, environ)
    elif kind != "module":
        _require_file(target)
    return Program(kind=kind, target=target, args=settings.args, python=python)


def _require_file(path: str) -> None:
    # A name with a macro is a different file in each rank: the ranks will report errors.
    if "$" in path or os.path.exists(path):
        return
    directory, name = os.path.split(path)
    try:
        near = did_you_mean(name, os.listdir(directory) if directory else [*os.listdir("."), *VERBS])
    except OSError:
        raise UsageError(f"no such script: {path} (the directory {directory} does not exist)") from None
    if near:
        near = f"; did you mean {os.path.join(directory, near.removeprefix('; did you mean ').removesuffix('?'))}?"
    raise UsageError(f"no such script: {path}{near}")


def _require_command(command: str, environ: Mapping[str, str]) -> None:
    directories = [""] if "/" in command else environ.get("PATH", os.defpath).split(os.pathsep)
    candidates = [os.path.join(directory, command) for directory in directories]
    if any(os.path.isfile(each) and os.access(each, os.X_OK) for each in candidates):
        return
    if any(os.path.isfile(each) for each in candidates):
        raise UsageError(f"--no-python: {command} is not executable; run chmod +x, or remove --no-python")
    where = "no such file" if "/" in command else "not found in PATH"
    raise UsageError(f"--no-python: {command}: {where}")


def _name(settings: Settings, program: Program) -> str:
    name: str | None = settings["name"]
    if name is None:
        if program.kind == "module":
            stem = program.target.removesuffix(".__main__").rpartition(".")[2]
        else:
            stem = os.path.splitext(os.path.basename(program.target.rstrip("/")))[0]
        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem.lstrip("."))[:64] or "job"
        return settings.settle("name", name, "detected: from the program")
    if not name or len(name) > 64 or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
        raise UsageError(f"{settings.label('name')}: {name!r} must be 1 to 64 letters, digits, `-`, `_` or `.`")
    return name


def _gpus(
    settings: Settings, environ: Mapping[str, str], host: HostInfo
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None, tuple[Gpu, ...]]:
    """--gpus as CUDA_VISIBLE_DEVICES entries, all that the ranks may see, and those of them that NVML knows."""
    inherited_text = environ.get("CUDA_VISIBLE_DEVICES")
    inherited = None if inherited_text is None else tuple(each.strip() for each in inherited_text.split(","))
    # HostInfo has applied the launcher's own variable; the job file may set another one for the ranks.
    in_file = settings.file.env.get("CUDA_VISIBLE_DEVICES")
    seen = host.gpus if in_file is None else select(host.gpus, in_file)
    if settings["gpus"] is None:
        return None, inherited, seen
    if not seen:
        raise UsageError(f"{settings.label('gpus')}: there is no GPU here: {host.gpus_why}")
    chosen = settings.read("gpus", lambda text: values.gpu_entries(text, inherited, seen))
    return tuple(chosen), tuple(chosen), tuple(chosen.values())


def _nproc(
    settings: Settings, environ: Mapping[str, str], host: HostInfo, gpus: tuple[Gpu, ...], task: slurm.Task | None
) -> int:
    text: str = settings["nproc-per-node"].strip()
    label = settings.label("nproc-per-node").replace("--nproc-per-node", "--nproc")
    if task is not None and settings.origins["nproc-per-node"] == "default" and task.one_per_host:
        # One task for a whole node: a rank for each of its GPUs.
        counted = len(gpus) or slurm.num_visible(environ) or _accelerators("gpu", label, environ, host) or 1
        return settings.settle("nproc-per-node", counted, "detected: one task of Slurm for this node")
    if task is not None and not task.one_per_host and not text.isdecimal() and not slurm.has_own_gpus(task, environ):
        raise UsageError(
            f"{label} {text}: {task.num_local} tasks of srun share this host; drop it (a "
            "rank for each task), or start one task for each node: --ntasks-per-node=1"
        )
    if text == "xpu" or (text in ("auto", "gpu") and not gpus):
        counted = _accelerators(text, label, environ, host)
        if counted:
            return settings.settle("nproc-per-node", counted, "detected: accelerators, as torch counts them")
    if text == "auto":
        text = "gpu" if gpus else "cpu"
    if text == "gpu":
        if not gpus:
            raise UsageError(f"{label} gpu: there is no GPU here: {host.gpus_why}; use --nproc auto or a number")
        return settings.settle("nproc-per-node", len(gpus), f"detected: GPUs, {host.gpus_why}")
    if text == "cpu":
        return settings.settle("nproc-per-node", host.cores, f"detected: cores, {host.cores_why}")
    if text == "xpu":
        raise UsageError(f"{label} xpu: there is no Intel GPU here that torch can use; use --nproc auto or a number")
    try:
        nproc = int(text)
    except ValueError:
        near = did_you_mean(text.lower(), ("auto", "gpu", "cpu", "xpu"))
        raise UsageError(f"{label}: expected a number, auto, gpu, cpu or xpu, got {text!r}{near}") from None
    if nproc < 1:
        raise UsageError(f"{label}: a job needs at least 1 rank per node, got {nproc}")
    return nproc


def _accelerators(kind: str, label: str, environ: Mapping[str, str], host: HostInfo) -> int:
    try:
        return accelerators.count(kind, environ, host.root)
    except ValueError as err:
        raise UsageError(f"{label} {kind}: {err}") from None


def _grace_s(settings: Settings, environ: Mapping[str, str]) -> float:
    if settings["shutdown-timeout"] is not None:
        return float(settings.read("shutdown-timeout", at_least(0)))
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if text is None:
        return settings.settle("shutdown-timeout", 30.0, "default")
    if not text.strip().isdecimal():
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT: expected a whole number of seconds, got {text!r}")
    return settings.settle("shutdown-timeout", float(text), "environment TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


def _line_prefix(settings: Settings, environ: Mapping[str, str]) -> str:
    """The option takes precedence over torch's own variable; an empty one of either is ignored, as in torchrun."""
    if settings["log-line-prefix-template"]:
        return str(settings["log-line-prefix-template"])
    name = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
    if environ.get(name):
        return settings.settle("log-line-prefix-template", environ[name], f"environment {name}")
    return settings.settle("log-line-prefix-template", LINE_PREFIX, "default")


def _preempt_signals(settings: Settings, signals: tuple[str, ...]) -> tuple[str, ...]:
    """By default, those of SIGTERM and SIGUSR1 that the user has not removed from --signals-to-handle."""
    names = settings.read("preempt-signals", signal_names)
    if settings.origins["preempt-signals"] != "default":
        return names
    return tuple(name for name in names if name in signals or name != "SIGTERM")


def _notify_signals(settings: Settings, signals: tuple[str, ...]) -> tuple[str, ...]:
    """By default SIGUSR2, unless the user has made it end the job."""
    names = settings.read("notify-signals", signal_names)
    ends = {*signals, *_preempt_signals(settings, signals)}
    if settings.origins["notify-signals"] == "default":
        return tuple(name for name in names if name not in ends)
    for name in names:
        if name in ends:
            raise UsageError(f"{settings.label('notify-signals')}: {name} already ends the job; remove one of them")
    return names


def _omp_num_threads(
    settings: Settings, environ: Mapping[str, str], host: HostInfo, nproc: int, cores: int
) -> int | None:
    """Cores // ranks, while torchrun uses 1: the ranks share the machine and leave none of it idle."""
    if "OMP_NUM_THREADS" in environ:
        origin = settings.file.path if "OMP_NUM_THREADS" in settings.file.env else "environment OMP_NUM_THREADS"
        settings.settle("OMP_NUM_THREADS", environ["OMP_NUM_THREADS"], origin)
        return None
    if nproc == 1 and cores == host.cores:
        return settings.settle("OMP_NUM_THREADS", None, "default")
    others = "" if cores == host.cores else f", {cores} of them for this task of Slurm,"
    why = f"detected: {host.cores} cores ({host.cores_why}){others} for {nproc} ranks"
    return settings.settle("OMP_NUM_THREADS", max(1, cores // nproc), why)


def _cpu_sets(
    settings: Settings, host: HostInfo, gpus: tuple[Gpu, ...], nproc: int
) -> tuple[frozenset[int], ...] | None:
    mode = settings["numa-binding"]
    if mode is None:
        return None
    from gpulaunch.launcher.job import numa  # rarely asked for

    label = f"{settings.label('numa-binding')} {mode}"
    if not gpus:
        raise UsageError(f"{label}: binds ranks to the cores near their GPU, and there is no GPU: {host.gpus_why}")
    if nproc > len(gpus):
        raise UsageError(f"{label}: {nproc} ranks but {len(gpus)} GPUs: rank {len(gpus)} has no GPU")
    try:
        sets = numa.cpu_sets(mode, [gpu.pci_bus_id for gpu in gpus], allowed=cpus_allowed(host.root), root=host.root)
    except numa.NumaError as err:
        raise UsageError(f"{label}: {err}") from err
    return sets[:nproc]
