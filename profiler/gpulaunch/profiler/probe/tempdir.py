"""Places the sockets of a rank's multiprocessing next to the control segment, so that they are removed with the job.

A dataloader passes batches through sockets in a directory that multiprocessing makes in the temporary directory and
removes at the end of the process. A killed process removes nothing, and its directories remain.
"""

from __future__ import annotations

import os
import sys

_MAX_PATH = 80
"""A socket's address has room for 107 bytes; the name of the socket itself takes about twenty."""


def keep_sockets_together() -> None:
    """Set the directory before multiprocessing creates its own; not if the path of the segment is too long."""
    process = sys.modules.get("multiprocessing.process")
    control = os.environ.get("GPULAUNCH_CONTROL", "")
    if process is None or not control:
        return
    directory = os.path.join(os.path.dirname(control), f"mp-{os.environ['RANK']}")
    # The current process's configuration is what multiprocessing.util.get_temp_dir asks first; children inherit it.
    config = process.current_process()._config
    if len(directory) > _MAX_PATH or config.get("tempdir") is not None:
        return
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError:
        return
    config["tempdir"] = directory
