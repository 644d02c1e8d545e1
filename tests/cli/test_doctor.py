"""The doctor: every finding has a status, and for what is not right something to do. Fakes where we are well."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulaunch.launcher.cli import checks, collectors, doctor
from gpulaunch.launcher.cli.checks import Finding, Status
from gpulaunch.launcher.job.host_info import detect
from gpulaunch.profiler.record import Collector


def status(findings: Iterable[Finding]) -> dict[str, Status]:
    return {finding.name: finding.status for finding in findings}


def test_this_machine_gets_a_full_report(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.run(["--json"])
    report = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in report["checks"]]

    for name in ("python", "torch", "py-spy", "GPUs", "cores", "memory limit", "/dev/shm", "open files", "ptrace"):
        assert name in names
    for name in (*(f"collector {each.value}" for each in Collector), "probe backward", "probe copies", "traces"):
        assert name in names
    for name in ("run directory", "kernel", "clock", "metrics port", "master port", "localhost", "hostname"):
        assert name in names
    assert report["version"] == 1
    assert code == (1 if any(check["status"] == "fail" for check in report["checks"]) else 0)
    assert [check for check in report["checks"] if check["status"] != "ok" and not check["advice"]] == []


def test_it_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "hooks", lambda: ())  # the seconds that torch takes
    doctor.examine()

    assert list(tmp_path.iterdir()) == []


def test_advice_stands_below_its_finding() -> None:
    text = doctor.as_text(
        [
            Finding(name="a", status=Status.OK, value="fine"),
            Finding(name="bcd", status=Status.FAIL, value="bad", advice="do this"),
        ]
    )

    assert text.splitlines() == ["ok    a    fine", "fail  bcd  bad", "           -> do this", "1 ok, 0 warn, 1 fail"]


def test_exit_1_only_for_a_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for given, code in ((Status.OK, 0), (Status.WARN, 0), (Status.FAIL, 1)):
        finding = Finding(name="x", status=given, value="")
        monkeypatch.setattr(doctor, "examine", lambda finding=finding: [finding])
        assert doctor.run([]) == code


def test_a_check_that_breaks_is_a_finding_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterable[Finding]:
        raise OSError("strange machine")

    def fine() -> Iterable[Finding]:
        yield Finding(name="fine", status=Status.OK, value="")

    monkeypatch.setattr(doctor, "checks", lambda environ, host: {"odd": broken, "fine": fine})
    monkeypatch.setattr(doctor, "hooks", lambda: ())

    found = status(doctor.examine())

    assert (found["odd"], found["fine"], found["collector host"]) == (Status.WARN, Status.OK, Status.OK)


def test_versions_come_from_metadata_and_a_missing_torch_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(status(checks.versions()).values()) == {Status.OK}

    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    found = status(checks.versions())

    assert (found["python"], found["torch"], found["py-spy"]) == (Status.OK, Status.FAIL, Status.WARN)


@pytest.mark.parametrize(
    ("version", "status", "told"),
    [
        ("2.13.0+cpu", Status.OK, "2.13.0+cpu (one of those tested: 2.6, "),
        ("2.99.1", Status.OK, "2.99.1 (not one of those tested: 2.6, "),
        ("2.16.0a0+git1", Status.OK, "not one of those tested"),
        ("2.5.1", Status.FAIL, "not one of those tested"),
        ("custom", Status.OK, "custom (not"),
    ],
)
def test_torch_is_told_with_the_versions_that_are_tested(
    monkeypatch: pytest.MonkeyPatch, version: str, status: Status, told: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: version)

    (found,) = [each for each in checks.versions() if each.name == "torch"]

    assert found.status is status
    assert told in found.value
    assert all(each in found.value for each in checks.TESTED_TORCH)
    assert ("2.6 or newer" in found.advice) == (status is Status.FAIL)


def test_the_pinned_torch_is_one_of_those_tested() -> None:
    pin = (Path(__file__).parents[2] / "constraints.txt").read_text()

    assert ".".join(pin.partition("==")[2].split(".")[:2]) in checks.TESTED_TORCH


def test_the_entry_point_of_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(name="gpulaunch", value="gpulaunch.profiler.probe.inject:arm")
    for installed, environ, expected in (
        ([entry], {}, Status.OK),
        ([entry], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, Status.WARN),
        ([], {}, Status.WARN),
    ):
        monkeypatch.setattr(metadata, "entry_points", lambda group, installed=installed: installed)
        assert status(checks.entry_point(environ)) == {"torch.backends entry": expected}


def test_gpus_and_limits_are_the_hosts() -> None:
    import dataclasses

    host = dataclasses.replace(detect({}), gpus=(), gpus_why="no NVIDIA driver", memory_limit_bytes=1 << 30)

    assert [finding.value for finding in checks.gpus(host)] == ["none: no NVIDIA driver; ranks run on CPU with gloo"]
    assert status(checks.cores_and_memory(host)) == {"cores": Status.OK, "memory limit": Status.WARN}


@pytest.mark.parametrize(
    ("size_mib", "free_mib", "writable", "expected"),
    [
        (24000, 20000, True, Status.OK),
        (64, 64, True, Status.WARN),
        (64, 1, True, Status.FAIL),
        (24000, 20000, False, Status.FAIL),
    ],
)
def test_shared_memory(
    monkeypatch: pytest.MonkeyPatch, size_mib: int, free_mib: int, writable: bool, expected: Status
) -> None:
    stat = SimpleNamespace(f_frsize=1 << 20, f_blocks=size_mib, f_bavail=free_mib)
    monkeypatch.setattr(os, "statvfs", lambda path: stat)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)

    assert status(checks.shared_memory()) == {"/dev/shm": expected}


def test_no_shared_memory_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "statvfs", missing)

    assert status(checks.shared_memory()) == {"/dev/shm": Status.FAIL}


@pytest.mark.parametrize(
    ("soft", "expected"), [(256, Status.FAIL), (1024, Status.WARN), (65536, Status.OK), (-1, Status.OK)]
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, expected: Status) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, -1))

    assert status(checks.limits())["open files"] == expected


def fake_proc(tmp_path: Path, *, scope: str | None, capabilities: int, seccomp: int = 0) -> str:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\nSeccomp:\t{seccomp}\n")
    if scope is not None:
        (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text(scope + "\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("scope", "capabilities", "seccomp", "expected"),
    [
        (None, 0, 0, Status.OK),
        ("0", 0, 0, Status.OK),
        ("1", 0, 0, Status.OK),  # ranks and their workers permit it
        ("1", 1 << 19, 0, Status.OK),
        ("2", 1 << 18, 0, Status.WARN),
        ("3", 1 << 19, 0, Status.WARN),
        ("0", 0, 2, Status.WARN),
        ("0", 1 << 19, 2, Status.OK),
    ],
)
def test_who_may_read_stacks(
    tmp_path: Path, scope: str | None, capabilities: int, seccomp: int, expected: Status
) -> None:
    root = fake_proc(tmp_path, scope=scope, capabilities=capabilities, seccomp=seccomp)

    assert status(checks.tracing(root)) == {"ptrace": expected}


@pytest.mark.parametrize(("source", "expected"), [("tsc", Status.OK), ("hpet", Status.WARN), (None, Status.OK)])
def test_clock_sources(tmp_path: Path, source: str | None, expected: Status) -> None:
    directory = tmp_path / "sys/devices/system/clocksource/clocksource0"
    directory.mkdir(parents=True)
    if source:
        (directory / "current_clocksource").write_text(source + "\n")

    assert status(checks.clock(str(tmp_path))) == {"clock": expected}


def test_a_kernel_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    assert status(checks.kernel()) == {"kernel": Status.OK}

    def missing(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    (finding,) = checks.kernel()

    assert finding.status is Status.FAIL
    assert "pidfd_open (Function not implemented)" in finding.value


def test_taken_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        free = unused.getsockname()[1]
        unused.close()
        monkeypatch.setattr(checks, "METRICS_PORT_BASE", taken.getsockname()[1])
        monkeypatch.setattr(checks, "STATIC_MASTER_PORT", free)

        assert status(checks.ports()) == {"metrics port": Status.WARN, "master port": Status.OK}


def test_an_unwritable_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import tempfile

    monkeypatch.chdir(tmp_path)
    assert [finding.name for finding in checks.run_directory()] == ["run directory"]

    def refuse(**kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    (finding,) = checks.run_directory()

    assert (finding.status, "--job-dir" in finding.advice) == (Status.WARN, True)


# -- names


Answers = dict[str, list[str]]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], None]:
    def install(answers: Answers) -> None:
        def getaddrinfo(name: str, port: None) -> list[tuple[object, ...]]:
            if not answers.get(name):
                raise socket.gaierror(-2, "Name or service not known")
            return [(0, 0, 0, "", (address, 0)) for address in answers[name]]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return install


@pytest.mark.parametrize(
    ("localhost", "hostname", "expected"),
    [
        (["127.0.0.1", "::1"], ["10.0.0.1"], [Status.OK, Status.OK]),
        (["10.0.0.9"], ["10.0.0.1"], [Status.FAIL, Status.OK]),
        ([], [], [Status.FAIL, Status.WARN]),
    ],
)
def test_names(
    dns: Callable[[Answers], None], localhost: list[str], hostname: list[str], expected: list[Status]
) -> None:
    dns({"localhost": localhost, os.uname().nodename: hostname})

    assert [finding.status for finding in checks.names()] == expected


def test_a_resolver_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    answer = threading.Event()
    asked: list[str] = []

    def hang(name: str, port: None) -> list[object]:
        asked.append(name)
        answer.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    addresses, _ = checks.resolve("far.example", timeout_s=0.01)
    still_asking = [thread for thread in threading.enumerate() if thread.name == "resolve"]
    answer.set()
    for thread in still_asking:
        thread.join(60)

    assert (addresses, asked, len(still_asking)) == ([], ["far.example"], 1)


# -- the profiler


def test_every_file_that_samples_is_behind_a_collector_that_is_named() -> None:
    """A new sampler that the sidecar does not know as a collector would have no line here, and no metric either."""
    from gpulaunch.profiler.daemon import sidecar

    room = Path(sidecar.__file__).parents[1] / "samplers"
    samplers = {
        path.stem for path in room.rglob("*.py") if re.search(r"def read\(self, now: float\)", path.read_text())
    }
    known = {
        "ranks",
        "process",
        "host",
        "run",
        "health",
        "gpus",
        "workers",
        "collectives",
        "stacks",
        "timeout_guard",
    }

    assert samplers == known
    # health is `gpu`, gpus is `device`, timeout_guard is a way to read; two collectors are no samplers.
    assert len(Collector) == len(known) - 1 + len({Collector.FINDINGS, Collector.LEDGER, Collector.STORE})


def test_what_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpulaunch.profiler.samplers.host import HostSampler

    def broken(self: object, now: float) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(HostSampler, "read", broken)
    (found,) = [each for each in collectors.collectors() if each.name == "collector host"]

    assert (found.status, found.value) == (Status.WARN, "Permission denied")


@pytest.mark.torch
def test_a_part_of_the_probe_that_finds_no_place_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that looks different: what is known of it is in service, and the rest is named."""
    rank = "import torch.optim.optimizer as o\ndel o.register_optimizer_step_pre_hook\n"
    program = collectors.RANK_PROGRAM.replace("import torch\n", f"import torch\n{rank}")
    monkeypatch.setattr(collectors, "RANK_PROGRAM", program)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # so that it is armed after that
    found = {each.name: each for each in collectors.hooks()}

    assert found["probe optimizer"].status is Status.WARN
    assert "register_optimizer_step_pre_hook" in found["probe optimizer"].value
    assert found["probe backward"].value == "available"


def test_a_process_that_the_probe_does_not_get_into_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectors, "RANK_PROGRAM", "raise SystemExit('torch is broken here')")

    (found,) = collectors.hooks()
    assert (found.name, found.status) == ("probe", Status.WARN)
    assert "torch is broken here" in found.value
    monkeypatch.setattr(collectors, "RANK_PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr(collectors, "IMPORT_TIMEOUT_S", 0.5)
    (found,) = collectors.hooks()
    assert found.value == "torch was not imported within 0.5 s"
