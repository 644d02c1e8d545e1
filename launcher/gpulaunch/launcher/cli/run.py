"""`gpulaunch PROGRAM`: creates the parts of one job, runs it, and cleans up in any case."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import sys
from collections.abc import Callable

from gpulaunch.launcher.agent import timers
from gpulaunch.launcher.agent.agent import Agent, Ended
from gpulaunch.launcher.agent.metrics_port import bind_metrics, other_port_notice, url_of
from gpulaunch.launcher.agent.packages import reading_of, recall
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.agent.rundir import RunDir, RunDirError, RunDirLockedError, open_run_dir
from gpulaunch.launcher.agent.segments import Segments
from gpulaunch.launcher.agent.sidecar import SidecarProcess
from gpulaunch.launcher.checkpoint.names import check_pattern
from gpulaunch.launcher.checkpoint.resume import check_template
from gpulaunch.launcher.cli import report_page
from gpulaunch.launcher.cli.rendezvous import rendezvous_of
from gpulaunch.launcher.cli.run_output import RunOutput
from gpulaunch.launcher.cli.sink_options import SinkOptions, sink_options
from gpulaunch.launcher.failure.evidence import OomWatch
from gpulaunch.launcher.job.host_info import HostInfo
from gpulaunch.launcher.job.imports import Reading
from gpulaunch.launcher.job.job_json import job_document
from gpulaunch.launcher.job.options import TryLaterError, UsageError
from gpulaunch.launcher.job.spec import JobSpec, Request
from gpulaunch.launcher.logs.capture import LogHub
from gpulaunch.launcher.logs.console import Console
from gpulaunch.launcher.loop import child, linux
from gpulaunch.launcher.loop.forkserver import Inherited, take_inherited
from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.loop.orphan_reaper import OrphanReaper
from gpulaunch.launcher.rendezvous.base import PortInUseError, Rendezvous, RendezvousError
from gpulaunch.launcher.tune.change import TRIAL
from gpulaunch.profiler.channel import control
from gpulaunch.profiler.channel.control import ControlWriter

_FILES_PER_RANK = 6
_FILES_BESIDE = 40
"""The agent's descriptors: for each rank two pipes, two files, a pidfd and some temporary ones, and its own."""
_OF_A_RANK = (
    *("GPULAUNCH_CHANNEL_DIR", "GPULAUNCH_RUN_DIR", "GPULAUNCH_GPU_MEMORY_FRACTION", "GPULAUNCH_CONTROL"),
    *("GPULAUNCH_CHECKPOINT_DIR", "GPULAUNCH_RESUME_FROM", "GPULAUNCH_CHECKPOINT_PER_NODE", "GPULAUNCH_ATTEMPT"),
    *("GPULAUNCH_TRACER_PID", "GPULAUNCH_JOB", "GPULAUNCH_GENERATION"),
)
"""Variables that an outer launcher has set for its rank, and that ours must not inherit."""
_FLUSH_S = 24 * 3600.0
"""How long the reader of our output may take for the rest once everything has ended: it may be a pager."""


def run(request: Request, host: HostInfo, *, on_end: Callable[[RunDir, Agent, Ended], None] | None = None) -> int:
    """Run the job; return the exit code. `on_end` is called with how it ended, if a caller needs more than the code."""
    spec = request.spec
    sinks = checked(spec)
    fork_server = take_inherited(os.environ)
    children = {*linux.children_of(os.getpid())} - ({fork_server.pid} if fork_server is not None else set())
    foreign_children = os.getpid() == 1 or bool(children)
    linux.become_subreaper()
    needed, allowed = _FILES_PER_RANK * spec.nproc + _FILES_BESIDE, child.allow_many_files()
    if allowed < needed:
        raise UsageError(
            f"{spec.nproc} ranks need {needed} open files, and the limit is {allowed}; raise it: ulimit -n"
        )
    run_id = os.urandom(8).hex()
    loop = Loop()
    try:
        console = Console(loop)
        rendezvous = rendezvous_of(loop, spec, console.say)
        rundir = _open(spec)
        job = _Job(spec, host, loop, console, rendezvous, rundir, sinks, run_id, foreign_children, fork_server)
        return job.run(on_end)
    except (PortInUseError, RunDirLockedError) as err:
        raise TryLaterError(str(err)) from err
    except (RendezvousError, RunDirError) as err:
        raise UsageError(str(err)) from err
    finally:
        loop.close()


