"""What a part of the probe told before it was out of service says nothing of now."""

from __future__ import annotations

from dataclasses import replace

from kept_run import state

from gpulaunch.exporters.tui.once import once
from gpulaunch.exporters.view.live import view_of_state
from gpulaunch.exporters.view.rank_model import LoaderView
from gpulaunch.profiler.record import NodeState


def of_rank_0(seen: NodeState) -> LoaderView:
    loader = view_of_state(seen, earlier=state(5.0)).ranks[0].loader
    assert loader is not None
    return loader


def test_of_a_queue_that_nobody_reads_nothing_is_told() -> None:
    seen = state(10.0)
    read = of_rank_0(seen)
    rank_0, *others = seen.training
    off = replace(seen, training=(replace(rank_0, hooks_unavailable=("loader_queue",)), *others))
    unread = of_rank_0(off)

    assert (read.ready, read.outstanding, read.transfer_seconds, read.reorder_blocked_seconds) == (2, 4, 0.0, 0.0)
    assert (unread.ready, unread.outstanding) == (None, None)
    assert (unread.transfer_seconds, unread.reorder_blocked_seconds) == (None, None)
    assert (unread.batches, unread.batch_bytes) == (read.batches, read.batch_bytes), "they are counted all the same"
    assert "-/-" in once(view_of_state(off, earlier=state(5.0)), 100)
