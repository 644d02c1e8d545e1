"""The options of where a job's metrics go and how they are served, checked before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.job.spec import JobSpec

_TO_LOAD_S = 0.5
"""The client that sends the last values is loaded at the end, and only then."""


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """The result of the options."""

    arguments: tuple[str, ...]
    """Arguments of the sidecar."""
    end_s: float
    """How much longer its end may take because of them."""
    scheme: str
    """http, or https."""


def sink_options(spec: JobSpec) -> SinkOptions:
    """Check and combine the options; imports the checks only if an option is given.

    Raises UsageError.
    """
    arguments = ["--run-label", spec.metrics_run]
    end_s = 0.0
    if spec.metrics_sd:
        from pathlib import Path

        from gpulaunch.exporters.discovery import announce

        _refuse("sd", announce.complaint_about(Path(spec.metrics_sd)))
        arguments += ["--sd-dir", os.path.abspath(spec.metrics_sd)]
    if spec.metrics_push:
        from gpulaunch.exporters.push import address

        _refuse("push", address.complaint_about(spec.metrics_push))
        arguments += ["--push-url", spec.metrics_push]
        end_s += address.LONGEST_S + _TO_LOAD_S
    if spec.metrics_otlp:
        from gpulaunch.exporters.otlp import extra

        _refuse("otlp", extra.complaint_about(spec.metrics_otlp) or extra.missing())
        arguments += ["--otlp-url", spec.metrics_otlp]
        end_s += extra.CLOSE_S + _TO_LOAD_S
    scheme = "http"
    if spec.metrics_web_config:
        from gpulaunch.exporters.http import WebConfigError, read_web_config  # loads ssl

        try:
            scheme = "https" if read_web_config(spec.metrics_web_config).tls is not None else "http"
        except WebConfigError as err:
            _refuse("web-config", str(err))
        arguments += ["--web-config", spec.metrics_web_config]
    return SinkOptions(arguments=tuple(arguments), end_s=end_s, scheme=scheme)


def _refuse(name: str, complaint: str | None) -> None:
    if complaint:
        raise UsageError(f"--metrics-{name}: {complaint}")
