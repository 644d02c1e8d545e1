"""The sidecar as the agent runs it: a real process beside toy ranks, killed, restarted, orphaned, starved."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gpulaunch.profiler.channel import segment_writer

WAIT_S = 30.0
PYTHON = (sys.executable, "-P")
SIDECAR = (*PYTHON, "-m", "gpulaunch.launcher.cli.sidecar")
# One for which a directory is on a file system that hangs as long as there is a file `<it>-hangs`: open() and unlink()
# do not come back from there.
HUNG = """
import os, sys, time
directory = sys.argv.pop(1)
def hanging(real):
    def hung(path, *args, **kwargs):
        while os.fspath(path).startswith(directory + "/") and os.path.exists(directory + "-hangs"):
            time.sleep(0.01)
        return real(path, *args, **kwargs)
    return hung
os.open, os.unlink = hanging(os.open), hanging(os.unlink)
from gpulaunch.launcher.cli import sidecar
raise SystemExit(sidecar.run(sys.argv[1:]))
"""
TOY = str(Path(__file__).with_name("toy_rank.py"))


class Rank:
    """A toy rank that does what it is told."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [*PYTHON, TOY, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.heard()

    def heard(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ok\n"

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        self.heard()

    def kill(self) -> None:
        with self.process:
            self.process.kill()


class Node:
    """The agent's part: pages, the group, the metrics socket, and the sidecar."""

    def __init__(self, directory: Path, listener: socket.socket) -> None:
        self.directory = directory
        self.run_dir = directory
        self.listener = listener
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.ranks: list[Rank] = []
        self.sidecars: list[subprocess.Popen[bytes]] = []

    def attempt(self, number: int, ranks: int = 1, *, armed: bool = True) -> None:
        while self.ranks:
            self.ranks.pop().kill()
        for rank in range(ranks):
            path = self.directory / f"rank-{rank}.bin"
            segment_writer.create(str(path), rank=rank, local_rank=rank, attempt=number)
            if armed:
                self.ranks.append(Rank(path))
        pids = [rank.process.pid for rank in self.ranks] or [os.getpid()] * ranks
        places = [{"rank": rank, "local_rank": rank, "pid": pid} for rank, pid in enumerate(pids)]
        group = {"version": 1, "run_id": "0123456789abcdef", "name": "toy", "attempt": number, "ranks": places}
        draft = self.directory / "group.new"
        draft.write_text(json.dumps({**group, "world_size": ranks, "node_rank": 0, "run_dir": str(self.run_dir)}))
        draft.rename(self.directory / "group.json")

    def account(self, **more: object) -> None:
        """What the agent says of the run."""
        account = {
            "version": 1,
            "restarts": {},
            "goodput_seconds": {},
            "hang_suspicions": 0,
            "hangs": 0,
            "preempted": 0,
        }
        draft = self.directory / "run.new"
        draft.write_text(json.dumps({**account, **more}))
        draft.rename(self.directory / "run.json")

    def start_sidecar(
        self, *command: str, interval_s: float = 0.02, parent_pid: int | None = None
    ) -> subprocess.Popen[bytes]:
        sidecar = subprocess.Popen(
            [
                *(command or SIDECAR),
                *("--channel-dir", str(self.directory)),
                *("--listen-fd", str(self.listener.fileno())),
                *("--parent-pid", str(parent_pid or os.getpid())),
                *("--interval", str(interval_s)),
            ],
            pass_fds=[self.listener.fileno()],
            stderr=subprocess.PIPE,
        )
        self.sidecars.append(sidecar)
        return sidecar

    def samples(self) -> list[Sample]:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            text = response.read().decode()
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float | None:
        return total(self.samples(), name, **labels)

    def wait_for(self, expected: float | None, name: str, **labels: str) -> list[Sample]:
        """Scrape until the metric has this value; every scrape is a real one."""
        deadline = time.monotonic() + WAIT_S
        while total(samples := self.samples(), name, **labels) != expected:
            assert time.monotonic() < deadline, f"{name} {labels}: {total(samples, name, **labels)}, not {expected}"
            time.sleep(0.01)
        return samples

    def wait_until(self, at_least: float, name: str, **labels: str) -> list[Sample]:
        """Scrape until the metric is at least that."""
        deadline = time.monotonic() + WAIT_S
        while (total(samples := self.samples(), name, **labels) or 0.0) < at_least:
            assert time.monotonic() < deadline, f"{name} {labels} stays below {at_least}"
            time.sleep(0.01)
        return samples

    def close(self) -> None:
        for sidecar in self.sidecars:
            with sidecar:
                sidecar.kill()
        while self.ranks:
            self.ranks.pop().kill()


def total(samples: list[Sample], name: str, **labels: str) -> float | None:
    """The sum of all samples of that name and those labels; None if there is none."""
    found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
    return sum(found) if found else None


def begin_anew() -> tuple[str, ...]:
    """How the names begin of which docs/metrics.md says that they do, with every sidecar."""
    said = (Path(__file__).parents[2] / "docs/metrics.md").read_text().partition("\n|")[0]
    return tuple(re.findall(r"`(gpulaunch_\w+_)`", said))


def counters(samples: list[Sample]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Everything that must not fall, whoever measures it: of the ranks, of the run and of the node."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for sample in samples
        if sample.name.endswith(("_total", "_bucket", "_count", "_sum")) and not sample.name.startswith(begin_anew())
    }


def failing(samples: list[Sample]) -> list[str]:
    """The collectors that do not deliver, though this node has what they read; whether it has a GPU is left open."""
    out = [s.labels["collector"] for s in samples if s.name == "gpulaunch_collector_available" and not s.value]
    return [collector for collector in out if collector not in ("gpu", "device")]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.closing(Node(tmp_path, listener)) as node:
        yield node


def test_a_node_is_measured_from_the_first_attempt_to_a_restart(node: Node) -> None:
    """Steps, workers, their CPU time after they are gone, and totals that go on in the next attempt."""
    node.start_sidecar()
    assert node.value("gpulaunch_attempt") is None

    node.attempt(0, ranks=2)
    node.ranks[0].tell("step 5")
    samples = node.wait_for(5, "gpulaunch_steps_total", rank="0")
    assert total(samples, "gpulaunch_steps_total", rank="1") == 0
    assert total(samples, "gpulaunch_samples_total", rank="0") == 160
    assert total(samples, "gpulaunch_phase_seconds_total", rank="0") == pytest.approx(0.05)
    assert total(samples, "gpulaunch_step_duration_seconds_count", rank="0") == 5
    assert total(samples, "gpulaunch_rank_info", pid=str(node.ranks[0].process.pid)) == 1
    assert total(samples, "gpulaunch_gpu_memory_bytes") is None
    last_step_s = total(samples, "gpulaunch_last_step_timestamp_seconds", rank="0")
    assert last_step_s is not None
    assert abs(last_step_s - time.time()) < WAIT_S

    node.ranks[0].tell("worker")
    node.wait_for(1, "gpulaunch_dataloader_workers", rank="0", state="alive")
    samples = node.wait_until(0.04, "gpulaunch_process_cpu_seconds_total", rank="0", role="workers")
    busy_s = total(samples, "gpulaunch_process_cpu_seconds_total", rank="0", role="workers") or 0.0
    node.ranks[0].tell("end worker")
    samples = node.wait_for(0, "gpulaunch_dataloader_workers", rank="0", state="alive")
    after_s = total(samples, "gpulaunch_process_cpu_seconds_total", rank="0", role="workers")
    assert after_s is not None
    assert after_s >= busy_s
    assert total(samples, "gpulaunch_host_memory_bytes", rank="0", role="workers", kind="rss") == 0

    node.ranks[0].tell("step 2")
    node.attempt(1, ranks=2)
    samples = node.wait_for(1, "gpulaunch_attempt")
    node.ranks[0].tell("step 1")
    node.wait_for(8, "gpulaunch_steps_total", rank="0")
    assert total(samples, "gpulaunch_collector_errors_total") == 0


def test_a_killed_sidecar_is_replaced_and_no_counter_falls(node: Node) -> None:
    """SIGKILL in the second attempt: the successor has the same socket, the same pages and the ledger."""
    first = node.start_sidecar()
    node.attempt(0)
    node.ranks[0].tell("step 5")
    node.ranks[0].tell("save 10")
    node.ranks[0].tell("worker")
    node.wait_for(5, "gpulaunch_steps_total")
    node.account(goodput_seconds={"productive": 100.0, "lost_work": 7.0}, restarts={"segfault": 1}, hangs=1)
    node.attempt(1)
    node.ranks[0].tell("step 2")
    node.wait_for(1, "gpulaunch_restarts_total", kind="segfault")
    node.wait_for(7, "gpulaunch_steps_total")
    last = node.wait_until(10, "gpulaunch_sidecar_scrapes_total")
    before = counters(last)
    of_no_rank = {name for name, labels in before if not dict(labels).get("rank")}
    assert of_no_rank >= {
        *("gpulaunch_goodput_seconds_total", "gpulaunch_restarts_total", "gpulaunch_hangs_total"),
        "gpulaunch_profiler_overhead_seconds_total",
    }

    first.kill()
    first.wait(WAIT_S)
    node.ranks[0].tell("step 1")
    with socket.create_connection(node.listener.getsockname(), timeout=WAIT_S) as waiting:
        waiting.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")  # asked while nobody serves
        node.start_sidecar()
        assert waiting.recv(12) == b"HTTP/1.1 200"
    samples = node.samples()
    assert (total(samples, "gpulaunch_sidecar_scrapes_total") or 0.0) < 10  # which does begin anew
    deadline = time.monotonic() + WAIT_S
    while True:  # on no page, from the first on
        after = counters(samples)
        assert {key: (value, after[key]) for key, value in before.items() if after.get(key, value) < value} == {}
        if total(samples, "gpulaunch_steps_total") == 8 and before.keys() <= after.keys():
            break
        assert time.monotonic() < deadline, before.keys() - after.keys()
        time.sleep(0.01)
        samples = node.samples()


def test_what_begins_anew_is_told_by_names_that_there_are(node: Node) -> None:
    node.start_sidecar()
    node.attempt(0)
    names = {sample.name for sample in node.wait_for(0, "gpulaunch_steps_total") if sample.name.endswith("_total")}

    assert begin_anew()
    assert [prefix for prefix in begin_anew() if not any(name.startswith(prefix) for name in names)] == []


def test_saves_and_the_agents_account_are_exported_over_a_restart(node: Node) -> None:
    node.start_sidecar()
    node.attempt(0)
    samples = node.wait_for(0, "gpulaunch_steps_total", rank="0")
    assert not [s.name for s in samples if s.name.startswith(("gpulaunch_checkpoint_", "gpulaunch_goodput_"))]

    node.account(goodput_seconds={"productive": 100.0})
    node.ranks[0].tell("save 10")
    node.wait_for(10, "gpulaunch_checkpoint_step", rank="0")
    samples = node.wait_for(100, "gpulaunch_goodput_seconds_total", bucket="productive")
    assert total(samples, "gpulaunch_checkpoint_stall_seconds_total", rank="0") == 0.25
    assert total(samples, "gpulaunch_checkpoint_bytes_total", rank="0") == 1 << 20
    young_s = total(samples, "gpulaunch_checkpoint_age_seconds")
    assert young_s is not None
    assert 0 <= young_s < WAIT_S

    node.attempt(1)
    node.account(goodput_seconds={"productive": 60.0, "lost_work": 40.0}, restarts={"segfault": 1}, hangs=1)
    samples = node.wait_for(1, "gpulaunch_restarts_total", kind="segfault")
    assert total(samples, "gpulaunch_goodput_seconds_total", bucket="lost_work") == 40
    assert total(samples, "gpulaunch_goodput_seconds_total", bucket="productive") == 100
    samples = node.wait_for(1, "gpulaunch_attempt")
    assert total(samples, "gpulaunch_checkpoint_saves_total", rank="0") == 1
    assert total(samples, "gpulaunch_checkpoint_step", rank="0") == 10
    node.wait_until(young_s + 0.001, "gpulaunch_checkpoint_age_seconds")

    (node.directory / "run.json").write_text('{"version": 1, "goodput_seconds": {"produ')
    node.wait_for(None, "gpulaunch_goodput_seconds_total")
    assert node.value("gpulaunch_steps_total") == 0
    node.account(goodput_seconds={"productive": 130.0}, restarts={"segfault": 1})
    node.wait_for(130, "gpulaunch_goodput_seconds_total", bucket="productive")


def test_a_run_directory_that_hangs_stalls_neither_the_page_nor_the_end(node: Node) -> None:
    """A mount of others; measuring needs nothing of it. When it is back, what was found is written."""
    node.run_dir = node.directory / "run"
    node.run_dir.mkdir()
    hangs = node.directory / "run-hangs"
    hangs.touch()
    sidecar = node.start_sidecar(*PYTHON, "-c", HUNG, str(node.run_dir))
    node.attempt(0)
    node.ranks[0].tell("step 5")
    node.wait_for(5, "gpulaunch_steps_total")
    refreshes = node.value("gpulaunch_sidecar_refreshes_total") or 0
    node.ranks[0].tell("step 2")
    samples = node.wait_until(refreshes + 5, "gpulaunch_sidecar_refreshes_total")
    assert total(samples, "gpulaunch_steps_total") == 7
    assert list(node.run_dir.iterdir()) == []

    hangs.unlink()
    deadline = time.monotonic() + WAIT_S
    while not (node.run_dir / "findings.jsonl").exists():
        assert time.monotonic() < deadline, "the file system is back, and nothing is written"
        time.sleep(0.01)

    hangs.touch()
    node.ranks[0].tell("step 2")
    node.wait_for(9, "gpulaunch_steps_total")
    sidecar.terminate()
    assert sidecar.wait(WAIT_S) == 0


def test_a_directory_of_targets_that_hangs_stalls_neither_the_page_nor_the_end(node: Node) -> None:
    """What docs recommend is a file system of others, too. When it is back, the run is announced."""
    targets = node.directory / "targets"
    targets.mkdir()
    hangs = node.directory / "targets-hangs"
    hangs.touch()
    node.attempt(0)  # so that the first look, before anybody is served, has something to announce
    sidecar = node.start_sidecar(*PYTHON, "-c", HUNG, str(targets), "--sd-dir", str(targets))
    node.ranks[0].tell("step 5")
    node.wait_for(5, "gpulaunch_steps_total")
    refreshes = node.value("gpulaunch_sidecar_refreshes_total") or 0
    node.wait_until(refreshes + 5, "gpulaunch_sidecar_refreshes_total")
    assert list(targets.iterdir()) == []

    hangs.unlink()
    deadline = time.monotonic() + WAIT_S
    while not list(targets.glob("gpulaunch-*.json")):
        assert time.monotonic() < deadline, "the file system is back, and nothing is announced"
        time.sleep(0.01)

    hangs.touch()
    sidecar.terminate()
    assert sidecar.wait(WAIT_S) == 0
    assert list(targets.glob("gpulaunch-*.json")) != [], "it did hang: the file could not be taken away"


def test_a_successor_without_a_ledger_begins_with_the_pages(node: Node) -> None:
    node.start_sidecar()
    node.attempt(0)
    node.ranks[0].tell("step 5")
    node.wait_for(5, "gpulaunch_steps_total")
    node.sidecars[0].kill()
    node.sidecars[0].wait(WAIT_S)
    (node.directory / "sidecar.json").write_text("{")
    node.start_sidecar()
    node.wait_for(5, "gpulaunch_steps_total")


def test_a_rank_killed_with_sigkill_keeps_its_counters_on_the_page(node: Node) -> None:
    node.start_sidecar()
    node.attempt(0)
    node.ranks[0].tell("step 5")
    pid = node.ranks[0].process.pid
    node.ranks[0].kill()
    samples = node.wait_for(0, "gpulaunch_host_memory_bytes", role="trainer", kind="rss")
    assert total(samples, "gpulaunch_steps_total") == 5
    assert total(samples, "gpulaunch_rank_info", pid=str(pid)) == 1


def test_a_program_without_torch_is_measured_too(node: Node) -> None:
    """No rank ever arms: its processes are still seen, and nothing fails."""
    node.attempt(0, armed=False)
    node.start_sidecar()
    samples = node.wait_for(0, "gpulaunch_probe_armed")
    rss_bytes = total(samples, "gpulaunch_host_memory_bytes", rank="0", role="trainer", kind="rss")
    assert rss_bytes is not None
    assert rss_bytes > 1 << 20
    assert total(samples, "gpulaunch_collector_errors_total") == 0
    assert failing(samples) == []


def test_its_own_cost_is_on_the_page_and_small(node: Node) -> None:
    node.attempt(0, ranks=8, armed=False)
    sidecar = node.start_sidecar()
    samples = node.samples()
    rss_bytes = total(samples, "gpulaunch_sidecar_memory_bytes")
    cpu_s = total(samples, "gpulaunch_profiler_overhead_seconds_total", where="sidecar")
    assert rss_bytes is not None
    assert 1 << 20 < rss_bytes < 60 << 20
    assert cpu_s is not None
    assert 0 < cpu_s < WAIT_S
    status = Path(f"/proc/{sidecar.pid}/status").read_text()
    assert status.startswith("Name:\tgpulaunch-side\n")
    assert "Threads:\t4\n" in status  # one refreshes, one serves, one takes stacks, one keeps telemetry
    assert os.getpriority(os.PRIO_PROCESS, sidecar.pid) >= 10


def test_it_never_loads_torch(node: Node) -> None:
    node.attempt(0)
    sidecar = node.start_sidecar()
    node.samples()
    maps = Path(f"/proc/{sidecar.pid}/maps").read_text()
    assert "python" in maps
    assert "/libtorch" not in maps
    script = "import gpulaunch.launcher.cli.sidecar as s, sys; s.run(['--help'])"
    probe = f"import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); {script}"
    result = subprocess.run([*PYTHON, "-c", probe], capture_output=True, text=True, timeout=WAIT_S)
    assert result.stdout.endswith("False\n")


def test_sigterm_ends_it_with_0_and_without_a_word(node: Node) -> None:
    sidecar = node.start_sidecar(interval_s=3600)  # in the middle of a long wait
    node.samples()
    sidecar.terminate()
    _, stderr = sidecar.communicate(timeout=WAIT_S)
    assert (sidecar.returncode, stderr) == (0, b"")


def test_keys_pressed_and_terminals_closed_are_not_its_business(node: Node) -> None:
    sidecar = node.start_sidecar()
    node.samples()
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        sidecar.send_signal(signum)
    refreshes = node.value("gpulaunch_sidecar_refreshes_total") or 0
    node.wait_until(refreshes + 3, "gpulaunch_sidecar_refreshes_total")
    assert sidecar.poll() is None


AGENT = """
import os, subprocess, sys
sidecar = subprocess.Popen([*sys.argv[1:], "--parent-pid", str(os.getpid())], pass_fds=[int(sys.argv[-1])])
print(sidecar.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_when_the_agent_is_killed(node: Node) -> None:
    arguments = ("--channel-dir", str(node.directory), "--listen-fd", str(node.listener.fileno()))
    with subprocess.Popen(
        [*PYTHON, "-c", AGENT, *SIDECAR, *arguments],
        pass_fds=[node.listener.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as agent:
        assert agent.stdout is not None
        pidfd = os.pidfd_open(int(agent.stdout.readline()))
        try:
            assert node.samples()  # it serves, so it has asked the kernel by now
            agent.kill()
            assert select.select([pidfd], [], [], WAIT_S)[0]
        finally:
            os.close(pidfd)


def test_it_does_not_start_for_an_agent_that_is_gone(node: Node) -> None:
    sidecar = node.start_sidecar(parent_pid=1)
    assert sidecar.wait(WAIT_S) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--listen-fd", "99"], "--listen-fd 99: Bad file descriptor"),
        (["--listen-fd", "0"], "--listen-fd 0: "),
        (["--listen-fd", "0", "--interval", "0"], "0 is not between"),
        (["--listen-fd", "x"], "invalid int value"),
        ([], "required: --listen-fd"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    command = [*SIDECAR, "--channel-dir", str(tmp_path), "--parent-pid", str(os.getpid()), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, stdin=subprocess.DEVNULL)
    assert result.returncode == 2
    assert complaint in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_socket_that_does_not_listen_is_refused(tmp_path: Path) -> None:
    with socket.socket() as unbound:
        arguments = ["--channel-dir", str(tmp_path), "--listen-fd", str(unbound.fileno()), "--parent-pid", "1"]
        result = subprocess.run(
            [*SIDECAR, *arguments], capture_output=True, text=True, timeout=WAIT_S, pass_fds=[unbound.fileno()]
        )
    assert (result.returncode, "not listening" in result.stderr) == (2, True)


def test_a_shortage_of_descriptors_is_survived(node: Node) -> None:
    """Clients take every descriptor: the page is still served, because the oldest of them is let go."""
    sidecar = node.start_sidecar()
    node.samples()
    resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, (24, 24))
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(node.listener.getsockname(), timeout=WAIT_S))
        assert node.samples()
    deadline = time.monotonic() + WAIT_S
    while failing(samples := node.samples()):
        assert time.monotonic() < deadline, failing(samples)
