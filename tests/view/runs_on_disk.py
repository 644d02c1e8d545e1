"""Run directories as an agent and its sidecars leave them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kept_run import WALL_S, announce, line, state

from gpulaunch.exporters.store import telemetry_writer as keepers
from gpulaunch.exporters.store.telemetry_writer import TelemetryWriter
from gpulaunch.profiler import kernel as kernels
from gpulaunch.profiler.record import NodeState

PRODUCTIVE: dict[str, float | None] = {
    "productive": 90.0,
    "checkpoint_stall": 0.0,
    "detection": 0.0,
    "teardown": 0.0,
    "restart": 0.0,
    "lost_work": 0.0,
    "startup": 10.0,
}


def keep(run_dir: Path, states: Iterable[NodeState], *, channel: str = "channel") -> None:
    """Have states stored as a sidecar does, but without its thread."""
    announce(run_dir.parent / channel, run_dir)
    keeper = TelemetryWriter(run_dir.parent / channel)
    for each in states:
        keeper.write_now(each)
    assert keeper.condition.available, keeper.condition
    keeper.write_now(None, last=True)
    assert keepers.TELEMETRY_FILE in os.listdir(run_dir)


def write(run_dir: Path, name: str, content: Any) -> None:
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def begin(
    run_dir: Path,
    *,
    run_id: str = "aaaa",
    pid: int | None = None,
    host: str | None = None,
    kernel: str | None = None,
    at_s: float = 0.0,
) -> None:
    """What is there once the ranks run, `at_s`, on a `host`: this one, if not another; "": it has not said which.
    `kernel`: where its pid means something; on this host, here."""
    kernel = (kernels.kernel() if host is None else "") if kernel is None else kernel
    host = socket.gethostname() if host is None else host
    where = {"host": host, "kernel": kernel}
    named = {"run_id": run_id, "pid": os.getpid() if pid is None else pid, **{k: v for k, v in where.items() if v}}
    run_dir.mkdir(exist_ok=True)
    write(
        run_dir,
        "job.json",
        {"version": 1, "command": ["gpulaunch", "train.py"], "name": "demo", "nproc": 2, "nnodes": 1},
    )
    with open(run_dir / "events.jsonl", "a") as history:
        history.write(line("run_started", at_s - 10, **named))
        history.write(line("phase", at_s - 9, phase="starting", attempt=0))
        history.write(line("started", at_s - 1, attempt=0))
        history.write(line("phase", at_s - 1, phase="running", attempt=0))
    write(run_dir, "group.json", {"version": 1, "run_id": run_id, "attempt": 0, "world_size": 2})
    (run_dir / "attempts" / "0").mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold the directory open, as a living agent does."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        yield
    finally:
        os.close(descriptor)


def closed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in a directory that we may not search cannot be looked at, nor opened; root may search them all."""

    def refusing(real: Any) -> Any:
        def ask(path: Any, *more: Any, **named: Any) -> Any:
            if isinstance(path, (str, Path)) and Path(path).parent == directory:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *more, **named)

        return ask

    monkeypatch.setattr(os, "stat", refusing(os.stat))
    monkeypatch.setattr(os, "open", refusing(os.open))


def end(
    run_dir: Path,
    at_s: float,
    *,
    code: int = 0,
    attempt: int = 0,
    signals: Iterable[str] = (),
    preempted: bool = False,
    goodput: dict[str, float | None] = PRODUCTIVE,
) -> None:
    """What is there once all is over; `signals`: that the agent was sent before."""
    with open(run_dir / "events.jsonl", "a") as history:
        for name in signals:
            history.write(line("signalled", at_s, signal=name, preempted=preempted))
        history.write(line("phase", at_s, phase="clearing", attempt=attempt))
        history.write(line("phase", at_s, phase="done", attempt=attempt))
        history.write(
            line(
                "run_ended",
                at_s,
                exit_code=code,
                goodput_seconds=goodput,
                restarts={},
                preempted=int(preempted),
                hangs=0,
            )
        )
    write(run_dir, "summary.json", {"version": 1, "exit_code": code, "error": "it broke" if code else "", "ranks": {}})


def unseen(run_dir: Path, *, before: bool = False) -> Path:
    """A run with --no-profile that went well, as this gpulaunch leaves it, or as one before it did."""
    begin(run_dir)
    end(run_dir, 100, goodput=PRODUCTIVE if before else {**PRODUCTIVE, "productive": None, "checkpoint_stall": None})
    job = json.loads((run_dir / "job.json").read_text())
    write(run_dir, "job.json", {**job, "profile": False})
    told = {"steps": 0, "samples": 0, "step_seconds": 0.0, "phase_seconds": {"forward": 0.0}}
    rank = {**(told if before else dict.fromkeys(told)), "max_rss_bytes": 300 << 20}
    write(run_dir, "summary.json", {"version": 1, "exit_code": 0, "error": "", "ranks": {"0": rank, "1": rank}})
    return run_dir


def whole(run_dir: Path, seconds: int = 100, **more: Any) -> Path:
    """A run of two ranks that went well."""
    begin(run_dir)
    keep(run_dir, [state(second, **more) for second in range(1, seconds)])
    end(run_dir, seconds)
    return run_dir


NOW_S = WALL_S + 1000
