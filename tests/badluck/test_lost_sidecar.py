"""The sidecar is killed while a job runs: it is started again, nothing counted is lost, and no rank notices."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from bad_node import WAIT_S, Refreshes, Scrape

from gpulaunch.exporters.files.findings import FINDINGS_FILE
from gpulaunch.exporters.files.findings_writer import FindingsWriter

TRAIN = """
import os, time, torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("READY", os.getpid(), flush=True)
steps = 0
while not os.path.exists("stop"):
    for x in DataLoader(torch.randn(64, 4), batch_size=4):
        model(x).square().sum().backward()
        optimizer.step()
        steps += 1
        time.sleep(0.005)
print("MADE", steps, os.getpid(), flush=True)
"""
STEPS = "gpulaunch_steps_total"


def scrape(url: str) -> Scrape:
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as page:
        return Scrape(page.read().decode())


def steps_of(url: str, at_least: int) -> Scrape:
    """Scrape until both ranks have made so many; while nobody serves, the socket is the agent's, and waits."""
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            seen = scrape(url)
            if all((seen.value(STEPS, rank=rank) or 0) >= at_least for rank in ("0", "1")):
                return seen
        except (urllib.error.URLError, ConnectionError):
            pass  # it was killed while it answered
        assert time.monotonic() < until_s, "no steps"
        time.sleep(0.1)


def sidecar_of(agent: int, *, after: int = 0) -> int:
    """The pid of the sidecar, when there is one that is not that one."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            if int(child) != after and Path(f"/proc/{child}/comm").read_text() == "gpulaunch-side\n":
                return int(child)
        time.sleep(0.02)
    raise AssertionError("no sidecar")


@pytest.mark.torch
def test_a_job_goes_on_being_measured_by_one_sidecar_after_another(gpulaunch: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    run = gpulaunch.start("--nproc", "2", "train.py")
    run.wait_for("/metrics")
    (url,) = re.findall(r"http://\S+/metrics", run.stderr)
    before = steps_of(url, 20)
    pid, deaths = sidecar_of(run.pid), 2
    for _ in range(deaths):
        os.kill(pid, signal.SIGKILL)
        pid = sidecar_of(run.pid, after=pid)
        after = steps_of(url, int(before.value(STEPS, rank="0") or 0) + 20)
        fallen = {key for key, value in before.counters.items() if after.counters.get(key, 0) < value}
        # What a sidecar counts of itself begins anew; what it counts of the job does not.
        assert {
            name for name, _ in fallen if not name.startswith(("gpulaunch_sidecar_", "gpulaunch_collector_"))
        } == set()
        assert after.value("gpulaunch_attempt") == 0
        before = after
    (tmp_path / "stop").touch()
    ended = run.wait()

    assert ended.code == 0, ended
    started = sorted(re.findall(r"READY (\d+)", ended.stdout))
    made = {rank_pid: int(steps) for steps, rank_pid in re.findall(r"MADE (\d+) (\d+)", ended.stdout)}
    assert sorted(made) == started, "the same two processes"
    assert min(made.values()) >= min(before.value(STEPS, rank=rank) or 0 for rank in ("0", "1")) > 0
    assert ended.stderr.count("the metrics sidecar ended (signal 9); training continues") == 1, "said once"
    assert (ended.run_dir / FINDINGS_FILE).exists()


def test_a_finding_stays_in_the_file_and_stands_again(tmp_path: Path) -> None:
    """The next sidecar has not seen the windows of the one before; what was found is in the file all the time."""
    refreshes = Refreshes(tmp_path)
    told: list[list[bool]] = []
    for _ in range(2):
        keeper = FindingsWriter(tmp_path)
        for _ in range(20):
            keeper.keep(refreshes.refresh())
        keeper.close()
        lines = [json.loads(line) for line in (tmp_path / FINDINGS_FILE).read_text().splitlines()]
        assert [line["rule"] for line in lines] == ["gc-pauses"]
        told.append([lines[0]["active"], lines[0]["first_seen_s"]])
        lost = refreshes.sidecar
        refreshes.start()
        lost.close()
    refreshes.close()

    assert told[0] == told[1] == [True, told[0][1]]
