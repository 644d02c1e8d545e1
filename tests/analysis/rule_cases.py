"""For each rule: a node with its fault, the same node repaired, and what the repair saves per step (None: not time).

The test of all rules demands that the fault is found, alone, and that the repaired node is silent. A rule without a
case here fails that test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from healthy_node import (
    HEALTHY_MS,
    MIB,
    MS,
    NO_PAUSES,
    OWN_MS,
    STEPS,
    facts,
    fetching,
    gpu,
    gpu_memory,
    host,
    loader,
    memory,
    rank,
    site,
    window,
)

from gpulaunch.profiler.analysis.window import RankWindow, Window
from gpulaunch.profiler.record import CopyTotals
from gpulaunch.profiler.record.line_calls import CONVERTS_LISTS, OTHER_RANKS


@dataclass(frozen=True, kw_only=True)
class Case:
    fault: Window
    repaired: Window
    saves_ms: float | None = None
    file: str | None = None
    line: int | None = None
    subject: str = ""


def two_ranks(slow: dict[str, float]) -> Window:
    """Rank 1 is late by what `slow` is more than usual, and rank 0 waits for it in backward."""
    late_ms = sum(each - HEALTHY_MS[phase] for phase, each in slow.items())
    waiting = rank(0, phases_ms={"backward": HEALTHY_MS["backward"] + late_ms})
    fetch_ms = 160.0 if "data_wait" in slow else 80.0
    other_gpu = facts(device={"uuid": "GPU-1", "capability": [9, 0]})
    return window(waiting, rank(1, phases_ms=slow, facts=other_gpu, workers=fetching(fetch_ms)))


def in_double(**precision: str) -> dict[str, str | bool]:
    return {"parameters": "float64", "optimizer": "Adam", "autocast": False, "matmul": "highest", **precision}


def gradients(unused: int = 0, share: float = 0.0, untouched: int = 0, cleared: float = 0.0) -> dict[str, float | str]:
    """What a rank has read in the graphs of its backward passes, of a million parameters."""
    return {
        "elements": 1_000_000,
        "unused_elements": unused,
        "unused_share": share,
        "untouched_elements": untouched,
        "cleared_share": cleared,
        "cleared_at": "train.py:88 step",
    }


def head(rows: int, of_loss: int = 0) -> dict[str, float | str | bool]:
    """The same of a model half of which is the head that gives the scores of a cross-entropy."""
    return gradients() | {"head_rows": rows, "loss_rows": of_loss or rows, "loss_ignores": True, "head_share": 0.5}


def slow_optimizer(read: dict[str, float | str]) -> dict[str, Any]:
    return {"phases_ms": {"optimizer": 30.0}, "facts": facts(device=None, gradients=read)}


def looping_rank(nodes: int = 2000, **changes: Any) -> RankWindow:
    """A rank without a GPU, whose loss is computed by a loop: half of a step and most of a graph of short nodes."""
    seen = {
        "gpu": None,
        "facts": facts(device=None, graph={"nodes": nodes, "at_least": False}),
        "before_backward": 40,
        "looping": {"train.py:88": 30},
        "loop_ends": {"train.py:88": 93},
        "backward": {"train.py:99": 20},
        "samples": 70,
        "microsteps": STEPS,
    }
    return rank(phases_ms={"backward": 20.0}, **{**seen, **changes})


def watched_rank(**changes: Any) -> RankWindow:
    """A rank without a GPU, which waits half of its steps for the GIL that a thread with `watch` holds."""
    seen = {
        "gpu": None,
        "gil_waits": {"train.py watch": 20},
        "gil_lines": {("train.py watch", ""): 20, ("train.py watch", "train.py:88"): 20},
        "calls": {"train.py:88": "statistics.quantiles"},
    }
    return rank(**{**seen, **changes})


def sharded_rank(*, gathers: float, size_kib: float, parameters: float = 3.0) -> RankWindow:
    """A rank whose units FSDP gathers so often, and waits 20 ms of each step for."""
    told = {
        "reductions_per_step": 1.0,
        "seconds_per_reduction": 0.01,
        "gathers_per_reduction": 1.9,
        "gathers_per_step": gathers,
        "bytes_per_gather": 1024 * size_kib,
        "parameters_per_unit": parameters,
        "following_seconds_per_step": 0.020,
    }
    return rank(gpu=None, phases_ms={"comm": 30.0}, facts=facts(fsdp=told))


def reducing_again(number: int, *, same: bool = True) -> RankWindow:
    """A rank that reduces 12.6 MB at train.py:88 in 18 ms of each step."""
    at = "train.py:88 average"
    return rank(
        number,
        phases_ms={"comm": 20.0},
        sites=(site("collective", at, blocked_ns=18 * STEPS * MS),),
        facts=facts(reduced={"bytes": 12_600_000, "same": same, "line": at}),
    )


LOADER = {"file": "train.py", "line": 41}


def searching(*, in_vain: bool) -> dict[str, Any]:
    """What a rank knows of a large model of DDP that searches for unused parameters."""
    return {
        "modules": 1,
        "reductions_per_step": 1,
        "num_parameter_tensors": 2000,
        "site": "train.py:88",
        "searched_in_vain": in_vain,
    }


def decoding_all(number: int) -> RankWindow:
    """A rank whose dataset decodes the samples of all ranks before it drops those of others."""
    return rank(
        number,
        phases_ms={"data_wait": 40.0},
        loader=loader(workers=0, wait_ms=40.0),
        workers=fetching(batches=0),
        workers_cpu_s=0.0,
        facts=facts(loader={"num_workers": 0}),
        fetches=50,
        fetching={"train.py:7": 45},
        calls={"train.py:7": OTHER_RANKS},
    )


LINE = {"file": "train.py", "line": 88}
WELL = window()

OF_BOTH = facts(ddp={"modules": 1, "world_size": 2})
CASES: dict[str, Case] = {
    "dataloader-too-few-workers": Case(
        fault=window(
            rank(
                phases_ms={"data_wait": 60.0},
                loader=loader(workers=1, wait_ms=60.0),
                workers=fetching(OWN_MS + 60.0),
                facts=facts(loader={"num_workers": 1}),
            )
        ),
        repaired=window(rank(workers=fetching(OWN_MS + 60.0))),
        saves_ms=60.0,
        **LOADER,
    ),
    "dataloader-too-many-workers": Case(
        fault=window(
            rank(
                phases_ms={"data_wait": 80.0},
                loader=loader(workers=2, wait_ms=80.0, transfer_ms=78.0),
                workers=fetching(5.0),
            )
        ),
        repaired=window(
            rank(phases_ms={"data_wait": 5.0}, loader=loader(workers=0, wait_ms=5.0), workers=fetching(batches=0))
        ),
        saves_ms=75.0,
        **LOADER,
    ),
    "dataloader-slow-storage": Case(
        fault=window(
            rank(
                phases_ms={"data_wait": 60.0},
                loader=loader(wait_ms=60.0),
                workers=fetching(2 * (OWN_MS + 60.0), cpu=0.1, storage_bytes=900 * MIB),
            )
        ),
        repaired=window(rank(workers=fetching(20.0, cpu=0.9, cached_bytes=1000 * MIB))),
        saves_ms=60.0,
        **LOADER,
    ),
    "dataloader-slow-transform": Case(
        fault=window(
            rank(
                phases_ms={"data_wait": 60.0},
                loader=loader(wait_ms=60.0),
                workers=fetching(2 * (OWN_MS + 60.0)),
                workers_cpu_s=28.0,
            ),
            pressure_s={("cpu", "some"): 9.0},
            cores=2.4,
        ),
        repaired=window(rank(), pressure_s={("cpu", "some"): 9.0}, cores=2.4),
        saves_ms=60.0,
        **LOADER,
    ),
    "dataloader-head-of-line": Case(
        fault=window(
            rank(
                phases_ms={"data_wait": 60.0},
                loader=loader(workers=4, wait_ms=60.0, blocked_ms=58.0),
                workers=fetching(200.0, cpu=0.1),
            )
        ),
        repaired=window(rank(loader=loader(workers=4), workers=fetching(200.0, cpu=0.1))),
        saves_ms=58.0,
        **LOADER,
    ),
    "dataloader-lock": Case(
        fault=window(
            rank(
                phases_ms={"data_wait": 60.0},
                loader=loader(wait_ms=60.0),
                workers=fetching(2 * (OWN_MS + 60.0), cpu=0.3),
                fetches=100,
                locked=60,
                fetching={"train.py:88": 60, "train.py:89": 40},
            )
        ),
        repaired=window(rank(workers=fetching(2 * OWN_MS - 4.0, cpu=0.3), fetches=100, locked=10)),
        saves_ms=60.0,
        **LINE,
    ),
    "dataloader-pinned-workers": Case(
        fault=window(
            rank(
                phases_ms={"data_wait": 60.0},
                loader=loader(wait_ms=60.0),
                workers=fetching(2 * (OWN_MS + 60.0), cpu=0.5, runqueue=0.5),
                worker_cores=frozenset({3}),
            )
        ),
        repaired=window(rank(worker_cores=frozenset(range(16)))),
        saves_ms=60.0,
        **LOADER,
    ),
    "unpinned-copies": Case(
        fault=window(
            rank(
                phases_ms={"h2d": 30.0},
                sites=(site("h2d", size_bytes=STEPS * 200 * MIB, blocked_ns=30 * STEPS * MS, gpu_ns=20 * STEPS * MS),),
                facts=facts(loader={"pin_memory": False}),
            ),
            gpus=(gpu(utilization_ratio=0.6),),
        ),
        repaired=window(
            rank(
                sites=(
                    site("h2d", size_bytes=STEPS * 200 * MIB, blocked_ns=STEPS * MS, pinned=STEPS, non_blocking=STEPS),
                )
            )
        ),
        saves_ms=30.0,
        **LINE,
    ),
    "blocking-copies": Case(
        fault=window(
            rank(
                phases_ms={"h2d": 30.0},
                sites=(site("h2d", size_bytes=STEPS * 200 * MIB, blocked_ns=30 * STEPS * MS, pinned=STEPS),),
            ),
            gpus=(gpu(utilization_ratio=0.6),),
        ),
        repaired=window(rank(sites=(site("h2d", blocked_ns=STEPS * MS, pinned=STEPS, non_blocking=STEPS),))),
        saves_ms=30.0,
        **LINE,
    ),
    "sync-every-step": Case(
        fault=window(
            rank(phases_ms={"sync": 40.0}, sites=(site("item", blocked_ns=40 * STEPS * MS),)),
            gpus=(gpu(utilization_ratio=0.9),),
        ),
        repaired=window(rank(sites=(site("item", count=STEPS // 10, blocked_ns=4 * STEPS * MS),))),
        saves_ms=0.1 * (sum(HEALTHY_MS.values()) + 39.0),  # no more than the GPU idles
        **LINE,
    ),
    "tensor-built-on-cpu": Case(
        fault=window(
            rank(sites=(site("built_on_cpu", "built at train.py:88, moved at train.py:90", blocked_ns=3 * STEPS * MS),))
        ),
        repaired=WELL,
        saves_ms=3.0,
        **LINE,
    ),
    "dataparallel": Case(
        fault=window(
            rank(
                copies={
                    ("d2d", ""): CopyTotals(count=STEPS, size_bytes=STEPS * MIB, blocked_ns=0, gpu_ns=9 * STEPS * MS)
                },
                facts=facts(dataparallel="train.py:88 main"),
            ),
            gpus=(gpu(0, memory_used_bytes=60000 * MIB), gpu(1, memory_used_bytes=20000 * MIB), gpu(2)),
        ),
        repaired=WELL,
        saves_ms=9.0,
        **LINE,
    ),
    "fp32-on-tensor-cores": Case(
        fault=window(
            rank(facts=facts(precision={"parameters": "float32", "autocast": False, "matmul": "highest"})),
            gpus=(gpu(ratios={"sm_active": 0.8, "tensor_active": 0.0, "fp32_active": 0.6}),),
        ),
        repaired=window(
            rank(facts=facts(precision={"parameters": "float32", "autocast": False, "matmul": "high"})),
            gpus=(gpu(ratios={"sm_active": 0.8, "tensor_active": 0.5, "fp32_active": 0.1}),),
        ),
        saves_ms=30.0,
    ),
    "float64-parameters": Case(
        fault=window(rank(facts=facts(precision=in_double(default="float32")))),
        repaired=window(rank(facts=facts(precision=in_double(default="float64")))),
        saves_ms=0.5 * sum(HEALTHY_MS[phase] for phase in ("forward", "backward", "optimizer")),
    ),
    "padded-batches": Case(
        fault=window(rank(gpu=None, facts=facts(device=None, padding={"width": 512, "unneeded": 0.71, "padded": 0.8}))),
        repaired=window(
            rank(gpu=None, facts=facts(device=None, padding={"width": 144, "unneeded": 0.03, "padded": 0.4}))
        ),
        saves_ms=0.71 * sum(HEALTHY_MS[phase] for phase in ("forward", "backward")),
    ),
    "gradients-unused": Case(
        fault=window(rank(gpu=None, facts=facts(device=None, gradients=gradients(unused=598_280, share=0.6)))),
        repaired=window(rank(gpu=None, facts=facts(device=None, gradients=gradients()))),
        saves_ms=0.6 * HEALTHY_MS["backward"],
    ),
    "targets-ignored": Case(
        fault=window(
            rank(
                gpu=None,
                scores_line="train.py:88",
                facts=facts(device=None, gradients=head(rows=1024), targets={"rows": 1024, "ignored": 0.85}),
            )
        ),
        repaired=window(
            rank(
                gpu=None,
                scores_line="train.py:88",
                facts=facts(device=None, gradients=head(rows=154), targets={"rows": 1024, "ignored": 0.85}),
            )
        ),
        saves_ms=0.85 * 0.5 * sum(HEALTHY_MS[phase] for phase in ("forward", "backward")),
        **LINE,
    ),
    "gradients-cleared": Case(
        fault=window(rank(gpu=None, facts=facts(device=None, gradients=gradients(cleared=0.2)))),
        repaired=window(rank(gpu=None, facts=facts(device=None, gradients=gradients()))),
        saves_ms=0.2 * HEALTHY_MS["backward"],
        **LINE,
    ),
    "backward-repeated": Case(
        fault=window(rank(gpu=None, microsteps=4 * STEPS, facts=facts(graph={"nodes": 40, "repeated": 0.6}))),
        repaired=window(rank(gpu=None, facts=facts(graph={"nodes": 40, "repeated": 0.0}))),
        saves_ms=0.6 * HEALTHY_MS["backward"],
    ),
    "embedding-gradient-dense": Case(
        fault=window(rank(gpu=None, **slow_optimizer(gradients(untouched=990_000)))),
        repaired=window(rank(gpu=None, **slow_optimizer(gradients()))),
        saves_ms=0.99 * 30.0,
    ),
    "host-memory-growth": Case(
        fault=window(rank(memory=memory(trainer_mib=100))),
        repaired=window(rank(memory=memory(trainer_mib=1))),
        subject="trainer",
    ),
    "gpu-memory-growth": Case(
        fault=window(rank(memory=memory(gpu_mib=100))), repaired=window(rank(memory=memory(gpu_mib=1))), subject="GPU"
    ),
    "gpu-memory-fragmented": Case(
        fault=window(rank(gpu=gpu_memory(inactive_split_bytes=4000 * MIB, alloc_retries=12))),
        repaired=window(rank(gpu=gpu_memory(inactive_split_bytes=4000 * MIB, alloc_retries=0))),
    ),
    "shm-nearly-full": Case(
        fault=window(host=host(shm_size_bytes=64 * MIB, shm_used_bytes=60 * MIB)), repaired=WELL, **LOADER
    ),
    "straggler": Case(
        fault=two_ranks({"forward": 60.0}), repaired=two_ranks({"forward": 31.0}), saves_ms=30.0, subject="rank 1"
    ),
    "small-collectives": Case(
        fault=window(
            rank(
                phases_ms={"comm": 20.0},
                sites=(site("small_collective", count=40 * STEPS, blocked_ns=20 * STEPS * MS, gpu_ns=19 * STEPS * MS),),
            )
        ),
        repaired=window(rank(phases_ms={"comm": 20.0}, sites=(site("small_collective", blocked_ns=20 * STEPS * MS),))),
        saves_ms=19.0,
        **LINE,
    ),
    "redundant-all-reduce": Case(
        fault=window(reducing_again(0), reducing_again(1)),
        repaired=window(reducing_again(0), reducing_again(1, same=False)),
        saves_ms=18.0,
        **LINE,
    ),
    "dataloader-lists": Case(
        fault=window(
            rank(
                phases_ms={"data_wait": 40.0},
                loader=loader(workers=0, wait_ms=40.0),
                workers=fetching(batches=0),
                workers_cpu_s=0.0,
                facts=facts(loader={"num_workers": 0}),
                fetches=50,
                fetching={"collate.py:7": 45},
                calls={"collate.py:7": CONVERTS_LISTS},
            )
        ),
        repaired=window(rank(fetches=50, fetching={"collate.py:7": 4}, calls={"collate.py:7": CONVERTS_LISTS})),
        saves_ms=36.0,
        **LOADER,
    ),
    "dataloader-samples-dropped": Case(
        fault=window(decoding_all(0), decoding_all(1)),
        repaired=window(*(rank(each, fetches=50, fetching={"train.py:7": 4}) for each in range(2))),
        saves_ms=18.0,
        file="train.py",
        line=7,
    ),
    "dataloader-one-rank": Case(
        fault=window(
            rank(
                phases_ms={"data_wait": 40.0},
                loader=loader(wait_ms=40.0),
                facts=OF_BOTH,
                sites=(site("collective", blocked_ns=5 * STEPS * MS),),
            ),
            rank(
                1,
                phases_ms={"comm": 45.0},
                loader=loader(batches=0),
                facts=OF_BOTH,
                sites=(site("collective", blocked_ns=45 * STEPS * MS),),
            ),
        ),
        repaired=window(
            rank(
                phases_ms={"data_wait": 2.0},
                loader=loader(wait_ms=2.0),
                facts=OF_BOTH,
            ),
            rank(
                1,
                phases_ms={"data_wait": 2.0},
                loader=loader(wait_ms=2.0),
                facts=OF_BOTH,
            ),
        ),
        saves_ms=25.0,
        subject="rank 0",
        **LOADER,
    ),
    "fsdp-small-units": Case(
        fault=window(sharded_rank(gathers=13, size_kib=32)),
        repaired=window(sharded_rank(gathers=3, size_kib=300)),
        saves_ms=17.5,
    ),
    "reduced-in-accumulation": Case(
        fault=window(
            rank(
                gpu=None,
                phases_ms={"comm": 40.0},
                microsteps=4 * STEPS,
                facts=facts(ddp={"modules": 1, "reductions_per_step": 4}),
                backward={"train.py:88": 9, "train.py:12": 1},
            )
        ),
        repaired=window(
            rank(
                gpu=None,
                phases_ms={"comm": 10.0},
                microsteps=4 * STEPS,
                facts=facts(ddp={"modules": 1, "reductions_per_step": 1}),
            )
        ),
        saves_ms=30.0,
        **LINE,
    ),
    "unused-parameters-searched": Case(
        fault=window(rank(gpu=None, facts=facts(ddp=searching(in_vain=True)))),
        repaired=window(rank(gpu=None, facts=facts(ddp=searching(in_vain=False)))),
        saves_ms=0.8 + 2000 * 0.006,
        **LINE,
    ),
    "checkpoint-stall": Case(
        fault=window(
            rank(phases_ms={"checkpoint": 20.0}, sites=(site("save", count=4, blocked_ns=20 * STEPS * MS),)),
        ),
        repaired=window(rank(phases_ms={"checkpoint": 2.0}, sites=(site("save", count=4, blocked_ns=2 * STEPS * MS),))),
        saves_ms=20.0,
        **LINE,
    ),
    "logging-stall": Case(
        fault=window(
            rank(
                samples=20,
                logged={"train.py:88": 15, "train.py:89": 1},
            )
        ),
        repaired=window(rank(samples=40, logged={"train.py:88": 1})),
        saves_ms=75.0,
        **LINE,
    ),
    "dataloader-workers-restarted": Case(
        fault=window(
            rank(
                phases_ms={"data_wait": 32.0},
                loader=loader(wait_ms=32.0, epochs=2, first_wait_ms=1580.0),
                facts=facts(loader={"persistent_workers": False}),
            )
        ),
        repaired=window(
            rank(
                loader=loader(epochs=2, first_wait_ms=100.0),
                facts=facts(loader={"persistent_workers": False}),
            )
        ),
        saves_ms=2 * 1500.0 / STEPS,
        **LOADER,
    ),
    "frequent-validation": Case(
        fault=window(rank(phases_ms={"validation": 60.0}, validation_share=0.375)),
        repaired=window(rank(phases_ms={"validation": 60.0}, validation_share=0.1)),
        saves_ms=48.9,
    ),
    "hot-line": Case(
        fault=window(
            rank(
                gpu=None,
                samples=20,
                calling={"train.py:88": 15, "train.py:89": 1},
                calls={"train.py:88": "copy.deepcopy"},
            ),
        ),
        repaired=window(rank(gpu=None, samples=40, calling={"train.py:88": 1})),
        saves_ms=75.0,
        **LINE,
    ),
    "small-operations-loop": Case(
        fault=window(looping_rank()),
        repaired=window(looping_rank(looping={})),
        saves_ms=24.0 + 16.0,  # 30 of 40 samples of 32 ms, and so much of backward; nodes of 10 us are all torch's own
        **LINE,
    ),
    "gil-contention": Case(
        fault=window(watched_rank()),
        repaired=window(watched_rank(gil_waits={"train.py watch": 2})),
        saves_ms=50.0 - HEALTHY_MS["data_wait"],
        **LINE,
    ),
    "omp-oversubscribed": Case(
        fault=window(
            rank(trainer_cpu_s=140.0, trainer_runqueue_s=140.0, facts=facts(torch_threads=32)),
            pressure_s={("cpu", "some"): 9.5},
        ),
        repaired=window(rank(trainer_cpu_s=140.0, facts=facts(torch_threads=16))),
        saves_ms=(1.0 - 0.5**1.5) * sum(HEALTHY_MS[phase] for phase in ("forward", "backward", "optimizer")),
    ),
    "gc-pauses": Case(
        fault=window(
            rank(phases_ms={"gc": 20.0}, pauses=replace(NO_PAUSES, gc_collections=10, gc_ns_total=20 * STEPS * MS)),
        ),
        repaired=window(
            rank(phases_ms={"gc": 0.5}, pauses=replace(NO_PAUSES, gc_collections=10, gc_ns_total=STEPS * MS // 2))
        ),
        saves_ms=20.0,
    ),
    "recompiles": Case(
        fault=window(
            rank(phases_ms={"compile": 20.0}, pauses=replace(NO_PAUSES, compiles=10, compile_ns_total=20 * STEPS * MS)),
        ),
        repaired=WELL,
        saves_ms=20.0,
    ),
    "throttled": Case(
        fault=window(gpus=(gpu(0, throttle_s={"hw_thermal": 8.0}, sm_clock_hertz=0.95e9), gpu(1), gpu(2))),
        repaired=window(gpus=(gpu(0, throttle_s={"power_cap": 10.0}), gpu(1), gpu(2))),
        saves_ms=0.8 * 0.5 * sum(HEALTHY_MS.values()),
        subject="GPU 0",
    ),
    "numa-mismatch": Case(
        fault=window(rank(cpu_nodes=frozenset({1}))),
        repaired=window(rank(cpu_nodes=frozenset({0, 1}))),
        subject="rank 0",
    ),
}
