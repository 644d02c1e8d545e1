"""Records external interventions in a run's event log, so that they are not mistaken for failures."""

from __future__ import annotations

import contextlib
import json
import os
import time


def note(run_dir: str, event: str, **fields: object) -> None:
    """Append one line to events.jsonl of a run; on a full disk the line is lost, and no new file is created."""
    line = {"version": 1, "time_s": time.time(), "monotonic_s": time.monotonic(), "event": event, **fields}
    with contextlib.suppress(OSError):
        history = os.open(os.path.join(run_dir, "events.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(history, json.dumps(line).encode() + b"\n")
        finally:
            os.close(history)
