"""The compose file by the words of the Compose specification, and alertmanager.yml by Alertmanager's own tool.
That a misspelt key is found: nobody but Docker reads the file, and Docker is on no machine that tests it. What the file
means is in tests/grafana/test_compose.py.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from needed import program

DOCKER = Path(__file__).parents[2] / "deploy/docker"
COMPOSE = (DOCKER / "compose.yaml").read_text()
ALERTMANAGER = DOCKER / "alertmanager.yml"

# Keys that the specification (compose-spec.io) has, of each part that our file has. A key that begins with `x-` is
# everybody's own.
TOP = frozenset("name version services networks volumes configs secrets models include".split())
SERVICE = frozenset(
    """
    annotations attach blkio_config build cap_add cap_drop cgroup cgroup_parent command configs container_name cpu_count
    cpu_percent cpu_period cpu_quota cpu_rt_period cpu_rt_runtime cpu_shares cpus cpuset credential_spec depends_on
    deploy develop device_cgroup_rules devices dns dns_opt dns_search domainname entrypoint env_file environment expose
    extends external_links extra_hosts gpus group_add healthcheck hostname image init ipc isolation label_file labels
    links logging mac_address mem_limit mem_reservation mem_swappiness memswap_limit models network_mode networks
    oom_kill_disable oom_score_adj pid pids_limit platform ports post_start pre_stop privileged profiles provider
    pull_policy pull_refresh_after read_only restart runtime scale secrets security_opt shm_size stdin_open
    stop_grace_period stop_signal storage_opt sysctls tmpfs tty ulimits use_api_socket user userns_mode uts volumes
    volumes_from working_dir
    """.split()
)
BUILD = frozenset(
    """
    additional_contexts args cache_from cache_to context dockerfile dockerfile_inline entitlements extra_hosts isolation
    labels network no_cache platforms privileged pull secrets shm_size ssh tags target ulimits
    """.split()
)
HEALTHCHECK = frozenset("disable interval retries start_interval start_period test timeout".split())
DEPENDS_ON = frozenset("condition required restart".split())
CONDITIONS = frozenset("service_started service_healthy service_completed_successfully".split())
DEPLOY = frozenset(
    "endpoint_mode labels mode placement replicas resources restart_policy rollback_config update_config".split()
)
RESOURCES = frozenset("limits reservations".split())
LIMITS = frozenset("cpus memory pids".split())
RESERVATIONS = frozenset("cpus memory generic_resources devices".split())
DEVICE = frozenset("capabilities count device_ids driver options".split())
VOLUME = frozenset("driver driver_opts external labels name".split())
NETWORK = VOLUME | frozenset("attachable enable_ipv4 enable_ipv6 internal ipam".split())

DEVICES = "deploy.resources.reservations.devices"
DURATION = re.compile(r"(\d+(\.\d+)?(us|ms|s|m|h))+")
SIZE = re.compile(r"\d+(b|k|kb|m|mb|g|gb)")
FLAGS = ("attach", "init", "oom_kill_disable", "privileged", "read_only", "stdin_open", "tty")
LISTS = ("cap_add", "cap_drop", "ports", "profiles", "security_opt", "volumes")


def slips_of(text: str) -> list[str]:
    """What Docker would not understand, or not as it was meant."""
    document = yaml.safe_load(text)
    found = [f"{key} twice" for key in sorted(set(twice(yaml.compose(text))))]
    found += unknown(document, TOP, "")
    for name, service in document["services"].items():
        found += [f"services.{name}{slip}" for slip in slips_of_service(service, set(document["services"]))]
    for part, keys in (("volumes", VOLUME), ("networks", NETWORK)):
        for name, told in document.get(part, {}).items():
            found += unknown(told or {}, keys, f"{part}.{name}")
    return [slip.lstrip(".") for slip in found]


def slips_of_service(service: Mapping[str, Any], services: set[str]) -> Iterator[str]:
    yield from unknown(service, SERVICE, "")
    yield from unknown(service.get("build", {}), BUILD, ".build")
    check = service.get("healthcheck", {})
    yield from unknown(check, HEALTHCHECK, ".healthcheck")
    if "test" in check and check["test"][0] not in ("CMD", "CMD-SHELL", "NONE"):
        yield ".healthcheck.test: no kind of test"
    if not isinstance(check.get("retries", 1), int):
        yield ".healthcheck.retries: no number"
    for key in ("interval", "timeout", "start_period", "start_interval"):
        if key in check and DURATION.fullmatch(str(check[key])) is None:
            yield f".healthcheck.{key}: no time"
    if "stop_grace_period" in service and DURATION.fullmatch(str(service["stop_grace_period"])) is None:
        yield ".stop_grace_period: no time"
    if "shm_size" in service and SIZE.fullmatch(str(service["shm_size"])) is None:
        yield ".shm_size: no size"
    yield from (f".{key}: neither true nor false" for key in FLAGS if not isinstance(service.get(key, True), bool))
    yield from (f".{key}: no list" for key in LISTS if not isinstance(service.get(key, []), list))
    for name, how in service.get("depends_on", {}).items():
        yield from unknown(how, DEPENDS_ON, f".depends_on.{name}")
        if how.get("condition") not in CONDITIONS:
            yield f".depends_on.{name}: no condition {how.get('condition')}"
        if name not in services:
            yield f".depends_on: no service {name}"
    kind, _, named = service.get("network_mode", "bridge").partition(":")
    if kind not in ("bridge", "host", "none", "service", "container") or (kind == "service" and named not in services):
        yield f".network_mode: no {kind}:{named}"
    deploy = service.get("deploy", {})
    resources = deploy.get("resources", {})
    reservations = resources.get("reservations", {})
    yield from unknown(deploy, DEPLOY, ".deploy")
    yield from unknown(resources, RESOURCES, ".deploy.resources")
    yield from unknown(resources.get("limits", {}), LIMITS, ".deploy.resources.limits")
    yield from unknown(reservations, RESERVATIONS, ".deploy.resources.reservations")
    for device in reservations.get("devices", []):
        yield from unknown(device, DEVICE, f".{DEVICES}")
        if "capabilities" not in device:
            yield f".{DEVICES}: no capabilities"


def unknown(told: Mapping[str, Any], known: frozenset[str], where: str) -> list[str]:
    return [f"{where}.{key}: no such key" for key in told if key not in known and not key.startswith("x-")]


def twice(node: yaml.Node) -> Iterator[str]:
    """Keys that are in one mapping twice: of those, Docker takes none, and our reader the last."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        yield from (key for key in keys if keys.count(key) > 1)
        for _, value in node.value:
            yield from twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from twice(each)


