"""Small views of runs, made by hand: what a terminal is given to show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpulaunch.exporters.view.model import (
    AttemptView,
    CauseView,
    CollectorView,
    DeviceView,
    EventView,
    FindingView,
    NodeView,
    RunView,
    Status,
)
from gpulaunch.exporters.view.rank_model import (
    CollectiveView,
    CopyView,
    CostView,
    LoaderView,
    MemoryView,
    PauseView,
    RankView,
    SiteView,
    SyncView,
)

BEGAN_S = 1_790_000_000.0
SEEN_S = BEGAN_S + 750.0
GIB = 1 << 30

HOSTILE = "a\x1b[31mred\x1b]0;title\x07\r\n\tb\x9b2J\u202eevil\u200b<b>&\x00\udcff" + "wide\u4e16\u754c"
"""What a terminal would obey, in any place where a program may put text."""

COMPUTE = {"data_wait": 0.02, "forward": 0.38, "backward": 0.45, "comm": 0.08, "optimizer": 0.06, "other": 0.01}
STARVED = {"data_wait": 0.71, "forward": 0.11, "backward": 0.13, "comm": 0.03, "optimizer": 0.02}


def ramp(top: float, points: int = 60) -> tuple[float | None, ...]:
    """A curve that rises, holds, and has a gap."""
    return tuple(None if 20 <= at < 23 else top * min(1.0, (at + 1) / 10) for at in range(points))


def rank(number: int, shares: dict[str, float] | None = None, **changes: Any) -> RankView:
    """A rank that makes ten steps a second."""
    shares = COMPUTE if shares is None else shares
    made = RankView(
        rank=number,
        local_rank=number,
        pid=4000 + number,
        armed=True,
        step_source="optimizer",
        steps=7000,
        microsteps=7000,
        samples=7000 * 32,
        step_seconds=700.0,
        last_step_s=SEEN_S - 0.1,
        steps_per_second_now=10.0,
        step_seconds_now=0.1,
        phase_seconds={name: 700.0 * share for name, share in shares.items()},
        phase_ratios_now=shares,
        cpu_seconds={"trainer": 690.0},
        cores_now={"trainer": 0.98},
        memory=MemoryView(
            rss_bytes={"trainer": 3 * GIB, "workers": GIB // 2}, pss_bytes={"trainer": GIB, "workers": GIB // 4}
        ),
        steps_per_second=ramp(10.0),
        step_mean_seconds=tuple(None if value is None else 0.1 for value in ramp(10.0)),
        phase_ratios={name: tuple([share] * 60) for name, share in shares.items()},
        rss_bytes={"trainer": ramp(3.0 * GIB)},
    )
    return replace(made, **changes)


def on_gpu(number: int, **changes: Any) -> RankView:
    """A rank with everything that can be known of one."""
    return rank(
        number,
        loader=LoaderView(
            batches=7000,
            eval_batches=20,
            batch_bytes=7000 << 20,
            wait_seconds=14.0,
            transfer_seconds=2.0,
            reorder_blocked_seconds=1.0,
            ready=3,
            outstanding=8,
            reorder_blocked=0,
            pin_backlog=1,
            workers_configured=4,
            workers_alive=4,
            worker_seconds={"prep": 600.0, "contention": 30.0, "blocked": 70.0},
            storage_bytes=9 * GIB,
            cached_bytes=GIB,
        ),
        copies=(
            CopyView(
                direction="h2d",
                host_memory="pageable",
                count=7000,
                size_bytes=7000 << 20,
                blocked_seconds=21.0,
                gpu_seconds=4.2,
            ),
            CopyView(
                direction="d2h",
                host_memory="pinned",
                count=70,
                size_bytes=70 << 10,
                blocked_seconds=0.01,
                gpu_seconds=0.001,
            ),
        ),
        syncs=(SyncView(kind="item", calls=7000, blocked_seconds=35.0),),
        memory=MemoryView(
            rss_bytes={"trainer": 3 * GIB, "workers": GIB // 2},
            pss_bytes={"trainer": GIB, "workers": GIB // 4},
            shm_inflight_bytes=8 << 20,
            gpu_bytes={"allocated": 20 * GIB, "reserved": 24 * GIB, "peak_allocated": 30 * GIB},
            pinned_bytes=64 << 20,
            alloc_retries=2,
            ooms=0,
        ),
        pauses=PauseView(
            gc_collections=70,
            gc_seconds=1.4,
            compiles=3,
            compile_seconds=40.0,
            comm_calls=7000,
            comm_blocked_seconds=56.0,
        ),
        collectives=CollectiveView(calls={"all_reduce": 14000}, enqueued=14000, completed=13999, sequence=14000),
        cost=CostView(
            probe_seconds=0.4,
            budget_ratio=0.005,
            unobserved_steps=6000,
        ),
        gpu_bytes={"allocated": ramp(20.0 * GIB)},
        loader_ready=ramp(4.0),
        copy_bytes_per_second={"h2d": ramp(10.0 * (1 << 20))},
        **changes,
    )


SYNC = FindingView(
    rule="sync-every-step",
    file="train.py",
    line=88,
    subject="",
    ranks=(0, 1),
    seconds_per_step=0.005,
    seconds_per_hour=180.0,
    lost_seconds=35.0,
    confidence=0.9,
    evidence={"blocked_seconds_per_step": 0.0049876543, "bytes_per_step": 4.0, "kind": "item", "calls_per_step": 1.0},
    advice="Read the loss every 50 steps, or keep it on the GPU until then.",
    active=True,
    first_seen_s=BEGAN_S + 20,
    last_seen_s=SEEN_S,
)
STARVING = replace(
    SYNC,
    rule="dataloader-too-few-workers",
    line=41,
    ranks=(0, 1),
    seconds_per_step=0.071,
    seconds_per_hour=2556.0,
    lost_seconds=480.0,
    evidence={"data_wait_seconds_per_step": 0.071234567, "workers": 1.0, "cores_free": 7.0, "fetch_cpu_ratio": 0.98765},
    advice="Set num_workers to 4: the one worker computes all the time and 7 cores are free.",
)
LATE = replace(
    SYNC,
    rule="straggler",
    file=None,
    line=None,
    subject="rank 3",
    ranks=(3,),
    seconds_per_step=0.03,
    evidence={"cause": "CPU contention"},
    advice="Another process takes its core: bind ranks to cores of their own.",
)


def healthy(**changes: Any) -> RunView:
    """Two ranks on one node that train and do little else."""
    made = RunView(
        run_dir="gpulaunch-runs/demo",
        name="demo",
        run_id="aaaa",
        command=("gpulaunch", "--nproc", "2", "train.py"),
        status=Status.RUNNING,
        phase="running",
        live=False,
        made_s=SEEN_S + 1.0,
        seen_s=SEEN_S,
        began_s=BEGAN_S,
        ended_s=None,
        elapsed_seconds=750.0,
        exit_code=None,
        error="",
        world_size=2,
        num_nodes=1,
        attempts=(AttemptView(number=0, status=Status.RUNNING, began_s=BEGAN_S + 10),),
        attempt=0,
        restarts={},
        hang_suspicions=0,
        hangs=0,
        preempted=False,
        goodput_seconds={"productive": 700.0, "checkpoint_stall": 10.0, "startup": 40.0},
        goodput_ratio=0.933,
        steps=7000,
        steps_per_second_now=10.0,
        samples_per_second_now=640.0,
        step_seconds_now=0.1,
        phase_ratios_now=COMPUTE,
        recent_seconds=30.0,
        checkpoint_step=6500,
        resumed_step=None,
        times_s=tuple(BEGAN_S + 12.5 * (at + 1) for at in range(60)),
        interval_seconds=12.5,
        steps_per_second=ramp(10.0),
        samples_per_second=ramp(640.0),
        step_mean_seconds=tuple(None if value is None else 0.1 for value in ramp(10.0)),
        phase_ratios={name: tuple([share] * 60) for name, share in COMPUTE.items()},
        goodput_ratio_over_time=ramp(0.933),
        ranks=(rank(0), rank(1)),
        devices=(),
        nodes=(
            NodeView(
                node=0,
                host="trainer-0",
                seen_s=SEEN_S,
                values={
                    "memory_total_bytes": 64.0 * GIB,
                    "memory_available_bytes": 40.0 * GIB,
                    "shm_size_bytes": 8.0 * GIB,
                    "shm_used_bytes": 0.5 * GIB,
                },
                sidecar_cpu_seconds=3.0,
                sidecar_rss_bytes=30 << 20,
                refreshes=750,
                late_refreshes=0,
                memory_available_bytes=ramp(40.0 * GIB),
            ),
        ),
        collectors=(
            CollectorView(name="ranks", available=True, reason="", errors=0, spent_seconds=0.3),
            CollectorView(name="gpu", available=False, reason="no NVIDIA driver", errors=0, spent_seconds=0.0),
        ),
        findings=(),
        sites=(),
        events=(
            EventView(at_s=BEGAN_S, what="run_started", fields={"run_id": "aaaa", "pid": 3999}),
            EventView(at_s=BEGAN_S + 10, what="phase", fields={"phase": "running", "attempt": 0}),
        ),
        watched=True,
        notes=(),
    )
    return replace(made, **changes)


def input_bound() -> RunView:
    """Training waits for one worker, and reads its loss every step; on GPUs."""
    gpus = tuple(
        DeviceView(
            gpu=str(index),
            uuid=f"GPU-{index}",
            model="NVIDIA H200",
            values={
                "utilization_ratio": 0.24,
                "memory_used_bytes": 26.0 * GIB,
                "memory_total_bytes": 140.0 * GIB,
                "power_watts": 210.0,
                "temperature_celsius": 41.0,
                "xid_errors": float(index),
            },
            throttle_seconds={"power": 1.5 * index},
        )
        for index in range(2)
    )
    return healthy(
        ranks=(on_gpu(0, phase_ratios_now=STARVED), on_gpu(1, phase_ratios_now=STARVED)),
        phase_ratios_now=STARVED,
        findings=(STARVING, SYNC, replace(SYNC, rule="gc-pauses", file=None, line=None, active=False)),
        devices=gpus,
        sites=(
            SiteView(
                kind="item",
                text="train.py:88 main",
                ranks=(0, 1),
                count=14000,
                size_bytes=0,
                blocked_seconds=70.0,
                gpu_seconds=0.0,
                pinned=0,
                non_blocking=0,
            ),
            SiteView(
                kind="h2d",
                text="",
                ranks=(0,),
                count=7000,
                size_bytes=7000 << 20,
                blocked_seconds=21.0,
                gpu_seconds=4.2,
                pinned=0,
                non_blocking=7000,
            ),
        ),
    )


def straggling() -> RunView:
    """Four ranks: the others wait for rank 3, and nothing was heard of rank 2 for 40 s."""
    waiting = {**COMPUTE, "forward": 0.2, "comm": 0.26}
    slow = {**COMPUTE, "forward": 0.45, "comm": 0.01}
    ranks = (
        rank(0, waiting),
        rank(1, waiting),
        rank(2, waiting, last_step_s=SEEN_S - 40, steps_per_second_now=None, phase_ratios_now={}),
        rank(3, slow),
    )
    return healthy(world_size=4, ranks=ranks, findings=(LATE,))


def restarted() -> RunView:
    """The GPU ran out of memory once; the second attempt runs."""
    cause = CauseView(
        kind="gpu_oom",
        headline="rank 1: torch.OutOfMemoryError: tried to allocate 2.00 GiB",
        rank=1,
        why="the first of 2 ranks to end, 0.3 s before the other",
        advice="Halve the batch, or accumulate gradients.",
        report="attempts/0/failure.json",
    )
    return healthy(
        attempts=(
            AttemptView(number=0, status=Status.FAILED, began_s=BEGAN_S, ended_s=BEGAN_S + 60, cause=cause),
            AttemptView(number=1, status=Status.RUNNING, began_s=BEGAN_S + 64),
        ),
        attempt=1,
        restarts={"gpu_oom": 1},
        resumed_step=400,
        goodput_seconds={"productive": 600.0, "lost_work": 60.0, "restart": 50.0, "startup": 40.0},
        goodput_ratio=0.8,
    )


def failed() -> RunView:
    """The same, and the second attempt ended like the first: the run is over."""
    again = restarted()
    return replace(
        again,
        status=Status.FAILED,
        phase="done",
        ended_s=SEEN_S,
        exit_code=1,
        error="rank 1 failed again in the same way; no restarts are left",
        attempts=(again.attempts[0], replace(again.attempts[0], number=1, began_s=BEGAN_S + 64, ended_s=SEEN_S)),
        notes=("the newest telemetry is 3 s older than the end",),
    )


def finished() -> RunView:
    """All went well."""
    return healthy(
        status=Status.FINISHED,
        phase="done",
        ended_s=SEEN_S,
        exit_code=0,
        attempts=(AttemptView(number=0, status=Status.FINISHED, began_s=BEGAN_S + 10, ended_s=SEEN_S),),
    )


def stopped() -> RunView:
    """Somebody pressed Ctrl-C."""
    gone = {"rule": "gc-pauses", "file": None, "line": None, "subject": "", "seconds_per_hour": 180.0}
    return healthy(
        status=Status.STOPPED,
        phase="done",
        ended_s=SEEN_S,
        exit_code=130,
        stopped_by="SIGINT",
        attempts=(AttemptView(number=0, status=Status.STOPPED, began_s=BEGAN_S + 10, ended_s=SEEN_S),),
        events=(
            EventView(at_s=SEEN_S - 90, what="finding_gone", fields=gone),
            EventView(at_s=SEEN_S - 3, what="signalled", fields={"signal": "SIGINT", "preempted": False}),
        ),
    )


def crowd(number: int = 64) -> RunView:
    """Many ranks on nodes of eight; rank 37 is slow."""
    waiting = {**COMPUTE, "forward": 0.2, "comm": 0.26}
    ranks = tuple(
        rank(each, COMPUTE if each == 37 else waiting, node=each // 8, local_rank=each % 8) for each in range(number)
    )
    nodes = tuple(replace(healthy().nodes[0], node=each, host=f"trainer-{each}") for each in range(number // 8))
    return healthy(
        ranks=ranks,
        world_size=number,
        num_nodes=number // 8,
        nodes=nodes,
        findings=(replace(LATE, ranks=(37,), subject="rank 37"),),
    )


def nothing() -> RunView:
    """A directory in which nothing is known."""
    return healthy(
        name="",
        status=Status.UNKNOWN,
        phase="",
        seen_s=None,
        began_s=None,
        elapsed_seconds=None,
        world_size=None,
        num_nodes=None,
        attempts=(),
        attempt=None,
        goodput_seconds={},
        goodput_ratio=None,
        steps=None,
        steps_per_second_now=None,
        samples_per_second_now=None,
        step_seconds_now=None,
        phase_ratios_now={},
        checkpoint_step=None,
        times_s=(),
        interval_seconds=0.0,
        steps_per_second=(),
        samples_per_second=(),
        step_mean_seconds=(),
        phase_ratios={},
        goodput_ratio_over_time=(),
        ranks=(),
        nodes=(),
        collectors=(),
        events=(),
        watched=False,
        notes=("job.json is missing",),
    )


def hostile() -> RunView:
    """Every text of it would move the cursor, if it could."""
    view = input_bound()
    return replace(
        view,
        name=HOSTILE,
        run_dir=HOSTILE,
        phase=HOSTILE,
        error=HOSTILE,
        status=Status.FAILED,
        restarts={HOSTILE: 1},
        goodput_seconds={HOSTILE: 10.0},
        phase_ratios_now={HOSTILE: 1.0},
        notes=(HOSTILE,),
        attempts=(
            AttemptView(
                number=0,
                status=Status.FAILED,
                began_s=BEGAN_S,
                cause=CauseView(kind=HOSTILE, headline=HOSTILE, why=HOSTILE, advice=HOSTILE, report=HOSTILE),
            ),
        ),
        ranks=tuple(
            replace(
                each,
                step_source=HOSTILE,
                phase_ratios_now={HOSTILE: 1.0},
                phase_seconds={HOSTILE: 1.0},
                copies=(replace(each.copies[0], direction=HOSTILE, host_memory=HOSTILE),),
                syncs=(replace(each.syncs[0], kind=HOSTILE),),
                collectives=CollectiveView(calls={HOSTILE: 3}),
                cost=CostView(probe_seconds=0.1, parts_unavailable=(HOSTILE,), fault=HOSTILE),
                memory=MemoryView(rss_bytes={HOSTILE: 1}, gpu_bytes={HOSTILE: 1}),
                cores_now={HOSTILE: 1.0},
                rss_bytes={HOSTILE: ramp(1.0)},
                copy_bytes_per_second={HOSTILE: ramp(1.0)},
            )
            for each in view.ranks
        ),
        devices=tuple(
            replace(each, gpu=HOSTILE, model=HOSTILE, throttle_seconds={HOSTILE: 1.0}) for each in view.devices
        ),
        nodes=tuple(replace(each, host=HOSTILE) for each in view.nodes),
        collectors=(CollectorView(name=HOSTILE, available=False, reason=HOSTILE, errors=1, spent_seconds=0.0),),
        findings=(
            replace(SYNC, rule=HOSTILE, file=HOSTILE, subject=HOSTILE, advice=HOSTILE, evidence={HOSTILE: HOSTILE}),
        ),
        sites=(replace(view.sites[0], kind=HOSTILE, text=HOSTILE),),
        events=(EventView(at_s=BEGAN_S, what=HOSTILE, fields={HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]}),),
    )