def checked(spec: JobSpec) -> SinkOptions:
    """Check a job before anything starts. Raises UsageError."""
    complaint = check_template(spec.resume_arg) if spec.resume_arg is not None else None
    if complaint:
        raise UsageError(f"--resume-arg: {complaint}")
    complaint = check_pattern(spec.checkpoint_pattern) if spec.checkpoint_pattern is not None else None
    if complaint:
        raise UsageError(f"--checkpoint-pattern: {complaint}")
    if spec.resume not in ("auto", "never") and "://" not in spec.resume and not os.path.exists(spec.resume):
        raise UsageError(f"--resume: there is no {spec.resume}; specify a checkpoint, auto or never")
    return sink_options(spec)


def _open(spec: JobSpec) -> RunDir:
    try:
        return open_run_dir(spec)
    except OSError as err:
        raise RunDirError(f"cannot make a run directory: {err.strerror}; specify one with --job-dir") from err


def base_env_of(spec: JobSpec, run_id: str) -> dict[str, str]:
    """The environment of every process of the job: the user's, the job file's, and the run's mark."""
    env = {**os.environ, **spec.env}
    # From an outer launcher: its segments and timers are not ours.
    if "GPULAUNCH_CONTROL" in env:
        env.pop(timers.FILE, None)
    for name in _OF_A_RANK:
        env.pop(name, None)
    env["GPULAUNCH_RUN_ID"] = run_id
    env[linux.RUNS_VARIABLE] = ":".join([*filter(None, [env.get(linux.RUNS_VARIABLE)]), run_id])
    if spec.omp_num_threads is not None:
        # Before torch is imported anywhere: libgomp and OpenBLAS read it when they are loaded.
        env["OMP_NUM_THREADS"] = str(spec.omp_num_threads)
    return env


