"""The compose file and its Dockerfile, as far as they can be judged without Docker: read, and held against this tree.

Where `docker compose` is there, it reads the file, too: then there are two tests more. No image was ever pulled, and no
container started, by a test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from needed import program

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"
COMPOSE = DOCKER / "compose.yaml"
FILE: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
JOBS = ("job", "job-gpu")
WATCHERS = ("prometheus", "alertmanager", "grafana")
LOOPBACK = re.compile(r"127\.0\.0\.1:(?P<outside>\d+):(?P<inside>\d+)")
PINNED = re.compile(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+")
each_service = pytest.mark.parametrize("name", SERVICES)


def mounts(service: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, where, how) of its volumes."""
    return [(*each.split(":"), "")[:3] for each in service.get("volumes", ())]


def published(services: dict[str, dict[str, Any]]) -> list[str]:
    return [port for service in services.values() for port in service.get("ports", ())]


def faults_of(services: dict[str, dict[str, Any]]) -> list[str]:
    """What would let somebody in, or break in half a year."""
    found = [f"{port} is not on the loopback" for port in published(services) if LOOPBACK.fullmatch(port) is None]
    outside = [port.rpartition(":")[0] for port in published(services)]
    found += [f"{port} twice" for port in sorted({port for port in outside if outside.count(port) > 1})]
    for name, service in services.items():
        if "image" in service and PINNED.fullmatch(service["image"]) is None:
            found.append(f"{name}: {service['image']} is not pinned")
        if "healthcheck" not in service:
            found.append(f"{name} has no health check")
        for what, _, how in mounts(service):
            if what.startswith(".") and how != "ro":
                found.append(f"{name} can write {what}")
            if what.startswith(".") and not (DOCKER / what).exists():
                found.append(f"{name}: no {what}")
        found += [f"{name} is {key}" for key in ("privileged", "cap_add", "pid", "ipc") if service.get(key)]
    return found


def test_there_is_a_job_and_what_watches_it() -> None:
    assert SERVICES.keys() == {*JOBS, *WATCHERS}


def test_nothing_is_open_unpinned_or_missing() -> None:
    assert faults_of(SERVICES) == []


@pytest.mark.parametrize(
    ("service", "fault"),
    [
        ({"image": "a/b:v1.2.3", "healthcheck": {}, "ports": ["3000:3000"]}, "3000:3000 is not on the loopback"),
        ({"image": "a/b:v1.2.3", "healthcheck": {}, "ports": ["127.0.0.1:1:1", "127.0.0.1:1:2"]}, "127.0.0.1:1 twice"),
        ({"image": "a/b:latest", "healthcheck": {}}, "it: a/b:latest is not pinned"),
        ({"image": "a/b:v1.2.3"}, "it has no health check"),
        ({"healthcheck": {}, "volumes": ["../grafana:/etc"]}, "it can write ../grafana"),
        ({"healthcheck": {}, "volumes": ["./nothing.yml:/etc:ro"]}, "it: no ./nothing.yml"),
        ({"healthcheck": {}, "privileged": True}, "it is privileged"),
    ],
)
def test_what_is_wrong_would_be_found(service: dict[str, Any], fault: str) -> None:
    assert faults_of({"it": service}) == [fault]


def test_all_are_in_the_one_namespace_whose_ports_are_published() -> None:
    """So that 127.0.0.1 in prometheus.yml and in Grafana's data source means the same as without containers."""
    with_ports = [name for name, service in SERVICES.items() if "ports" in service]

    assert with_ports == ["prometheus"]
    assert {SERVICES[name]["network_mode"] for name in SERVICES.keys() - {"prometheus"}} == {"service:prometheus"}


