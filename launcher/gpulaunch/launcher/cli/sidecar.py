"""`gpulaunch _sidecar`: the process that measures and exports, alongside the ranks; only the agent starts it.

Composition only: samplers and their loop (profiler), the page and its server (exporters), joined here. The main
thread refreshes, one serves; others write the run directory. SIGTERM is blocked in all threads and read where the loop
waits for its next second: no handler interrupts other code.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpulaunch.launcher.loop import linux

if TYPE_CHECKING:
    from gpulaunch.profiler.record import NodeState

PROCESS_TITLE = "gpulaunch-side"  # at most 15 characters: the kernel's limit for a comm
NICE = 10


def run(argv: Sequence[str]) -> int:
    """Run the sidecar until SIGTERM (0); 2 for wrong arguments, 1 if the agent is gone or the endpoint has failed."""
    options = _parser().parse_args(argv)
    try:
        listener = socket.socket(fileno=options.listen_fd)
        listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        return _usage(f"--listen-fd {options.listen_fd}: {error.strerror}; pass a listening TCP socket")
    os.set_inheritable(options.listen_fd, False)  # py-spy, which it starts, must not inherit it
    with listener:
        if not listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
            return _usage(f"--listen-fd {options.listen_fd}: not listening for TCP; call listen() on it first")
        return _run(options, listener)


def _run(options: argparse.Namespace, listener: socket.socket) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # Ctrl-C and a closed terminal are handled by the agent
    # SIGKILL: no cleanup is needed, and it works when a read from /proc hangs. Everything that must survive is in the
    # ledger.
    if not linux.bind_to_parent(options.parent_pid, signal.SIGKILL):
        return 1
    _settle()

    # Late, because this is most of the startup time and the rules above should apply as soon as possible.
    from gpulaunch.exporters.files.findings_writer import FindingsWriter
    from gpulaunch.exporters.http import HttpServer, WebConfig, WebConfigError, read_web_config
    from gpulaunch.exporters.prometheus.render import Board
    from gpulaunch.exporters.store.telemetry_writer import TelemetryWriter
    from gpulaunch.exporters.web.live_documents import run_dir_of
    from gpulaunch.exporters.web.pages import PUBLIC, pages
    from gpulaunch.exporters.web.routes import routes
    from gpulaunch.launcher.cli.sinks import Sinks
    from gpulaunch.profiler.daemon.sidecar import Sidecar
    from gpulaunch.profiler.record import Collector

    channel_dir = Path(options.channel_dir)
    try:
        protection = read_web_config(Path(options.web_config)) if options.web_config else WebConfig()
    except WebConfigError as error:
        return _usage(f"--web-config: {error}")
    board = Board(version=_version())
    findings = FindingsWriter(channel_dir)
    telemetry = TelemetryWriter(channel_dir)
    scheme = "http" if protection.tls is None else "https"
    sinks = Sinks(options, listener, version=_version(), scheme=scheme)

    def publish(state: NodeState) -> None:
        state = findings.keep(state)
        telemetry.keep(state)
        state = replace(state, collectors={**state.collectors, Collector.STORE: telemetry.condition})
        board.publish(state)  # before it is announced
        sinks.publish(state)

    sidecar = Sidecar(channel_dir, publish, interval_s=options.interval)
    sidecar.refresh()
    server = HttpServer(
        listener,
        routes(board, stale_s=10 * max(1.0, options.interval)),
        pages=pages(lambda: board.state, lambda: run_dir_of(channel_dir)),
        public=PUBLIC,
        token=protection.token,
        tls=protection.tls,
    )
    server.start()
    sinks.start()
    try:
        sidecar.run(lambda wait_s: linux.wait_for_signal({signal.SIGTERM}, wait_s) != 0 or not server.alive)
        return 0 if server.alive else 1
    finally:
        server.close()
        findings.close()
        telemetry.close()
        sinks.close()


def _settle() -> None:
    """Lower the priority below the ranks, set the name for `ps` and `top`, and prepare for many ranks."""
    with contextlib.suppress(OSError):  # a hardened container may forbid it; then we run as we are
        if os.getpriority(os.PRIO_PROCESS, 0) < NICE:
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
    linux.set_comm(PROCESS_TITLE)
    # A full collection takes 60 ms with 256 ranks, in the middle of a scrape, and finds next to nothing: make it rare.
    gc.set_threshold(700, 10, 1000)
    warnings.simplefilter("ignore", SyntaxWarning)  # of programs whose source is read: the ranks say it themselves
    with contextlib.suppress(OSError, ValueError):  # two files for each rank: many ranks need more than the usual 1024
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gpulaunch")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpulaunch _sidecar", description="Measure the ranks and export metrics (internal)."
    )
    parser.add_argument("--channel-dir", required=True, help="directory of the shared-memory segments")
    parser.add_argument("--listen-fd", required=True, type=int, help="listening TCP socket, inherited")
    parser.add_argument("--parent-pid", required=True, type=int, help="the agent; the sidecar ends with it")
    parser.add_argument("--run-label", default="", help="id of the run, the same on all its nodes")
    parser.add_argument("--sd-dir", default="", help="directory that Prometheus watches for targets")
    parser.add_argument("--push-url", default="", help="Pushgateway for the last values")
    parser.add_argument("--otlp-url", default="", help="OTLP collector")
    parser.add_argument("--web-config", default="", help="Prometheus web configuration file")
    parser.add_argument("--interval", type=_interval_s, default=1.0, help="seconds between refreshes")
    return parser


def _interval_s(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.01 and 3600 seconds")
    return value


def _usage(message: str) -> int:
    sys.stderr.write(f"gpulaunch _sidecar: error: {message}\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
