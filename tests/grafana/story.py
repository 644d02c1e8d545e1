"""Two runs that do badly when they are told to, and pictures of what the dashboards show of them. Not a test module."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from exprs import dashboards
from many_ranks import LEFT
from scene import EVERY_S, SCRAPE_S, WAIT_S, WINDOW_S, Album, Answer, Prometheus, Target, photograph, until

TRAIN = Path(__file__).with_name("train.py")
RUNS = ("real", "many")
LOG = logging.getLogger(__name__)


class RealRun:
    """Two ranks that train on the CPU."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.out = directory / "out"
        command = Path(sysconfig.get_path("scripts"), "gpulaunch")
        assert command.exists(), f"{command} is missing: pip install -e ."
        ours = ("PET_", "GPULAUNCH_", "TORCHELASTIC_", "SLURM_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        env |= {"TRAINING_DIR": str(directory), "TMPDIR": str(directory), "CUDA_VISIBLE_DEVICES": ""}
        arguments = (
            "--nproc",
            "2",
            "--max-restarts",
            "3",
            "--profile-budget",
            "100",
            "--metrics-addr",
            "127.0.0.1:0",
            str(TRAIN),
        )
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [str(command), *arguments],
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def ready(self) -> None:
        """Wait for it."""
        self.address = until(self._address, "it says where its metrics are")

    def _address(self) -> str:
        assert self.process.poll() is None, self.out.read_text()
        found = re.search(r"metrics http://(127\.0\.0\.1:\d+)/", self.out.read_text())
        return found[1] if found else ""

    def tell(self, order: str) -> None:
        """Make it do badly, or well again."""
        for name in ("slow-loader", "slow-rank"):
            (self.directory / name).unlink(missing_ok=True)
        if order != "healthy":
            (self.directory / order).touch()

    def stop(self) -> None:
        """End it as a job manager would."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Story:
    """What was seen, by run and scene."""

    prometheus: Prometheus
    targets: dict[str, Target]
    albums: dict[tuple[str, str], Album] = field(default_factory=dict)
    at_s: float = 0.0
    """When the last picture was taken."""
    taken_s: dict[str, float] = field(default_factory=dict)
    """When that of each scene was."""
    restarted_s: float = 0.0
    """When the ranks were killed."""
    fired: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """Which alerts were on, by run and scene."""
    marked: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """How many series an annotation had, by run, scene and its name."""

    def settle(self, since_s: float) -> float:
        """Wait until everything in the windows of rates is from after `since_s`, and well scraped; give a time of which
        both hold. A machine that has other things to do may miss scrapes; rank LEFT may be meant to stand still."""

        def settled() -> float:
            now_s = time.time()
            if now_s < since_s + WINDOW_S + 2 * SCRAPE_S:
                return 0.0
            asked = (
                "gpulaunch_build_info{of}",  # a scrape that failed takes everything away until the next
                f"count_over_time(gpulaunch_sidecar_memory_bytes{{of}}[{WINDOW_S}s]) >= 3",
                f"min(rate(gpulaunch_steps_total{{of}}[{WINDOW_S}s])) > 0",
            )
            of = {name: f'{{instance="{target.node}", rank!="{LEFT}"}}' for name, target in self.targets.items()}
            seen = (
                self.prometheus.instant(each.replace("{of}", of[run]), at_s).series
                for run in RUNS
                for each in asked
                for at_s in (now_s - SCRAPE_S, now_s)  # what a picture shows
            )
            return now_s if all(seen) else 0.0

        at_s: float = until(settled, "both were scraped often enough")
        return at_s

    def take(self, scene: str, shows: Callable[[Story, str, str], None]) -> None:
        """Take a picture of everything; another one while it does not show what it should, for as long as one waits for
        anything. What the last one does not show, the tests will say.

        A machine that has other things to do lets single ranks stand still for longer than the windows are.
        """
        since_s, ends_s = time.time(), time.monotonic() + WAIT_S
        while True:
            self._photograph(scene, self.settle(since_s))
            try:
                for run in RUNS:
                    shows(self, run, scene)
            except (AssertionError, ValueError) as error:  # ValueError: a series that is asked for is not there
                LOG.warning("%s: not yet: %s", scene, error)
                if time.monotonic() > ends_s:
                    return
                time.sleep(EVERY_S)
            else:
                LOG.info("%s: seen after %.0f s", scene, time.time() - since_s)
                return

    def _photograph(self, scene: str, at_s: float) -> None:
        self.at_s = self.taken_s[scene] = at_s
        for run in RUNS:
            target = self.targets[run]
            self.albums[run, scene] = photograph(self.prometheus, target, at_s)
            for dashboard in dashboards().values():
                for each in dashboard["annotations"]["list"]:
                    if "expr" in each:
                        expr = target.into(each["expr"])
                        asked = self.prometheus.over_time(expr, at_s, back_s=300, step_s=60)
                        self.marked[run, scene, each["name"]] = len(asked.series)
            # By the run, not by the address: an alert about a whole run has none.
            firing = f'ALERTS{{alertstate="firing", run="{target.run}"}}'
            self.fired[run, scene] = {labels["alertname"] for labels, _ in self.prometheus.instant(firing, at_s).series}

    def since_the_restart(self, run: str, expr: str) -> Answer:
        """What a panel of one number would have shown at each moment between the restart and its picture."""
        at_s = self.taken_s["restarted"]
        return self.prometheus.over_time(self.targets[run].into(expr), at_s, back_s=at_s - self.restarted_s)