def test_each_is_where_the_others_look_for_it() -> None:
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/gpulaunch.yaml").read_text())
    scrapes = (DOCKER / "prometheus.yml").read_text()
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/gpulaunch.yaml").read_text())

    assert source["datasources"][0]["url"] == "http://127.0.0.1:9090"
    assert "--web.listen-address=0.0.0.0:9090" in SERVICES["prometheus"]["command"]
    for name in JOBS:
        address = SERVICES[name]["command"][SERVICES[name]["command"].index("--metrics-addr") + 1]
        assert f'"{address}"' in scrapes
        assert f"http://{address}/healthz" in SERVICES[name]["healthcheck"]["test"][-1]
    path = provider["providers"][0]["options"]["path"]
    assert path in [where for _, where, _ in mounts(SERVICES["grafana"])]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "deploy/grafana/dashboards" / Path(home).name).exists()
    assert str(Path(home).parent) == path


def test_what_prometheus_is_told_to_read_is_mounted(tmp_path: Path) -> None:
    """Put where the container has them, its configuration and the rules are read by Prometheus's own tool."""
    told = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    files = {Path(where).name: DOCKER / what for what, where, _ in mounts(SERVICES["prometheus"]) if what[0] == "."}
    for name, file in files.items():
        (tmp_path / name).write_bytes(file.read_bytes())

    assert set(told["rule_files"]) < files.keys()
    assert told["alerting"]["alertmanagers"] == [{"static_configs": [{"targets": ["127.0.0.1:9093"]}]}]
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]
    argv = [program("promtool", package="prometheus"), "check", "config", tmp_path / "prometheus.yml"]
    checked = subprocess.run(argv, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_volumes_are_declared_and_used() -> None:
    named = {what for service in SERVICES.values() for what, _, _ in mounts(service) if not what.startswith(".")}

    assert FILE["volumes"].keys() == named


def test_the_job_is_chosen_by_a_profile_and_gets_gpus_by_one() -> None:
    assert [SERVICES[name]["profiles"] for name in JOBS] == [["cpu"], ["gpu"]]
    assert "deploy" not in SERVICES["job"]
    (device,) = SERVICES["job-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", "all")
    assert "gpu" in device["capabilities"]
    for name in JOBS:
        (script,) = [argument for argument in SERVICES[name]["command"] if argument.endswith(".py")]
        assert (ROOT / script).exists()


def test_grafana_has_no_password_that_everybody_knows() -> None:
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_ADMIN_PASSWORD:?")
    assert SERVICES["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_the_alertmanager_has_a_receiver_for_its_route() -> None:
    config = yaml.safe_load((DOCKER / "alertmanager.yml").read_text())

    assert config["route"]["receiver"] in [receiver["name"] for receiver in config["receivers"]]


def test_the_dockerfile_copies_what_there_is_and_does_not_end_as_root() -> None:
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    copied = [
        source
        for line in lines
        if line.startswith("COPY ")
        for source in [word for word in line.split()[1:-1] if not word.startswith("--")]
    ]
    users = [line.split()[1] for line in lines if line.startswith("USER ")]

    assert re.fullmatch(r"ARG PYTHON_IMAGE=python:3\.\d+-slim-bookworm", lines[0])
    assert lines[1] == "FROM ${PYTHON_IMAGE}"
    assert {"launcher", "profiler", "exporters"} <= set(copied)
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert users[-1] not in ("root", "0")
    assert [line for line in lines if "--privileged" in line or "ADD " in line] == []
    assert json.loads(next(line for line in lines if line.startswith("ENTRYPOINT")).removeprefix("ENTRYPOINT ")) == [
        "gpulaunch"
    ]


def has_compose() -> bool:
    docker = shutil.which("docker")
    return docker is not None and not subprocess.run([docker, "compose", "version"], capture_output=True).returncode


if has_compose():  # where it is not, what can be told without it has been told above

    @pytest.mark.parametrize("profile", ["cpu", "gpu"])
    def test_docker_compose_reads_it(profile: str) -> None:
        read = subprocess.run(
            ["docker", "compose", "--file", str(COMPOSE), "--profile", profile, "config", "--quiet"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "GRAFANA_ADMIN_PASSWORD": "of a test"},
        )

        assert read.returncode == 0, read.stderr
