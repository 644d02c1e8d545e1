"""Further destinations of metrics: announced in a directory, sent over OTLP, pushed at the end, as requested."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpulaunch.exporters.discovery.target_file import TargetFile
    from gpulaunch.exporters.otlp.sender import Sender
    from gpulaunch.profiler.record import NodeState


class Sinks:
    """The sinks that the sidecar's options request; nothing is imported for others."""

    def __init__(
        self, options: argparse.Namespace, listener: socket.socket, *, version: str, scheme: str = "http"
    ) -> None:
        """`scheme`: of the page at `listener`, http or https."""
        self._run: str = options.run_label
        self._push_url: str = options.push_url
        self._version = version
        self._node = socket.gethostname()
        self._state: NodeState | None = None
        self._told_fault = ""
        self._announced: TargetFile | None = None
        self._sender: Sender | None = None
        if options.sd_dir:
            from gpulaunch.exporters.discovery.announce import Announcement
            from gpulaunch.exporters.discovery.target_file import TargetFile

            where, bound = Path(options.sd_dir), listener.getsockname()[:2]
            announcement = Announcement(where, bound=bound, scheme=scheme, run=self._run, pid=options.parent_pid)
            self._announced = TargetFile(announcement)
        if options.otlp_url:
            from gpulaunch.exporters.otlp.sender import Sender

            self._sender = Sender(options.otlp_url, node=self._node, version=version, run=self._run, on_fault=_say)

    def start(self) -> None:
        """Start sending."""
        if self._sender is not None:
            self._sender.start()

    def publish(self, state: NodeState) -> None:
        """Pass on the newest state; nothing before the run has begun."""
        if state.group is None:
            return
        self._state = state
        if self._announced is not None:
            self._announced.tell(state)
            if self._announced.fault != self._told_fault:
                self._told_fault = self._announced.fault
                if self._told_fault:
                    _say(self._told_fault)
        if self._sender is not None:
            self._sender.publish(state)

    def close(self) -> None:
        """Remove the announcement, send and push the newest values; takes a few seconds at most."""
        if self._announced is not None:
            self._announced.close()
        if self._sender is not None:
            self._sender.close()
        if self._push_url and self._state is not None:
            from gpulaunch.exporters.push.last import push

            if fault := push(self._state, self._push_url, run=self._run, node=self._node, version=self._version):
                _say(fault)


def _say(line: str) -> None:
    sys.stderr.write(f"[gpulaunch] {line}\n")
