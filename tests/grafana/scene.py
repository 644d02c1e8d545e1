"""A Prometheus that scrapes what the tests start, and is asked what Grafana would ask it. Not a test module."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exprs import Query, queries

WAIT_S = 240.0
EVERY_S = 0.2
SCRAPE_S = 4
WINDOW_S = 20
"""What Grafana takes for $__rate_interval at this pace: four scrapes, and one more."""
RANGE_S = 60
NO_LABEL = {"host_memory", "parent"}
"""Labels that may be empty: Prometheus takes them away, and Grafana puts nothing in their place."""
LABEL = re.compile(r"\{\{(\w+)\}\}")
MANY = str(Path(__file__).with_name("many_ranks.py"))
RULES = Path(__file__).parents[2] / "deploy/prometheus/gpulaunch.rules.yml"
SIDECAR = str(Path(__file__).with_name("sidecar_with_gpus.py"))
Series = tuple[Mapping[str, str], list[float]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a query gave: its series, and the last value of each."""

    series: tuple[Series, ...] = ()

    @property
    def last(self) -> list[float]:
        return [values[-1] for _, values in self.series]

    def of(self, **labels: str) -> float:
        """The last value of the one series with these labels."""
        (value,) = self.all_of(**labels)
        return value

    def all_of(self, **labels: str) -> list[float]:
        """The last value of each series with these labels."""
        return [values[-1] for there, values in self.series if labels.items() <= there.items()]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A run as somebody would choose it at the top of a dashboard."""

    run: str
    node: str
    rank: str = ".*"

    def into(self, expr: str) -> str:
        """Put these in the places of the variables, as Grafana does."""
        for name, value in (
            ("$__rate_interval", f"{WINDOW_S}s"),
            ("$__range", f"{RANGE_S}s"),
            ("$run", self.run),
            ("$node", self.node),
            ("$rank", self.rank),
        ):
            expr = expr.replace(name, value)
        assert "$" not in expr, expr
        return expr


class Prometheus:
    """A server of this test's own."""

    def __init__(self, directory: Path, groups: list[dict[str, Any]]) -> None:
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None
        config = {
            "global": {
                "scrape_interval": f"{SCRAPE_S}s",
                "scrape_timeout": f"{SCRAPE_S}s",
                "evaluation_interval": f"{SCRAPE_S}s",
            },
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "gpulaunch", "static_configs": groups}],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML

    def start(self, binary: str) -> None:
        """It chooses its port, and says so in its log."""
        log = self.directory / "log"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={self.directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self.directory / 'tsdb'}",
                    "--web.listen-address=127.0.0.1:0",
                    "--log.format=json",
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

        def listens() -> str:
            assert self.process is not None
            assert self.process.poll() is None, log.read_text()
            found = re.search(r'"address":"(127\.0\.0\.1:[1-9]\d*)"', log.read_text())
            return found[1] if found else ""

        self.url = f"http://{until(listens, 'it says where it listens')}"
        until(lambda: self.get("/-/ready") is not None, "it is ready")

    def get(self, path: str, **parameters: str | float) -> Any:
        """Ask its API; None if it cannot be asked yet."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                return None
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        except OSError:
            return None
        return json.loads(text)["data"] if text.startswith("{") else text

    def instant(self, expr: str, at_s: float | None = None) -> Answer:
        """As a panel that shows one number or a table."""
        data = self.get("/api/v1/query", query=expr, time=time.time() if at_s is None else at_s)
        if data["resultType"] == "scalar":
            return Answer(series=(({}, [float(data["result"][1])]),))
        return Answer(series=tuple((each["metric"], [float(each["value"][1])]) for each in data["result"]))

    def over_time(self, expr: str, at_s: float, *, back_s: float = SCRAPE_S, step_s: float = SCRAPE_S) -> Answer:
        """As a panel that draws lines: of this time, and of one scrape before."""
        data = self.get("/api/v1/query_range", query=expr, start=at_s - back_s, end=at_s, step=step_s)
        return Answer(
            series=tuple((each["metric"], [float(value) for _, value in each["values"]]) for each in data["result"])
        )

    def stop(self) -> None:
        """End it, by its pid."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class ManyRanks:
    """The made-up node: its helper, its sidecar with the stand-in for a driver."""

    def __init__(self, directory: Path, count: int, gpus: int, listener: Any) -> None:
        argv = [sys.executable, "-P", MANY, str(directory), str(count)]
        self.helper = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        own = ("--channel-dir", str(directory), "--listen-fd", str(listener.fileno()), "--interval", "1")
        self.sidecar = subprocess.Popen(
            [sys.executable, "-P", SIDECAR, str(gpus), *own, "--parent-pid", str(os.getpid())],
            pass_fds=[listener.fileno()],
        )

    def ready(self) -> None:
        """Wait for all ranks to be there."""
        self._heard()

    def tell(self, order: str) -> None:
        """One of the orders that the helper knows."""
        assert self.helper.stdin is not None
        self.helper.stdin.write(f"{order}\n")
        self.helper.stdin.flush()
        self._heard()

    def _heard(self) -> None:
        assert self.helper.stdout is not None
        assert self.helper.stdout.readline() == "ok\n"

    def stop(self) -> None:
        self.sidecar.kill()
        self.sidecar.wait()
        with self.helper:
            assert self.helper.stdin is not None
            self.helper.stdin.close()


@dataclass
class Album:
    """What every panel showed of one run at one moment."""

    answers: dict[Query, Answer] = field(default_factory=dict)

    def panel(self, dashboard: str, panel: str, legend: str | None = None) -> Answer:
        """The answer of one query of a panel."""
        found = [
            answer
            for query, answer in self.answers.items()
            if (query.dashboard, query.panel) == (dashboard, panel) and legend in (None, query.legend)
        ]
        assert len(found) == 1, f"{len(found)} queries are {dashboard} / {panel} / {legend}"
        return found[0]


def photograph(prometheus: Prometheus, target: Target, at_s: float) -> Album:
    """Ask for everything that the dashboards showed of a run at one time."""
    album = Album()
    for query in queries():
        expr = target.into(query.expr)
        album.answers[query] = prometheus.instant(expr, at_s) if query.instant else prometheus.over_time(expr, at_s)
    return album


def wrong_with(query: Query, answer: Answer) -> list[str]:
    """What a panel could not show, or could not name."""
    found: list[str] = []
    named = {*LABEL.findall(query.legend), *(column for column in query.columns if column != "Value")}
    for labels, values in answer.series:
        found += [f"no label {label} in {labels}" for label in named - labels.keys() - NO_LABEL]
        found += [f"{labels} is {value}" for value in values if not math.isfinite(value)][:1]
        if min(values) < 0 and not query.signed:
            found.append(f"{labels} is below zero: {min(values)}")
    names = [tuple(labels.get(label) for label in sorted(named)) for labels, _ in answer.series]
    if not query.table and len(set(names)) != len(names):
        found.append(f"two lines have one name: {query.legend}")
    return found


def until(condition: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
    """Wait until something holds, and give it; it may take so long and no longer."""
    ends_s = time.monotonic() + wait_s
    while not (holds := condition()):
        assert time.monotonic() < ends_s, f"waited {wait_s:.0f} s in vain until {what}"
        time.sleep(EVERY_S)
    return holds
