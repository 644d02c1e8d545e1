"""How many series a node has at the most: so many for each rank, so many for each GPU, so many for itself.

Whoever pays for a Prometheus counts series. A new metric is a decision about every rank of every job, so the sums are
frozen here: a change of one is an argument to be made, as for the names in test_catalogue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE
from gpulaunch.exporters.prometheus.values import Facts, families
from gpulaunch.profiler.analysis.rules import RULES
from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.channel.collectives import KINDS
from gpulaunch.profiler.record import (
    GOODPUT_BUCKETS,
    RESTART_KINDS,
    THROTTLE_REASONS,
    Collector,
    CopyTotals,
    Finding,
    GpuState,
    NodeState,
    Role,
    SyncTotals,
)
from gpulaunch.profiler.samplers.nvml.gpm import RATIOS
from gpulaunch.profiler.samplers.phases import STACK_PHASES
from gpulaunch.profiler.xid import XIDS

FACTS = Facts(version="1", scrapes=1, render_s=0.1)

A_RANK = 177
"""Of which 34 are the two histograms, 36 every kind of copy and wait, 12 every kind of collective, and 11 the parts of
the probe that are out of service, of which most ranks have none. With the few kinds that a program uses it is about
127."""
A_GPU = 40
"""Of one that is well; there may be as many more as there are numbers in XIDS, and one for all others."""
A_NODE = 36
SETS_OF_A_NODE = 3 * len(Collector) + 2 * len(RULES) + len(RESTART_KINDS) + len(STACK_PHASES)
"""How each collector does; and what there is only where something was found, has ended an attempt, or was sampled. They
are the same few for whatever node, beside the 1736 series of 8 ranks and 8 GPUs."""


@pytest.mark.parametrize(("ranks", "gpus"), [(1, 0), (1, 1), (8, 8), (64, 8)])
def test_a_node_has_as_many_series_as_its_ranks_and_gpus_cost(node: NodeState, ranks: int, gpus: int) -> None:
    assert series(filled(node, ranks, gpus)) == A_NODE + SETS_OF_A_NODE + ranks * A_RANK + gpus * A_GPU


def test_a_driver_that_reports_every_number_there_is_adds_few(node: NodeState) -> None:
    assert series(filled(node, 8, 8, xids=range(100_000))) - series(filled(node, 8, 8)) == 8 * (len(XIDS) + 1)


def test_every_metric_of_the_catalogue_is_in_the_budget(node: NodeState) -> None:
    """What `filled` forgets would cost nothing."""
    told = {family.name for family in families(filled(node, 1, 1, xids=[79]), FACTS).collect()}
    forgotten = [
        metric.name for metric in CATALOGUE if metric.name.removesuffix("_total").removesuffix("_info") not in told
    ]
    assert forgotten == []


def filled(node: NodeState, ranks: int, gpus: int, *, xids: Iterable[int] = ()) -> NodeState:
    """Everything that can be known of so many, on the node that the other tests have."""
    assert node.group is not None
    assert node.host is not None
    assert node.run is not None
    assert node.stacks is not None
    busy, (seen,), (workers,), collectives = node.training[0], node.processes, node.workers, node.collectives[0]
    (card,), health, found, place = node.devices, node.gpus[0], node.findings[0], node.group.ranks[0]
    parts = tuple((hook.name or "").lower() for hook in layout.Hook)
    copied = CopyTotals(count=1, size_bytes=1, blocked_ns=1, gpu_ns=1)
    usage = dataclasses.replace(seen.usage[Role.TRAINER], pss_bytes=1)
    return dataclasses.replace(
        node,
        group=dataclasses.replace(
            node.group, ranks=tuple(dataclasses.replace(place, rank=rank) for rank in range(ranks))
        ),
        training=tuple(
            dataclasses.replace(
                busy,
                rank=rank,
                copies=dict.fromkeys(layout.COPIES, copied),
                syncs=dict.fromkeys(layout.SYNCS, SyncTotals(calls=1, blocked_ns=1)),
                # what these two tell goes with them
                hooks_unavailable=tuple(part for part in parts if part not in ("loader_queue", "nested")),
                facts={"device": {"uuid": f"GPU-{rank % gpus if gpus else 'x'}"}},
            )
            for rank in range(ranks)
        ),
        processes=tuple(
            dataclasses.replace(seen, rank=rank, usage=dict.fromkeys(Role, usage), runqueue_s=dict.fromkeys(Role, 1.0))
            for rank in range(ranks)
        ),
        workers=tuple(dataclasses.replace(workers, rank=rank) for rank in range(ranks)),
        collectives=tuple(
            dataclasses.replace(collectives, rank=rank, calls=dict.fromkeys(KINDS, 1)) for rank in range(ranks)
        ),
        devices=tuple(whole(card, index) for index in range(gpus)),
        gpus=tuple(
            dataclasses.replace(health, index=index, uuid=f"GPU-{index}", xids=dict.fromkeys(xids, 1))
            for index in range(gpus)
        ),
        host=dataclasses.replace(
            node.host,
            memory_total_bytes=2,
            memory_available_bytes=1,
            page_cache_bytes=1,
            swap_used_bytes=1,
            pressure_s=dict.fromkeys(
                [("cpu", "some"), *((each, how) for each in ("io", "memory") for how in ("some", "full"))], 1.0
            ),
        ),
        run=dataclasses.replace(
            node.run,
            goodput_ns=dict.fromkeys(GOODPUT_BUCKETS, 1),
            restarts=dict.fromkeys(RESTART_KINDS, 1),
            stalled_since_ns=dict.fromkeys(range(ranks), 1),
        ),
        stacks=dataclasses.replace(node.stacks, samples=dict.fromkeys(STACK_PHASES, 1)),
        findings=tuple(of_rule(found, rule.id, line) for rule in RULES for line in range(3)),
        collectors=dict.fromkeys(Collector, node.collectors[Collector.RANKS]),
    )


def whole(card: GpuState, index: int) -> GpuState:
    return dataclasses.replace(
        card,
        index=index,
        uuid=f"GPU-{index}",
        throttle_seconds=dict.fromkeys(THROTTLE_REASONS, 1.0),
        gpm_ratios=dict.fromkeys(RATIOS, 0.5),
    )


def of_rule(found: Finding, rule: str, line: int) -> Finding:
    return dataclasses.replace(found, rule=rule, line=line)


def series(state: NodeState) -> int:
    samples = [sample for family in families(state, FACTS).collect() for sample in family.samples]
    told = {(sample.name, frozenset(sample.labels.items())) for sample in samples}
    assert len(told) == len(samples), "one value for each"
    return len(told)
