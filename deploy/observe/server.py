"""A Prometheus with the shipped rules, in a directory of its own, that hears of runs by the files they announce."""

from __future__ import annotations

import http.client
import json
import re
import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

SCRAPE_S: Final = 5
"""Faster than the 15 s of deploy/prometheus/prometheus.yml: somebody is looking."""

_SHIPPED: Final = Path(__file__).resolve().parents[1] / "prometheus"
_TARGETS: Final = "targets"
_STEPS: Final = "gpulaunch_steps_total > 0"
_PHASES: Final = "gpulaunch:run_phase:ratio5m"
_CLASSIC: Final = "/classic"
_ANSWER_S: Final = 5.0
# Its log says which port it has taken, in 2.42 as in 3.x.
_LISTENS: Final = re.compile(r'"address":"(127\.0\.0\.1:[1-9]\d*)"')


class Rules(NamedTuple):
    """How many of them are computed."""

    alerts: int
    recorded: int


def configure(directory: Path) -> Path:
    """Write its files; give the directory in which runs announce themselves."""
    targets = directory / _TARGETS
    targets.mkdir()
    shipped = sorted(_SHIPPED.glob("*.rules.yml"))
    for each in shipped:
        shutil.copyfile(each, directory / each.name)
    announced = {"files": [f"{_TARGETS}/*.json"], "refresh_interval": f"{SCRAPE_S}s"}
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [each.name for each in shipped],
        "scrape_configs": [{"job_name": "gpulaunch", "file_sd_configs": [announced]}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config, indent=2))  # JSON is YAML
    return targets


def command(binary: str) -> list[str]:
    """Give what it is started with, in that directory. It takes a free port of the loopback."""
    return [
        binary,
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=prometheus",
        "--web.listen-address=127.0.0.1:0",
        "--log.format=json",
    ]


def address(said: str) -> str | None:
    """Where it serves, once it has said so and is ready."""
    found = _LISTENS.search(said)
    return found[1] if found and get(found[1], "/-/ready") is not None else None


def stepping(at: str) -> str | None:
    """The address of a run of which it knows that it makes steps."""
    known = _ask(at, f"/api/v1/query?{urlencode({'query': _STEPS})}")
    return str(known["result"][0]["metric"]["instance"]) if known and known["result"] else None


def rules(at: str) -> Rules | None:
    """What it computes, once it has computed each rule without a fault."""
    known = _ask(at, "/api/v1/rules")
    all_of_them = [rule for group in known["groups"] for rule in group["rules"]] if known else []
    if not all_of_them or any(rule["health"] != "ok" for rule in all_of_them):
        return None
    alerts = sum(rule["type"] == "alerting" for rule in all_of_them)
    return Rules(alerts, len(all_of_them) - alerts)


def version(at: str) -> str:
    """Which one it is."""
    known = _ask(at, "/api/v1/status/buildinfo")
    return str(known["version"]) if known else "of a version that it does not tell"


def alerts(at: str) -> str:
    """The address of the page of alerts."""
    return f"http://{at}{_root(at)}/alerts"


def graph(at: str) -> str:
    """The address of a graph of the phases over time."""
    return f"http://{at}{_root(at)}/graph?{urlencode({'g0.expr': _PHASES, 'g0.tab': 0, 'g0.range_input': '10m'})}"


def get(at: str, path: str) -> bytes | None:
    """Ask a server of this machine (and no proxy); None if it does not answer, or not with 200."""
    connection = http.client.HTTPConnection(at, timeout=_ANSWER_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == http.client.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _ask(at: str, path: str) -> Any:
    answer = get(at, path)
    return None if answer is None else json.loads(answer)["data"]


def _root(at: str) -> str:
    """Where its pages are: Debian's package has the former ones only, and those elsewhere."""
    return _CLASSIC if get(at, "/alerts") is None and get(at, f"{_CLASSIC}/alerts") is not None else ""
