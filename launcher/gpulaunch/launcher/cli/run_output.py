"""What a run prints and writes about itself: the greeting, the report of a failure, the summary at the end."""

from __future__ import annotations

import contextlib
import os
import time

from gpulaunch.launcher.agent import summary, timers
from gpulaunch.launcher.agent.agent import Agent, Ended
from gpulaunch.launcher.agent.rundir import RunDir
from gpulaunch.launcher.cli import report_page
from gpulaunch.launcher.failure import report
from gpulaunch.launcher.failure.blame import Blame
from gpulaunch.launcher.job import plan
from gpulaunch.launcher.job.host_info import HostInfo
from gpulaunch.launcher.job.job_json import CHANGES
from gpulaunch.launcher.job.spec import JobSpec
from gpulaunch.launcher.logs.console import Console
from gpulaunch.launcher.loop.files import shown
from gpulaunch.profiler.kernel import kernel


class RunOutput:
    """The lines on the console, and failure.json, summary.json and the events around a run."""

    def __init__(self, spec: JobSpec, host: HostInfo, console: Console, rundir: RunDir, run_id: str) -> None:
        self._spec = spec
        self._host = host
        self._console = console
        self._rundir = rundir
        self._run_id = run_id
        self.started_s = time.monotonic()
        self._started_wall_s = time.time()
        self._failure_report = ""
        self._no_findings = ""
        self.ended = self.ended_well = False
        self.report_dir: str | None = None
        """Where the report of the run is to be written; None: nowhere."""

    @property
    def ends_with_failure(self) -> bool:
        """Whether `conclude` prints the report of the failure that ended the job."""
        return bool(self._failure_report)

    def greet(self, *, sidecar_url: str, moved: str = "") -> None:
        """Print what runs where, and write the event `run_started`.

        Args:
            sidecar_url: of its metrics, or "".
            moved: that their usual port was taken, or "".
        """
        spec, host, console = self._spec, self._host, self._console
        node = f"on node {spec.node_rank} of {spec.nnodes}" if spec.nnodes > 1 else f"on {host.hostname}"
        if spec.host_share is not None:  # the tasks are counted below
            node = f"on {host.hostname}"
        elif spec.elastic is not None:
            node = f"on {host.hostname}, one of {spec.elastic.range} nodes"
        ranks = "1 rank" if spec.nproc == 1 else f"{spec.nproc} ranks"
        gpus = f"{len(host.gpus)} ({host.gpus_why})" if host.gpus else f"none: {host.gpus_why}"
        by = "" if host.launched_by == "one host" else f", launched by {host.launched_by}"
        console.say(f"{spec.name}: {ranks} {node}{by}")
        of = "cores" if spec.host_share is None else "cores of this task"
        threads = "" if spec.omp_num_threads is None else f"; OMP_NUM_THREADS={spec.omp_num_threads} ({of} // ranks)"
        console.say(f"cores {host.cores} ({host.cores_why}){threads}; GPUs {gpus}")
        if CHANGES in os.environ:
            console.say(f"changed in every rank ({CHANGES}): {os.environ[CHANGES]}")
        if moved:
            console.say(moved)
        if sidecar_url:
            console.say(f"metrics {sidecar_url}")
        if timers.HEALTH_CHECK_PORT in os.environ:
            healthz = f"; {sidecar_url.removesuffix('/metrics')}/healthz answers" if sidecar_url else ""
            console.say(f"{timers.HEALTH_CHECK_PORT}: no health check server is started, as with torchrun{healthz}")
        if plan.prefix_is_unused(spec):
            console.say("--log-line-prefix-template has no effect without --tee, as with torchrun")
        if self._rundir.fallback_from:
            console.say(f"cannot write {self._rundir.fallback_from}; using the temporary directory")
        console.say(f"files in {shown(self._rundir.path)}")
        self._rundir.event(
            "run_started",
            run_id=self._run_id,
            metrics_url=sidecar_url,
            pid=os.getpid(),
            host=host.hostname,
            kernel=kernel(),
        )

    def failure(self, blame: Blame | None, attempt: int, restarting: bool, why: str, elsewhere: str = "") -> None:
        """Write failure.json of an attempt; print its headline when the job goes on, else keep the whole report.

        Args:
            blame: what failed on this node; None: nothing, its ranks were told to end.
            attempt: its number.
            restarting: whether there will be another.
            why: of the restart policy, or "".
            elsewhere: what failed first, on another node; "": nothing.
        """
        spec, console, started_s = self._spec, self._console, self.started_s
        path = os.path.join(self._rundir.attempt_dir(attempt), "failure.json")
        complaint = report.write_report(
            path,
            blame,
            script=spec.program.target,
            started_s=started_s,
            started_wall_s=self._started_wall_s,
            world_size=spec.nproc * spec.nnodes,
            attempt=attempt,
            elsewhere=elsewhere,
        )
        if complaint:
            console.say(complaint)
        if restarting:
            headline = elsewhere or (report.headline(blame) if blame is not None else "")
            console.say(f"attempt {attempt} failed: {headline}")
            console.say(f"restarting all ranks (restart {attempt + 1} of {spec.max_restarts}); why: {shown(path)}")
            if why:
                console.say(why)
            return
        if why:
            console.say(f"not restarted: {why}")
        parent_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if parent_file and blame is not None:
            first = blame.first
            error_file = os.path.join(self._rundir.rank_path(attempt, first.rank), "error.json")
            report.tell_parent(first, error_file, parent_file)
        self._failure_report = report.render(
            blame,
            script=spec.program.target,
            report_path=shown(path),
            started_s=started_s,
            attempt=attempt,
            elsewhere=elsewhere,
        )

    def sum_up(self, agent: Agent, ended: Ended) -> None:
        """Print the summary of the run, and write summary.json and the event `run_ended`."""
        console = self._console
        elapsed_s = time.monotonic() - self.started_s
        if ended.error and ended.blame is None and ended.code:
            console.say(f"error: {ended.error}")
        error = report.headline(ended.blame) if ended.blame is not None and ended.code else ended.error
        content = summary.as_json(
            agent.totals,
            run_id=self._run_id,
            exit_code=ended.code,
            stopped_by=ended.stopped_by or None,
            elapsed_s=elapsed_s,
            restarts=agent.num_restarts,
            error=error,
            goodput_seconds=agent.goodput.seconds(),
        )
        with contextlib.suppress(OSError):
            self._rundir.write_json("summary.json", content)
        self._rundir.event("run_ended", exit_code=ended.code, **agent.goodput.as_json())
        lines = summary.as_text(
            agent.totals,
            elapsed_s=elapsed_s,
            restarts=agent.num_restarts,
            run_dir=shown(self._rundir.path),
            stopped_by=ended.stopped_by,
            profiled=self._spec.profile,
        )
        for line in [*lines, agent.goodput.line()]:
            console.say(line)
        # One for the whole job, and none if nothing was created that it could report.
        if agent.node_rank == 0 and any(one.steps for one in agent.totals.values()):
            self.report_dir = self._rundir.shared
        self.ended, self.ended_well = True, ended.code == 0
        if self.ended_well:
            self._no_findings = summary.why_nothing_was_found(agent.totals.values())

    def conclude(self) -> None:
        """Report what is known only after the sidecar has written its last data."""
        lines = _found(self._rundir.path, self._started_wall_s, self._no_findings)
        # A failure is the last output. Without one, the report is announced once it is written.
        if self.report_dir is not None and self._failure_report:
            lines.append(self.where_the_report_is())
        for line in [*lines, *self._failure_report.splitlines()]:
            self._console.say(line)

    def where_the_report_is(self) -> str:
        """The line that names report.html."""
        return f"report in {shown(os.path.join(self.report_dir or self._rundir.path, report_page.PAGE_FILE))}"


def _found(run_dir: str, since_s: float, if_nothing: str) -> list[str]:
    """What the profiler has found since then (Unix time), or that it has found nothing; empty: it has not looked."""
    try:
        size_bytes = os.stat(os.path.join(run_dir, "findings.jsonl")).st_size
    except OSError:
        return []
    if not size_bytes and not if_nothing:
        return []
    from gpulaunch.launcher.cli.report import (  # loads urllib, which the agent does without
        headlines,
        where_the_time_goes,
    )

    lines = headlines(run_dir, since_s=since_s) if size_bytes else []
    if lines or not if_nothing:
        return lines
    spent = where_the_time_goes(run_dir)
    return [f"{if_nothing}; {spent}" if spent else if_nothing]
