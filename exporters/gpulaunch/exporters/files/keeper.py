"""Has what is found in a run written into its directory, while the run goes on."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from gpulaunch.exporters.files.findings import FINDINGS_FILE, FindingsFile
from gpulaunch.profiler.record import NodeState

__all__ = ["FindingsKeeper"]


class FindingsKeeper:
    """Writes `findings.jsonl` from the first step on; a directory that cannot be written to is tried again."""

    def __init__(self, channel_dir: Path) -> None:
        self._channel_dir = channel_dir
        self._file: FindingsFile | None = None

    def keep(self, state: NodeState) -> None:
        """Take the findings that stand now. Raises nothing: to observe is never a reason to fail."""
        with contextlib.suppress(OSError):
            if self._file is None and any(training.steps for training in state.training):
                self._file = self._open()
            if self._file is not None:
                self._file.tell(state.findings, state.taken_wall_ns / 1e9)

    def close(self) -> None:
        """Write a last time."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()

    def _open(self) -> FindingsFile | None:
        """The file in the run directory, which the agent names beside the pages."""
        try:
            document: Any = json.loads((self._channel_dir / "group.json").read_bytes())
            return FindingsFile(Path(document["run_dir"]) / FINDINGS_FILE)
        except (ValueError, KeyError, TypeError):
            return None
