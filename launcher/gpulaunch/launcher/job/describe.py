"""The text of --dry-run: what was found, what would be done, and the source of each value. It contains no secret."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from gpulaunch.launcher.job.host_info import HostInfo
from gpulaunch.launcher.job.imports import Reading, preloaded, read_module, read_script
from gpulaunch.launcher.job.plan import rank_argv, rank_environment
from gpulaunch.launcher.job.spec import METRICS_PORT_BASE, JobSpec
from gpulaunch.profiler.redact import HIDDEN, is_secret, redact, redact_words

_FREE_PORT = "<a free port>"
_RUN_DIR = "<run directory>"


def describe(
    spec: JobSpec, host: HostInfo, *, reading: Reading | None = None, refused: Mapping[str, str] | None = None
) -> str:
    """The whole plan as text.

    Args:
        spec: the job.
        host: the machine.
        reading: what is known of the program; by default what its text says.
        refused: packages that an earlier run found unsafe to preload, with the reason.
    """
    if reading is None:
        reading = (read_module if spec.program.kind == "module" else read_script)(spec.program.target)
    lines = ["Plan of gpulaunch (dry run: nothing is started)", ""]
    lines += _block("Detected", _detected(host))
    lines += _block("Plan", _plan(spec, reading, refused or {}))
    lines += _block("Options: value, and where it came from", _options(spec))
    lines += _ranks(spec)
    return "\n".join(map(redact, lines)).rstrip() + "\n"


def _block(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return [title, *(f"  {name.ljust(width)}  {value}".rstrip() for name, value in rows), ""]


def _detected(host: HostInfo) -> list[tuple[str, str]]:
    limit = host.memory_limit_bytes
    memory = f"{limit / 2**30:.1f} GiB ({host.memory_why})" if limit is not None else f"none ({host.memory_why})"
    gpus = [
        (f"GPU {each}", f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB, {gpu.uuid}")
        for each, gpu in enumerate(host.gpus)
    ]
    return [
        ("host", host.hostname),
        ("launched by", host.launched_by),
        ("cores", f"{host.cores} ({host.cores_why})"),
        ("GPUs", f"{len(host.gpus)} ({host.gpus_why})"),
        *gpus,
        ("memory limit", memory),
    ]


def _plan(spec: JobSpec, reading: Reading, refused: Mapping[str, str]) -> list[tuple[str, str]]:
    where = _FREE_PORT if spec.master_port is None else str(spec.master_port)
    port = METRICS_PORT_BASE if spec.metrics_port is None else spec.metrics_port
    upwards = ", or the next free port" if spec.metrics_port is None else ""
    host = f"[{spec.metrics_host}]" if ":" in spec.metrics_host else spec.metrics_host
    secured = f"; https if {spec.metrics_web_config} has a certificate" if spec.metrics_web_config else ""
    metrics = f"http://{host}:{port or _FREE_PORT}/metrics{upwards}{secured}"
    nodes = f"node {spec.node_rank} of {spec.nnodes}"
    world_size = str(spec.nnodes * spec.nproc)
    if spec.elastic is not None:
        nodes = f"one of {spec.elastic.range} nodes"
        if spec.elastic.min_nodes < spec.elastic.max_nodes:
            world_size = f"{spec.elastic.min_nodes * spec.nproc} to {world_size}"
    rows = [
        ("job", f"{spec.name}, run id {spec.run_id}"),
        ("ranks", f"{spec.nproc} on this node ({nodes}), {world_size} in all"),
        ("store" if spec.elastic is None else "nodes meet at", _meeting_place(spec, where)),
        ("start", _start(spec, reading)),
        ("preload", _preload(spec, reading, refused)),
        ("restarts", _restarts(spec)),
        ("metrics", metrics if spec.profile else "off (--no-profile)"),
        ("checkpoints", _checkpoints(spec)),
        ("hangs", _hangs(spec)),
        ("run directory", spec.job_dir or spec.log_dir or _default_dir(spec)),
    ]
    for local_rank, cpus in enumerate(spec.cpu_sets or ()):
        rows.append((f"cores of rank {local_rank}", f"{ranges(cpus)} ({spec.numa_binding})"))
    return rows


def _default_dir(spec: JobSpec) -> str:
    return (
        f"./gpulaunch-runs/{spec.name}-<time>"
        if spec.shared_dir is None
        else f"./gpulaunch-runs/{spec.shared_dir.name}"
    )


def _meeting_place(spec: JobSpec, port: str) -> str:
    if spec.elastic is None or spec.elastic.etcd is None:
        return f"{spec.master_addr}, port {port}"
    etcd = spec.elastic.etcd
    members = ", ".join(f"{host} port {number}" for host, number in etcd.endpoints)
    return f"etcd: {members}{' (TLS)' if etcd.tls else ''}, below {etcd.prefix}"


def _restarts(spec: JobSpec) -> str:
    rate = f", {spec.restart_rate[0]} within {spec.restart_rate[1]:g} s" if spec.restart_rate else ""
    grace = f"{spec.grace_s:g} s for ranks to end before SIGKILL, {spec.failure_grace_s:g} s after a failure"
    return f"at most {spec.max_restarts}{rate}; {grace}"


def _checkpoints(spec: JobSpec) -> str:
    where = ", ".join(spec.checkpoint_dirs) or f"{spec.job_dir or '<run directory>'}/checkpoints"
    where += ", whole on every node (--replicate)" if spec.replicate else ""
    if spec.resume == "never":
        return f"in {where}; none is used (--resume never)"
    first = "the newest complete one" if spec.resume == "auto" else spec.resume
    return f"in {where}; resumes from {first}, passed as GPULAUNCH_RESUME_FROM" + (
        f" and `{spec.resume_arg}`" if spec.resume_arg else ""
    )


def _hangs(spec: JobSpec) -> str:
    if spec.hang_timeout_s <= 0:
        return "no detection (--hang-timeout 0)"
    if not spec.profile:
        return f"{spec.on_hang}, only for ranks stopped by a signal (--no-profile)"
    latest = f"{spec.hang_timeout_s:g} s, {spec.first_step_timeout_s:g} s for the first step"
    return f"{spec.on_hang}; at once if proven, else after {latest}"


def _start(spec: JobSpec, reading: Reading) -> str:
    if spec.program.kind == "exec":
        return "spawn (a command that is not Python is always spawned)"
    if spec.start_method == "auto":
        if reading.obstacle:
            return f"spawn: {reading.obstacle}"
        return "fork from a process that has loaded torch, or spawn if that is not safe"
    return spec.start_method


def _preload(spec: JobSpec, reading: Reading, refused: Mapping[str, str]) -> str:
    if spec.program.kind == "exec" or spec.start_method == "spawn":
        return "nothing (ranks are spawned)"
    program = spec.program.kind.replace("run_path", "script")
    if spec.preload is not None:
        packages, source = spec.preload, "named"
    else:
        packages, source = reading.packages, f"imports of the {program}"
    kept = preloaded(packages, refused, trains=reading.trains)
    if not kept:
        return f"nothing (the {program} imports the standard library only)"
    left = "".join(f"; not {name}: {refused[name]}" for name in packages if name in refused)
    return f"{', '.join(kept)} ({source}; each must pass the checks for forking){left}"


def _options(spec: JobSpec) -> list[tuple[str, str]]:
    shown = {name: _text(value) for name, value in spec.options.items()}
    width = min(40, max((len(value) for value in shown.values()), default=0))
    return [(name, f"{value.ljust(width)}  {spec.origins.get(name, '')}") for name, value in shown.items()]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        items: Iterable[object] = value
        return ",".join(str(item) for item in items) or "-"
    return "-" if value in (None, "") else str(value)


def _ranks(spec: JobSpec) -> list[str]:
    ranks = range(spec.nproc)
    environments = [_environment(spec, local_rank) for local_rank in ranks]
    common = {name: value for name, value in environments[0].items() if all(e.get(name) == value for e in environments)}
    lines = ["Environment of every rank (set by gpulaunch, without the GPULAUNCH_ variables of the run)"]
    lines += [f"  {name}={value}" for name, value in sorted(common.items())]
    for local_rank, environment in zip(ranks, environments, strict=True):
        lines += ["", f"Rank {environment['RANK']}", f"  {shlex.join(redact_words(rank_argv(spec, local_rank)))}"]
        lines += [f"  {name}={value}" for name, value in sorted(environment.items()) if name not in common]
    return lines


def _environment(spec: JobSpec, local_rank: int) -> dict[str, str]:
    rank = spec.node_rank * spec.nproc + local_rank
    environment = rank_environment(
        spec,
        local_rank=local_rank,
        attempt=0,
        master_port=spec.master_port or 0,
        error_file=f"{_RUN_DIR}/attempts/0/rank-{rank}/error.json",
        use_agent_store=True,
    )
    if spec.master_port is None:
        environment["MASTER_PORT"] = _FREE_PORT
    for name in spec.env:
        if is_secret(name):
            environment[name] = HIDDEN
    return environment


def ranges(cpus: Iterable[int]) -> str:
    """{0, 1, 2, 4} -> `0-2,4`, as the kernel writes it."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(str(end) for end in part) for part in parts)
