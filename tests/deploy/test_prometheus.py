"""What is shipped for Prometheus is read by Prometheus: its tool, and itself over a page of ours."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpulaunch.exporters.discovery.announce import Announcement
from gpulaunch.exporters.discovery.targets import PREFIX
from gpulaunch.exporters.http import HttpServer
from gpulaunch.exporters.prometheus.render import Board
from gpulaunch.exporters.web.routes import routes
from gpulaunch.launcher.job.spec import METRICS_PORT_BASE
from gpulaunch.profiler.record import NodeState

SHIPPED = Path(__file__).parents[2] / "deploy/prometheus"
CONFIG = SHIPPED / "prometheus.yml"
WAIT_S = 60.0  # bounds every wait; Prometheus takes about five seconds to hear of a target


def test_the_configuration_is_valid(promtool: str) -> None:
    checked = subprocess.run([promtool, "check", "config", CONFIG], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "1 rule files found" in checked.stdout


def test_it_looks_where_jobs_serve() -> None:
    here = [job for job in configuration()["scrape_configs"] if job["job_name"] == "gpulaunch-here"]
    ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", str(here))]

    assert ports[0] == METRICS_PORT_BASE
    assert ports == list(range(ports[0], ports[0] + len(ports)))


def test_it_looks_for_the_files_that_are_written() -> None:
    (announced,) = [job for job in configuration()["scrape_configs"] if job["job_name"] == "gpulaunch"]

    assert announced["file_sd_configs"] == [{"files": [f"targets/{PREFIX}*.json"]}]


def configuration() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    return document


Ask = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def ask(prometheus: str, tmp_path: Path) -> Iterator[Ask]:
    """A Prometheus with what is shipped, in a hurry, and without the ports of this machine; asked by PromQL."""
    document = configuration()
    document["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    document["scrape_configs"] = [job for job in document["scrape_configs"] if job["job_name"] == "gpulaunch"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(document))
    (tmp_path / "gpulaunch.rules.yml").write_bytes((SHIPPED / "gpulaunch.rules.yml").read_bytes())
    (tmp_path / "targets").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    command = [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    command += [f"--web.listen-address={place}", "--log.level=error"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:

        def get(path: str) -> Any:
            assert process.poll() is None, (tmp_path / "log").read_text()
            with urllib.request.urlopen(f"http://{place}{path}", timeout=WAIT_S) as answer:
                return json.load(answer)["data"]

        def query(expression: str) -> list[dict[str, Any]]:
            if expression == "rules":
                return [rule for group in get("/api/v1/rules")["groups"] for rule in group["rules"]]
            result: list[dict[str, Any]] = get(f"/api/v1/query?query={urllib.parse.quote(expression)}")["result"]
            return result

        wait_until(lambda: answers(place))
        yield query
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)


def answers(place: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{place}/-/ready", timeout=WAIT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def wait_until(true: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s, "it did not come to that"
        threading.Event().wait(0.1)


def test_a_run_is_found_judged_and_forgotten(ask: Ask, node: NodeState, tmp_path: Path) -> None:
    """Announced, it is scraped with its labels, and every rule can be computed from its page; ended, it is gone."""
    board = Board(version="1")
    board.publish(node)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(listener, routes(board))
        server.start()
        announced = Announcement(tmp_path / "targets", bound=listener.getsockname()[:2], run="job-7", pid=os.getpid())
        try:
            announced.tell(node)
            wait_until(lambda: ask('gpulaunch:run_info{run="job-7"}'))
            (known,) = ask("gpulaunch:run_info")
            (up,) = ask('up{job="gpulaunch"}')
            wait_until(lambda: all(rule["health"] == "ok" for rule in ask("rules")))

            assert (up["metric"]["run"], up["metric"]["name"]) == ("job-7", "digits_ddp")
            assert up["metric"]["node"] == socket.gethostname()
            assert (known["metric"]["run"], known["metric"]["name"]) == ("job-7", "digits_ddp")
            assert [rule["name"] for rule in ask("rules") if rule.get("lastError")] == []
        finally:
            announced.close()
            server.close()

    wait_until(lambda: not ask('up{job="gpulaunch"}'))
    wait_until(lambda: not ask("gpulaunch:run_info"))
    assert ask('ALERTS{alertname="GpulaunchTargetDown",alertstate="firing"}') == []
