"""Healthy programs that wait for a minute or four, with default settings: told, taken back, and never acted on.

All run at once, as they only wait: the test takes as long as the longest of them.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.waits, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("waiting_program.py")
ANSWERS_AFTER_S = 150.0
READS_AFTER_S = 240.0  # counted from the start of the test, which may take a while to have all programs started
# What is told of each, and after how long at most: 30 to 60 s, and up to 120 s where a name says that it may take long.
# A compiler works, which needs no telling. Load of the machine, and the time of two looks, come on top.
TOLD_S = {
    "dataset": 60,
    "dataset-all": 60,
    "worker": 60,
    "sleep": 60,
    "sleep-all": 60,
    "recv": 60,
    "recv-all": 60,
    "poll": 60,
    "poll-all": 60,
    "validation": 120,
    "save": 120,
    "download": 120,
    "compile": None,
}
LATE_S = 15


class Slow(BaseHTTPRequestHandler):
    """Answers after a while."""

    def do_GET(self) -> None:
        """Send a small file."""
        time.sleep(ANSWERS_AFTER_S)
        self.send_response(200)
        self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(b"weights")

    def log_message(self, *_: object) -> None:
        """Nothing on the console."""


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server that is slow."""
    with HTTPServer(("127.0.0.1", 0), Slow) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_port}/"
        one.shutdown()


def read_late(pipe: Path) -> None:
    """Take what is written to a pipe, beginning after a while."""
    time.sleep(READS_AFTER_S)
    pipe.read_bytes()


def test_no_healthy_wait_is_acted_on(gpulaunch, tmp_path: Path, server: str) -> None:
    pipe = tmp_path / "model.pt"
    os.mkfifo(pipe)
    threading.Thread(target=read_late, args=(pipe,), daemon=True).start()
    place = {"save": str(pipe), "download": server}
    runs = {
        what: gpulaunch.start("--nproc", "2", "--job-dir", tmp_path / what, PROGRAM, what, place.get(what, ""))
        for what in TOLD_S
    }
    wrong: dict[str, str] = {}
    for what, told_s in TOLD_S.items():
        ended = runs[what].wait(600)
        events = [json.loads(line) for line in (tmp_path / what / "events.jsonl").read_text().splitlines()]
        told = [event["quiet_s"] for event in events if event["event"] == "hang_suspected"]
        over = [event["after_s"] for event in events if event["event"] == "hang_over"]
        trained = sorted(re.findall(r"rank (\d) trained 100 steps", ended.stdout))
        if ended.code != 0 or trained != ["0", "1"] or any(event["event"] == "hung" for event in events):
            wrong[what] = f"acted on: {ended}"
        elif told_s is None and told:
            wrong[what] = f"told, though it works: {ended}"
        elif told_s is not None:
            if not told or told[0] > told_s + LATE_S or len(over) != 1:
                wrong[what] = f"told after {told}, taken back after {over}: {ended}"
            elif any(after < 1.8 * before for before, after in pairwise(told)):
                wrong[what] = f"told again and again, after {told}"
            elif "--hang-timeout" not in ended.stderr:
                wrong[what] = f"does not say when it would act: {ended}"
    assert not wrong, "\n\n".join(f"{what}: {why}" for what, why in wrong.items())
