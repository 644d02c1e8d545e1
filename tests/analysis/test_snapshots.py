"""Windows are cut where enough has happened; what is kept of the past stays bounded."""

from __future__ import annotations

import pytest
from made_up_node import MIB, Node, Rank, device

from gpulaunch.profiler.analysis.snapshots import Snapshots
from gpulaunch.profiler.analysis.window import Window


def windows(history: Snapshots, node: Node, seconds: int, **ms: float) -> list[Window]:
    """Train so long, and look every second."""
    looks = (history.look(node.train(1.0, **ms)) for _ in range(seconds))
    return [window for window in looks if window is not None]


def warm() -> tuple[Snapshots, Node]:
    history, node = Snapshots(), Node()
    history.look(node.look())
    history.look(node.train(1.0))
    return history, node


def test_the_first_steps_are_in_no_window() -> None:
    history, node = Snapshots(), Node()
    history.look(node.look())
    node.ranks[0].step(9, compile=60_000.0)
    node.now_s += 600.0
    assert history.look(node.look()) is None

    (window,) = windows(history, node, 6)

    assert window.ranks[0].phase_s("compile") == 0.0
    assert window.seconds == 5.0


def test_a_window_is_five_seconds_long() -> None:
    history, node = warm()

    found = windows(history, node, 17)

    assert [(window.seconds, window.ranks[0].steps) for window in found] == [(5.0, 50)] * 3


def test_what_is_left_after_the_last_window_ends_with_the_last_step() -> None:
    history, node = warm()
    windows(history, node, 17)

    last = history.last_window()

    assert last is not None
    assert last.longer is not None
    assert (last.seconds, last.ranks[0].steps, last.longer.ranks[0].steps) == (2.0, 20, 170)
    assert Snapshots().last_window() is None


def test_slow_steps_make_longer_windows() -> None:
    """A step in three seconds: twenty of them take a minute, and after a minute four would do."""
    history, node = warm()
    found: list[Window] = []
    for _ in range(100):
        node.ranks[0].step()
        node.now_s += 3.0
        if (window := history.look(node.look())) is not None:
            found.append(window)

    assert {(window.seconds, window.ranks[0].steps) for window in found} == {(60.0, 20)}


def test_very_slow_steps_are_judged_by_four() -> None:
    history, node = warm()
    found: list[Window] = []
    for _ in range(13):
        node.ranks[0].step()
        node.now_s += 40.0
        if (window := history.look(node.look())) is not None:
            found.append(window)

    assert [window.ranks[0].steps for window in found] == [4, 4, 4]


def test_what_a_program_does_after_its_last_step_is_in_no_window() -> None:
    """Such as writing its results for a minute; if there is another step, it was a long pause in one."""
    history, node = warm()
    windows(history, node, 7)
    for _ in range(60):
        node.now_s += 1.0
        assert history.look(node.look()) is None
    last = history.last_window()
    assert last is not None
    assert (last.seconds, last.ranks[0].steps) == (2.0, 20)

    (window,) = windows(history, node, 1)
    assert (window.seconds, window.ranks[0].steps) == (63.0, 30)


def test_a_few_slow_steps_are_a_run_all_the_same() -> None:
    for step_s, judged in ((2.0, False), (8.0, True)):
        history, node = warm()
        for _ in range(10):
            node.ranks[0].step()
            node.now_s += step_s
            history.look(node.look())
        whole = history.short_run()
        assert whole is not None
        assert [each.steps for each in whole.ranks] == [10] * judged


def test_without_steps_there_is_no_window() -> None:
    history, node = warm()
    node.now_s += 3600.0

    assert history.look(node.look()) is None


def test_without_a_group_there_is_no_window() -> None:
    node = Node(group=False)

    assert windows(Snapshots(), node, 20) == []


def test_pages_that_come_later_than_the_group_are_waited_for() -> None:
    """The agent names its ranks before they have armed: the first snapshots have no training in them."""
    history, node = Snapshots(), Node(ranks=[])
    history.look(node.look())
    node.ranks.append(Rank(steps=500))

    assert len(windows(history, node, 12)) == 2


def test_a_restart_begins_from_nothing() -> None:
    history, node = warm()
    windows(history, node, 12)
    node.attempt += 1

    (window,) = windows(history, node, 7)

    assert window.longer is None
    assert len(window.ranks[0].memory) == 1


def test_the_longer_window_ends_with_this_one_and_forgets_in_the_end() -> None:
    history, node = warm()

    found = windows(history, node, 2000)

    assert found[0].longer is None
    assert found[1].longer is not None
    assert (found[1].seconds, found[1].longer.seconds) == (5.0, 10.0)
    assert found[1].over is found[1].longer
    later = [window.longer.seconds for window in found[60:] if window.longer is not None]
    assert min(later) >= 300.0
    assert max(later) <= 605.0


def test_memory_is_told_by_its_lowest() -> None:
    """Within a step there is more of it than between two."""
    history, node = warm()
    one = node.ranks[0]
    one.gpu_bytes = 1
    for look in range(10):
        one.trainer_bytes = (1000 + 500 * (look % 2)) * MIB
        one.gpu_bytes = (100 + 50 * (look % 3)) * MIB
        window = history.look(node.train(1.0))

    assert window is not None
    assert {point.trainer_bytes for point in window.ranks[0].memory} == {1001 * MIB}, (
        "a batch in shared memory included"
    )
    assert {point.gpu_bytes for point in window.ranks[0].memory} == {100 * MIB}


def test_what_files_take_of_memory_is_in_no_trend() -> None:
    """A dataset that is mapped fills the page cache, and with it the resident memory of whoever reads it."""
    history, node = warm()

    *_, last = windows(history, node, 6)

    (point,) = last.ranks[0].memory
    assert (point.trainer_bytes, point.workers_bytes) == (1001 * MIB, 200 * MIB)


def test_batches_that_are_kept_are_memory_of_the_rank() -> None:
    history, node = warm()
    kept: list[int | None] = []
    for _ in range(12):
        node.ranks[0].inflight_bytes += 10 * MIB
        if (window := history.look(node.train(1.0))) is not None:
            kept.append(window.ranks[0].memory[-1].trainer_bytes)

    assert kept == [1011 * MIB, 1061 * MIB]


def test_what_is_not_known_of_host_memory_leaves_the_gpus() -> None:
    """A /proc that keeps processes to itself: the page still tells of the GPU."""
    history, node = warm()
    one = node.ranks[0]
    one.trainer_bytes = one.workers_bytes = None
    one.gpu_bytes = 7 * MIB

    *_, last = windows(history, node, 6)

    (point,) = last.ranks[0].memory
    assert (point.trainer_bytes, point.workers_bytes, point.gpu_bytes) == (None, None, 7 * MIB)


def test_the_trend_reaches_back_to_the_start_in_few_points() -> None:
    history, node = warm()

    *_, last = windows(history, node, 3600)

    points = last.ranks[0].memory
    assert len(points) < 24
    assert points[0].at_s < 1010.0
    assert points[-1].at_s > node.now_s - 600.0


def test_ratios_of_gpus_are_means_over_the_window() -> None:
    history, node = warm()
    found: list[Window] = []
    for look in range(6):
        node.devices = (device(utilization_ratio=float(look % 2), gpm_ratios={"sm_active": 0.1 * look}),)
        if (window := history.look(node.train(1.0))) is not None:
            found.append(window)

    (window,) = found
    assert window.gpus[0].state.utilization_ratio == pytest.approx(0.4)
    assert window.gpus[0].state.gpm_ratios == {"sm_active": pytest.approx(0.2)}
