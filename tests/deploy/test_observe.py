"""`make observe`: a real run and a real Prometheus with the shipped rules, and nothing of them left afterwards.

Grafana is a stand-in here: a program of its name that writes down what it was told, and says that it is well.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OBSERVE = ROOT / "deploy/observe/observe.py"
RULES = ROOT / "deploy/prometheus/gpulaunch.rules.yml"
WAIT_S = 200.0
CTRL_C = "Ctrl-C ends everything."
STAND_IN = """\
#!{python}
import http.server, json, os, pathlib
home = pathlib.Path(os.environ["GF_PATHS_DATA"]).parent
told = {{str(each.relative_to(home)): each.read_text() for each in home.rglob("*.yaml")}}
pathlib.Path({out!r}).write_text(json.dumps({{"env": dict(os.environ), "files": told}}))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
at = (os.environ["GF_SERVER_HTTP_ADDR"], int(os.environ["GF_SERVER_HTTP_PORT"]))
http.server.HTTPServer(at, Health).serve_forever()
"""

needs_torch = pytest.mark.torch


class Observing:
    """The script as somebody has it in a terminal, and what it has printed there."""

    def __init__(self, directory: Path, path: Path, *arguments: str, env: Mapping[str, str]) -> None:
        self.directory = directory
        self._out = directory / "out"
        ours = ("GPULAUNCH_", "PET_", "SLURM_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(OBSERVE), *arguments],
                cwd=directory,
                env={**clean, "PATH": str(path), "PYTHONUNBUFFERED": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to a group of processes
            )

    @property
    def text(self) -> str:
        return self._out.read_text()

    def comes_to(self, text: str) -> None:
        """Wait until it has printed this."""
        end_s = time.monotonic() + WAIT_S
        while text not in self.text:
            assert self._process.poll() is None, f"it ended with {self._process.returncode}\n{self.text}"
            assert time.monotonic() < end_s, f"it never said {text!r}\n{self.text}"
            threading.Event().wait(0.1)

    def told(self, label: str) -> str:
        """What stands behind a label."""
        (found,) = re.findall(rf"^ *{re.escape(label)}  +(.+)$", self.text, re.MULTILINE)
        return str(found)

    def url(self, label: str) -> urllib.parse.SplitResult:
        return urllib.parse.urlsplit(self.told(label).split(" ")[0])

    @property
    def written(self) -> Path:
        """The directory that is to be gone afterwards."""
        (found,) = re.findall(r"what they write is in (.+)$", self.text, re.MULTILINE)
        return Path(found)

    def ctrl_c(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def ends(self) -> int:
        """Wait for the end, and give its code."""
        try:
            return self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end\n{self.text}")

    def close(self) -> None:
        """End what a failed test has left."""
        if self._process.poll() is None:
            self.ctrl_c()
            self.ends()


Start = Callable[..., Observing]


@pytest.fixture
def start(tmp_path: Path, census: None) -> Iterator[Start]:
    """Start it with these programs on PATH, and no others."""
    started: list[Observing] = []

    def start(*arguments: str, programs: Mapping[str, str] = {}, env: Mapping[str, str] = {}) -> Observing:
        (path := tmp_path / "bin").mkdir()
        for name, program in programs.items():
            (path / name).symlink_to(program)
        started.append(Observing(tmp_path, path, *arguments, env=env))
        return started[-1]

    yield start
    for each in started:
        each.close()


def get(url: urllib.parse.SplitResult, path: str = "") -> tuple[int, str]:
    """Status and text of a page."""
    connection = http.client.HTTPConnection(url.netloc, timeout=WAIT_S)
    try:
        connection.request("GET", path or urllib.parse.urlunsplit(url._replace(scheme="", netloc="")))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def data(url: urllib.parse.SplitResult, path: str) -> Any:
    status, text = get(url, path)
    assert status == 200, text
    return json.loads(text)["data"]


def is_closed(url: urllib.parse.SplitResult) -> bool:
    try:
        get(url, "/")
    except ConnectionError:
        return True
    return False


def run_of(observing: Observing) -> dict[str, Any]:
    """What the command says that it names, asked for JSON."""
    done = subprocess.run(
        [*shlex.split(observing.told("the run in a terminal")), "--json"],
        cwd=observing.directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    run: dict[str, Any] = json.loads(done.stdout)
    return run


@needs_torch
def test_somebody_looks_and_presses_ctrl_c(start: Start, prometheus: str) -> None:
    """All that it names is there: the run in a terminal and as a page, Prometheus with every rule at work. Then
    nothing is."""
    observing = start(programs={"prometheus": prometheus})
    observing.comes_to(CTRL_C)
    run = run_of(observing)
    page, server = observing.url("the run as a page"), observing.url("Prometheus")
    (target,) = data(server, "/api/v1/targets?state=active")["activeTargets"]
    rules = [rule for group in data(server, "/api/v1/rules")["groups"] for rule in group["rules"]]
    shipped = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    kill = shlex.split(observing.told("to kill a rank"))
    written = observing.written

    assert (run["status"], len(run["ranks"])) == ("running", 2)
    assert get(page)[0] == 200
    assert "<html" in get(page)[1]
    assert target["health"] == "up"
    assert target["scrapeUrl"] == f"http://{page.netloc}/metrics"
    assert (target["labels"]["run"], target["labels"]["name"]) == ("demo", "digits_ddp")
    assert sorted(rule["name"] for rule in rules) == sorted(rule.get("alert") or rule["record"] for rule in shipped)
    assert {rule["health"] for rule in rules} == {"ok"}
    assert f"({sum('alert' in rule for rule in shipped)} alerts, " in observing.told("alerts")
    assert get(observing.url("alerts"))[0] == 200
    assert get(observing.url("where the time goes"))[0] == 200
    assert "compose.yaml" in observing.told("Grafana")
    assert kill[1:] == ["chaos", "kill-rank", "1", "--job-dir", str(written / "run")]

    observing.ctrl_c()

    assert observing.ends() == 0, observing.text
    assert observing.text.endswith("\nending what was started\n")
    assert not written.exists()
    assert is_closed(page)
    assert is_closed(server)


@needs_torch
def test_the_run_ends_and_one_may_still_look(start: Start, prometheus: str, tmp_path: Path) -> None:
    """It says so, and stays: its figures and its files are there until Ctrl-C. Grafana (a stand-in) was told where
    Prometheus is."""
    stand_in, out = tmp_path / "stand-in", tmp_path / "told.json"
    stand_in.write_text(STAND_IN.format(python=sys.executable, out=str(out)))
    stand_in.chmod(0o755)
    observing = start("--nproc", "1", programs={"prometheus": prometheus, "grafana-server": str(stand_in)})
    observing.comes_to(CTRL_C)
    told = json.loads(out.read_text())
    page, server, grafana = (observing.url(label) for label in ("the run as a page", "Prometheus", "Grafana"))
    files = {name: yaml.safe_load(text) for name, text in told["files"].items()}
    (source,) = files["provisioning/datasources/gpulaunch.yaml"]["datasources"]
    (provider,) = files["provisioning/dashboards/gpulaunch.yaml"]["providers"]

    assert grafana.path == "/d/gpulaunch-overview"
    assert grafana.netloc == f"127.0.0.1:{told['env']['GF_SERVER_HTTP_PORT']}"
    assert (source["url"], source["jsonData"]["timeInterval"]) == (f"http://{server.netloc}", "5s")
    assert (Path(provider["options"]["path"]) / "gpulaunch-overview.json").exists()

    os.kill(json.loads((observing.written / "run/job.json").read_text())["gpulaunch_pid"], signal.SIGINT)
    observing.comes_to("the run has ended with ")

    assert is_closed(page)
    assert run_of(observing)["status"] != "running"
    assert data(server, "/api/v1/query?query=max_over_time(gpulaunch_steps_total[1h])")["result"]

    observing.ctrl_c()

    assert observing.ends() == 0, observing.text
    assert not observing.written.exists()
    assert is_closed(server)
    assert is_closed(grafana)


@needs_torch
def test_it_ends_by_itself_if_it_is_told_when(start: Start, prometheus: str) -> None:
    observing = start("--nproc", "1", "--for", "0", programs={"prometheus": prometheus})

    assert observing.ends() == 0, observing.text
    assert "digits_ddp.py on 1 rank, and a Prometheus" in observing.text
    assert CTRL_C in observing.text
    assert not observing.written.exists()


def test_ctrl_c_before_anything_is_there(start: Start, prometheus: str) -> None:
    observing = start(programs={"prometheus": prometheus})
    observing.comes_to("what they write is in ")
    observing.ctrl_c()

    assert observing.ends() == 0, observing.text
    assert "the run in a terminal" not in observing.text
    assert not observing.written.exists()


@needs_torch
def test_a_run_that_fails_says_why(start: Start, prometheus: str, tmp_path: Path) -> None:
    """Nobody waits for figures that will not come: scikit-learn is broken, on purpose."""
    (tmp_path / "broken/sklearn").mkdir(parents=True)
    (tmp_path / "broken/sklearn/__init__.py").write_text("raise ImportError('broken on purpose')")

    observing = start("--nproc", "1", programs={"prometheus": prometheus}, env={"PYTHONPATH": str(tmp_path / "broken")})

    assert observing.ends() == 1, observing.text
    assert re.search(r"^observe: run ended with \d+ before Prometheus had seen a step\.", observing.text, re.MULTILINE)
    assert "broken on purpose" in observing.text
    assert "Traceback" not in observing.text.partition("observe: ")[0]
    assert not observing.written.exists()


def test_without_prometheus_it_says_how_to_get_it(start: Start) -> None:
    """One line, before anything is started."""
    observing = start()

    assert observing.ends() == 2
    assert observing.text.startswith("observe: no prometheus on PATH")
    assert observing.text.count("\n") == 1
    for word in ("apt install prometheus", "prometheus.io", "gpulaunch top", "page"):
        assert word in observing.text


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_knows_it() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of a make around us
    done = subprocess.run(
        ["make", "-n", "observe", "RANKS=3"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("deploy/observe/observe.py --nproc 3")
