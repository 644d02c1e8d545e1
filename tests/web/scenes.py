"""Runs to be looked at: what an agent and a sidecar would have left, and a server that shows it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kept_run import GC, SYNC, WALL_S, line, state
from runs_on_disk import begin, end, keep, write

from gpulaunch.exporters.http import HttpServer
from gpulaunch.exporters.prometheus.render import Board
from gpulaunch.exporters.web.pages import PUBLIC, Plotly, installed_plotly, pages
from gpulaunch.exporters.web.routes import routes
from gpulaunch.profiler.record import Collector, CollectorState, Finding, NodeState, Site

__all__ = [
    "EVIL",
    "Scene",
    "Served",
    "empty",
    "faulty",
    "finished",
    "hostile",
    "large",
    "live",
    "long_run",
    "lost_before",
    "standing",
    "starting",
    "stopped",
]

EVIL = '<img src=x onerror="window.owned=1"><script>window.owned=1</script>\'"&\u202e\x1b[31m{{7*7}}'


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A state as a sidecar has it, and the run directory beside it."""

    state: NodeState | None
    run_dir: Path | None = None


def starting(tmp_path: Path) -> Scene:
    """The sidecar has not looked yet."""
    return Scene(state=None)


def empty(tmp_path: Path) -> Scene:
    """It has looked, and no rank is there."""
    nothing = state(0.0, ranks=())
    return Scene(state=replace(nothing, group=None, run=None, host=None, collectors={}))


def live(tmp_path: Path, *, ranks: Sequence[int] = (0, 1), seconds: int = 90, every: int = 1, **more: Any) -> Scene:
    """Looked at so many seconds apart."""
    run_dir = tmp_path / "run"
    begin(run_dir, pid=os.getpid())
    write(run_dir, "group.json", {"version": 1, "run_id": "aaaa", "attempt": 0, "world_size": len(ranks)})
    more = {"gpu": True, "findings": (SYNC, GC), "ranks": ranks, **more}
    keep(run_dir, [state(second, **more) for second in range(every, seconds, every)])
    return Scene(state=state(seconds, **more), run_dir=run_dir)


def standing(tmp_path: Path) -> Scene:
    """Rank 1 makes no steps any more, rank 0 goes on."""

    def seen(second: float) -> NodeState:
        moving = state(second)
        return replace(moving, training=(moving.training[0], state(min(second, 30.0)).training[1]))

    run_dir = tmp_path / "run"
    begin(run_dir, pid=os.getpid())
    write(run_dir, "group.json", {"version": 1, "run_id": "aaaa", "attempt": 0, "world_size": 2})
    keep(run_dir, [seen(float(second)) for second in range(1, 100)])
    return Scene(state=seen(100.0), run_dir=run_dir)


def finished(tmp_path: Path) -> Scene:
    scene = live(tmp_path)
    assert scene.run_dir is not None
    end(scene.run_dir, 90)
    return scene


def stopped(tmp_path: Path) -> Scene:
    """Somebody pressed Ctrl-C; before that, a line was found."""
    found = replace(SYNC, evidence={"blocked_seconds_per_step": 0.0123, "bytes_per_step": 2048.0, "kind": "item"})
    scene = live(tmp_path, findings=(found,))
    assert scene.run_dir is not None
    end(scene.run_dir, 90, code=130, signals=("SIGINT",))
    with open(scene.run_dir / "events.jsonl", "a") as history:
        history.write(line("finding_gone", 90, rule="gc-pauses", file=None, line=None))
    return scene


def faulty(tmp_path: Path) -> Scene:
    """Rank 1 died, the second attempt runs, a collector does not."""
    run_dir = tmp_path / "run"
    begin(run_dir)
    before = [state(second, gpu=True) for second in range(1, 40)]
    after = [state(second, attempt=1, restarts={"segfault": 1}, gpu=True, findings=(SYNC,)) for second in range(46, 90)]
    keep(run_dir, [*before, *after])
    with open(run_dir / "events.jsonl", "a") as history:
        history.write(line("rank_ended", 40, rank=1, code=None, signal=11, attempt=0))
        history.write(line("phase", 41, phase="clearing", attempt=0))
        history.write(line("phase", 42, phase="starting", attempt=1))
        history.write(line("started", 44, attempt=1))
        history.write(line("phase", 45, phase="running", attempt=1))
    first = {
        "rank": 1,
        "kind": "segfault",
        "headline": "rank 1 was killed by SIGSEGV",
        "why": "the others ended after it",
        "advice": "look at its stack in stacks.txt",
    }
    write(run_dir, "attempts/0/failure.json", {"version": 1, "first": first, "attempt": 0})
    last = state(90, attempt=1, restarts={"segfault": 1}, gpu=True, findings=(SYNC,))
    return Scene(state=last, run_dir=run_dir)


