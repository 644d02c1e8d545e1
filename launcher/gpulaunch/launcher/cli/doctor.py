"""`gpulaunch doctor`: checks whether this machine can run and profile a job, and says what to do if not."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.checks import Finding, Status, checks
from gpulaunch.launcher.cli.collectors import collectors, hooks, traces
from gpulaunch.launcher.cli.verb_parser import VerbParser, wants_help
from gpulaunch.launcher.cli.waiting import show_activity
from gpulaunch.launcher.job.host_info import detect
from gpulaunch.launcher.job.network import ELASTIC_PORT, ETCD_BACKENDS, endpoint_of, etcd_conf, etcd_endpoints
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.job.spec import Etcd
from gpulaunch.launcher.rendezvous.auth import read_token

_HELP = """\
usage: gpulaunch doctor [--json] [--rdzv-endpoint HOST:PORT [--token-file FILE]]
       gpulaunch doctor [--json] --rdzv-backend etcd --rdzv-endpoint HOST:PORT,... [--rdzv-conf K=V,...]

Checks versions, GPUs, tracing, shared memory, limits, ports, name resolution, kernel and installation, and what the
profiler can measure on this machine: every collector of the sidecar, and every part of the probe, by installing it in
a separate process that imports torch.

With --rdzv-endpoint, for a job of several nodes: only checks whether this node reaches the leader, and if not, which
step fails: name resolution, the connection, the leader's answer, the token, or the clock. With --rdzv-backend etcd:
which members answer, whether they have a leader, and whether this node may read and write.

Each line: ok, warn (works with limitations) or fail (jobs will not run), what was found, and what to do.
Exit code 0, or 1 if a check is `fail`. The machine is not changed, and no files remain.
"""


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    parser = VerbParser("doctor")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", default="")
    parser.add_argument("--token-file", metavar="FILE", default="")
    parser.add_argument("--rdzv-backend", choices=("leader", "c10d", *ETCD_BACKENDS), default="leader")
    parser.add_argument("--rdzv-conf", metavar="K=V", default="")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run all checks, print the results, and return the exit code."""
    if wants_help(argv):
        answer(_HELP)
        return 0
    given = words().read(argv)
    if given.rdzv_backend in ETCD_BACKENDS:
        findings = reach_etcd(given.rdzv_endpoint, given.rdzv_conf)
    else:
        findings = reach(given.rdzv_endpoint, given.token_file) if given.rdzv_endpoint else examine()
    answer((as_json(findings) if given.json else as_text(findings)) + "\n")
    return 1 if any(finding.status is Status.FAIL for finding in findings) else 0


def reach(endpoint: str, token_file: str) -> list[Finding]:
    """Whether this node reaches the leader of a job. Raises UsageError."""
    from gpulaunch.launcher.cli.endpoint_checks import endpoint as hops

    host, port = endpoint_of(endpoint)
    with show_activity(f"looking for {endpoint}"):
        return list(hops(host, port or ELASTIC_PORT, read_token(token_file)))


def reach_etcd(endpoints: str, conf: str) -> list[Finding]:
    """Whether this node can use etcd for a job. Raises UsageError, RendezvousError."""
    if not endpoints:
        raise UsageError("doctor: --rdzv-backend etcd: its members are in --rdzv-endpoint")
    from gpulaunch.launcher.cli.etcd_checks import members
    from gpulaunch.launcher.cli.rendezvous import access_of

    etcd = Etcd(endpoints=etcd_endpoints(endpoints), **etcd_conf(conf))
    with show_activity(f"looking for etcd at {endpoints}"):
        return list(members(access_of(etcd)))


def examine() -> list[Finding]:
    """All findings; a check that fails itself is one of them, and does not stop the others."""
    findings: list[Finding] = []
    with show_activity("checking this machine") as doing:
        every = {**checks(os.environ, detect(os.environ)), "collectors": collectors, "probe": hooks, "traces": traces}
        for number, (name, check) in enumerate(every.items()):
            doing(f"checking {name}", number / len(every))
            try:
                findings.extend(check())
            except Exception as err:  # a machine that breaks a check is to be reported, too
                value, advice = f"{type(err).__name__}: {err}", "this check failed to run; please report it"
                findings.append(Finding(name=name, status=Status.WARN, value=value, advice=advice))
    return findings


def as_text(findings: Sequence[Finding]) -> str:
    """One line per finding, and what to do on the next."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.status.value:<5} {finding.name:<{width}}  {finding.value}")
        if finding.advice:
            lines.append(f"{'':<5} {'':<{width}}  -> {finding.advice}")
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    lines.append(", ".join(f"{count} {status.value}" for status, count in counts.items()))
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """The same as JSON."""
    import json

    checks = [
        {"name": each.name, "status": each.status.value, "value": each.value, "advice": each.advice}
        for each in findings
    ]
    return json.dumps({"version": 1, "checks": checks}, indent=2)
