"""What is shipped for Prometheus is read by Prometheus's own tool."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpulaunch.launcher.job.spec import METRICS_PORT_BASE

CONFIG = Path(__file__).parents[2] / "deploy/prometheus/prometheus.yml"


def test_the_configuration_is_valid() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        assert not os.environ.get("CI"), "promtool is required in CI"
        pytest.skip("no promtool (Debian's package prometheus)")

    checked = subprocess.run([promtool, "check", "config", CONFIG], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_it_looks_where_jobs_serve() -> None:
    ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", CONFIG.read_text())]

    assert ports[0] == METRICS_PORT_BASE
    assert ports == list(range(ports[0], ports[0] + len(ports)))