def lost_before(tmp_path: Path) -> Scene:
    """The launcher of a first run was killed, and has not said so; another one began three days after its attempt."""
    later_s = 3 * 86400.0 + 1
    run_dir = tmp_path / "run"
    begin(run_dir, pid=1, host="gone")
    keep(run_dir, [state(second) for second in range(1, 60)])
    begin(run_dir, run_id="bbbb", at_s=later_s)
    os.utime(run_dir / "events.jsonl", (WALL_S + later_s,) * 2)  # and not now, by the clock of the machine
    return Scene(state=state(later_s + 60, run_id="bbbb"), run_dir=run_dir)


def large(tmp_path: Path) -> Scene:
    return live(tmp_path, ranks=range(64), seconds=60, every=3)


def long_run(tmp_path: Path) -> Scene:
    """10^5 steps, in almost three hours."""
    return live(tmp_path, seconds=10_000, every=20)


def hostile(tmp_path: Path) -> Scene:
    """Everything that a program, its user or its files may choose is markup."""
    run_dir = tmp_path / "run"
    begin(run_dir)
    write(
        run_dir,
        "job.json",
        {"version": 1, "command": ["gpulaunch", EVIL], "name": EVIL, "nproc": 2, "nnodes": 1},
    )
    found = Finding(
        rule=EVIL,
        file=f"/home/{EVIL}.py",
        line=7,
        subject=EVIL,
        ranks=(0, 1),
        seconds_per_step=0.1,
        seconds_per_hour=100.0,
        confidence=0.5,
        evidence={EVIL: EVIL},
        advice=EVIL,
    )
    told: dict[str, Any] = {"gpu": True, "findings": (found,), "restarts": {"segfault": 1}}
    keep(run_dir, [state(second, **told) for second in range(1, 40)])
    with open(run_dir / "events.jsonl", "a") as history:
        history.write(line("rank_ended", 20, **{EVIL: EVIL}))
        history.write(line("phase", 21, phase=EVIL, attempt=0))
        history.write(line("phase", 22, phase="starting", attempt=1))
        history.write(line("started", 23, attempt=1))
    first = {"rank": 1, "kind": EVIL, "headline": EVIL, "why": EVIL, "advice": EVIL}
    write(run_dir, "attempts/0/failure.json", {"version": 1, "first": first, "attempt": 0})
    last = state(40, attempt=1, **told)
    site = Site(kind="h2d", text=EVIL, count=9, size_bytes=9, blocked_ns=9**9, gpu_ns=9, pinned=0, non_blocking=0)
    training = tuple(
        replace(each, sites=(site,), fault=EVIL, hooks_unavailable=(EVIL,), step_source=EVIL, facts={EVIL: EVIL})
        for each in last.training
    )
    assert last.group is not None
    last = replace(
        last,
        training=training,
        group=replace(last.group, name=EVIL, run_id=EVIL),
        devices=tuple(replace(device, model=EVIL, uuid=EVIL) for device in last.devices),
        collectors={Collector.GPU: CollectorState(available=False, reason=EVIL, errors=1, spent_s=0.1)},
    )
    return Scene(state=last, run_dir=run_dir)


class Served:
    """The endpoint as the sidecar puts it together, over a scene."""

    def __init__(self, scene: Scene, *, plotly: bool = True, **protection: Any) -> None:
        self.board = Board(version="1")
        self.scene = scene
        if scene.state is not None:
            self.board.publish(scene.state)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.server = HttpServer(
            self.listener,
            routes(self.board),
            pages=pages(lambda: self.board.state, lambda: scene.run_dir, find_plotly=lambda: find(plotly), rest=0.5),
            public=PUBLIC,
            **protection,
        )
        self.server.start()
        scheme = "https" if protection.get("tls") else "http"
        self.url = f"{scheme}://127.0.0.1:{self.address[1]}/"

    def close(self) -> None:
        self.server.close()
        self.listener.close()


def find(plotly: bool) -> Plotly | None:
    return installed_plotly() if plotly else None


def as_document(body: bytes) -> dict[str, Any]:
    """JSON as browsers read it: NaN and Infinity are none."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    document: dict[str, Any] = json.loads(body, parse_constant=refuse)
    return document