class _Job:
    """The parts of one run, in the order in which they are created and closed."""

    def __init__(
        self,
        spec: JobSpec,
        host: HostInfo,
        loop: Loop,
        console: Console,
        rendezvous: Rendezvous,
        rundir: RunDir,
        sinks: SinkOptions,
        run_id: str,
        foreign_children: bool,
        fork_server: Inherited | None,
    ) -> None:
        self._spec = spec
        self._loop = loop
        self._console = console
        self._rendezvous = rendezvous
        self._rundir = rundir
        self._sinks = sinks
        self._run_id = run_id
        self._foreign_children = foreign_children
        self._fork_server = fork_server
        self._output = RunOutput(spec, host, console, rundir, run_id)
        self._oom = OomWatch()

    def run(self, on_end: Callable[[RunDir, Agent, Ended], None] | None) -> int:
        spec, loop, console, rundir, output = self._spec, self._loop, self._console, self._rundir, self._output
        has_torch = has_torch_of(spec)
        base_env = base_env_of(spec, self._run_id)
        segments = self._segments(console)
        control_path = self._control(segments)
        directories = [path for path in (segments.directory if segments else "", spec.program.call_dir) if path]
        orphan_reaper = OrphanReaper(self._run_id, directories)
        hub = LogHub(
            loop,
            console,
            stdout_filters=spec.duplicate_stdout_filters,
            stderr_filters=spec.duplicate_stderr_filters,
        )
        context = RunContext(
            loop=loop,
            spec=spec,
            rundir=rundir,
            hub=hub,
            segments=segments if spec.profile else None,
            base_env=base_env,
            fork_server=self._fork_server,
            use_agent_store=has_torch,
            foreign_children=self._foreign_children,
            oom=self._oom,
            control_path=control_path,
            timer_file=timers.pipe_of(base_env, os.path.dirname(control_path)),
            checkpoint_dirs=tuple(_absolute(each) for each in spec.checkpoint_dirs)
            or (os.path.join(rundir.shared, "checkpoints"),),
        )
        reading = reading_of(spec)
        spawn_because = spawn_because_of(spec, reading, has_torch=has_torch)
        sidecar = None
        agent: Agent | None = None
        try:
            sidecar = self._sidecar(console, context.segments, base_env)
            agent = Agent(
                context,
                console=console,
                rendezvous=self._rendezvous,
                sidecar=sidecar,
                orphan_reaper=orphan_reaper,
                report=output.failure,
                reading=reading,
                spawn_because=spawn_because,
                gpus=spec.cards,
                began_s=output.started_s,
                control=ControlWriter(control_path),
            )
            if has_torch:
                agent.start_server()
            if sidecar is not None:
                sidecar.start()
            try:
                refused = recall(spec, reading.packages)
                rundir.write_json(
                    "job.json",
                    job_document(
                        spec, reading.packages, refused=refused, spawn_because=spawn_because, trains=reading.trains
                    ),
                )
            except OSError as err:
                console.say(f"cannot write job.json in {rundir.path}: {err.strerror}; the job continues")
            if sidecar is None:
                output.greet(sidecar_url="")
            else:
                output.greet(
                    sidecar_url=url_of(self._metrics, self._sinks.scheme),
                    moved=other_port_notice(self._metrics, spec.metrics_port),
                )
            if spawn_because == reading.obstacle != "":
                console.say(f"ranks are spawned, not forked: {spawn_because}")
            ended = agent.run()
            output.sum_up(agent, ended)
            if on_end is not None:
                on_end(rundir, agent, ended)
            return ended.code
        finally:
            if agent is not None:
                agent.close()
            orphan_reaper.dismiss()
            if segments is not None:
                segments.close()
            hub.close(keep_held=output.ended_well)
            if output.ended:
                output.conclude()
            # Only this process, which may wait for its reader, and one that ends with it are left for a signal
            # to end.
            for name in {*spec.signals, *spec.preempt_signals}:
                signal.signal(signal.Signals[name], signal.SIG_DFL)
            for name in spec.notify_signals:  # nothing is left to save, so the signal must not end this process
                signal.signal(signal.Signals[name], signal.SIG_IGN)
            report_dir = None if TRIAL in os.environ else output.report_dir
            writing = report_page.begin(report_dir) if report_dir is not None else None
            console.flush(_FLUSH_S)
            if writing is not None:
                if not report_page.wait(writing):
                    console.say(f"no {report_page.PAGE_FILE}: it took too long, or failed; try gpulaunch report --html")
                elif not output.ends_with_failure:
                    console.say(output.where_the_report_is())
                console.flush(_FLUSH_S)
            console.close()
            hub.hand_over()
            rundir.close()

    def _segments(self, console: Console) -> Segments | None:
        root = os.environ.get("GPULAUNCH_SHM_DIR", "/dev/shm")  # noqa: S108 (a private directory is made there)
        try:
            return Segments(self._run_id, run_dir=self._rundir.path, root=root)
        except OSError as err:
            if self._spec.profile:
                console.say(
                    f"profiling is off: cannot create shared memory in {root}: {err.strerror}; see gpulaunch doctor"
                )
            return None

    def _control(self, segments: Segments | None) -> str:
        """Create the segment for requests to save: next to the ranks' or, without these, in the run directory."""
        path = os.path.join(segments.directory if segments is not None else self._rundir.path, "control.bin")
        try:
            control.create(path)
        except OSError as err:
            path = os.path.join(self._rundir.path, "control.bin")
            if segments is None:
                raise RunDirError(f"cannot write {path}: {err.strerror}; specify a directory with --job-dir") from err
            control.create(path)
        return path

    def _sidecar(self, console: Console, segments: Segments | None, base_env: dict[str, str]) -> SidecarProcess | None:
        if segments is None:
            return None
        host, port = self._spec.metrics_host, self._spec.metrics_port
        try:
            self._metrics = bind_metrics(host, port)
        except OSError as err:
            where = f"{host}:{port}" if port is not None else host
            if self._spec.origins.get("metrics-addr", "default") == "default":
                console.say(f"no metrics: cannot listen on {where}: {err.strerror}")
                return None
            raise (TryLaterError if err.errno == errno.EADDRINUSE else UsageError)(
                f"cannot serve metrics on {where}: {err.strerror}; use another --metrics-addr, or --no-profile"
            ) from err
        env = {**base_env, "GPULAUNCH_CHANNEL_DIR": segments.directory}
        return SidecarProcess(
            self._loop,
            self._metrics,
            segments.directory,
            env,
            console.say,
            sinks=self._sinks.arguments,
            end_s=self._sinks.end_s,
        )


def _absolute(path: str) -> str:
    """A directory as the ranks need it, independent of their current directory; a URL unchanged."""
    return path if "://" in path else os.path.abspath(path)


def has_torch_of(spec: JobSpec) -> bool:
    """Whether torch can be imported for the job by this interpreter."""
    return spec.program.python == sys.executable and importlib.util.find_spec("torch") is not None


def spawn_because_of(spec: JobSpec, reading: Reading, *, has_torch: bool) -> str:
    """Why the ranks should not be forked, or ""."""
    if spec.program.kind == "exec":
        return "the program is not run by Python"
    if spec.start_method == "spawn":
        return "requested by the user"
    if spec.program.python != sys.executable:
        return "PYTHON_EXEC is another interpreter"
    if not has_torch:
        return "torch is not installed"
    return reading.obstacle if spec.start_method == "auto" else ""