def test_every_word_is_one_of_the_specification() -> None:
    assert slips_of(COMPOSE) == []


@pytest.mark.parametrize(
    ("right", "wrong", "slip"),
    [
        ("\nvolumes:\n  runs:", "\nvolume:\n  runs:", "volume: no such key"),
        ("  shm_size: 1gb", "  shm_sise: 1gb", "services.job.shm_sise: no such key"),
        ("  shm_size: 1gb", "  shm_size: a lot", "services.job.shm_size: no size"),
        ("    dockerfile:", "    docker_file:", "services.job.build.docker_file: no such key"),
        ("  stop_grace_period: 45s", "  stop_grace_period: 45", "services.job.stop_grace_period: no time"),
        ("    start_period:", "    start_time:", "services.job.healthcheck.start_time: no such key"),
        ("    interval: 10s", "    interval: 10 s", "services.job.healthcheck.interval: no time"),
        ('"CMD", "python"', '"CDM", "python"', "services.job.healthcheck.test: no kind of test"),
        (": service:prometheus", ": service:prom", "services.job.network_mode: no service:prom"),
        ("condition: service_healthy", "condition: well", "services.job.depends_on.prometheus: no condition well"),
        ("  init: true", "  init: maybe", "services.job.init: neither true nor false"),
        ("  init: true", "  init: true\n  init: true", "init twice"),
        ("- driver: nvidia", "- drivers: nvidia", f"services.job.{DEVICES}.drivers: no such key"),
        ("capabilities: [gpu, utility]", "options: {}", f"services.job.{DEVICES}: no capabilities"),
        ("  reservations:", "  reservation:", "services.job.deploy.resources.reservation: no such key"),
        ("  grafana:\n    image:", "  grafana:\n    picture:", "services.grafana.picture: no such key"),
        ("  alertmanager:\n  g", "  alertmanager: {drivers: x}\n  g", "volumes.alertmanager.drivers: no such key"),
    ],
)
def test_a_planted_slip_is_found(right: str, wrong: str, slip: str) -> None:
    """Nothing else is. What both jobs have in common is wrong in both."""
    assert right in COMPOSE

    found = slips_of(COMPOSE.replace(right, wrong, 1))

    assert {each.replace("services.job-gpu.", "services.job.") for each in found} == {slip}


# --- Alertmanager


@pytest.fixture(scope="session")
def amtool() -> str:
    """Alertmanager's own tool; Debian's package prometheus-alertmanager has it."""
    return program("amtool", package="prometheus-alertmanager")


def checked(amtool: str, file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([amtool, "check-config", file], capture_output=True, text=True, timeout=60)


def test_alertmanager_reads_what_it_is_given(amtool: str) -> None:
    told = checked(amtool, ALERTMANAGER)

    assert told.returncode == 0, told.stdout + told.stderr
    assert " - 1 receivers" in told.stdout


@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        ("  group_by:", "  group_bye:", "group_bye not found"),
        ("  - name: nobody", "  - name: somebody", "undefined receiver"),
    ],
)
def test_alertmanager_finds_a_planted_slip(amtool: str, right: str, wrong: str, why: str, tmp_path: Path) -> None:
    assert right in ALERTMANAGER.read_text()
    (tmp_path / "alertmanager.yml").write_text(ALERTMANAGER.read_text().replace(right, wrong))

    told = checked(amtool, tmp_path / "alertmanager.yml")

    assert told.returncode != 0
    assert why in told.stdout + told.stderr
