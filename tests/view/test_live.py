"""What a running sidecar shows: this moment from memory, the rest from its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kept_run import GC, SYNC, announce, state
from runs_on_disk import NOW_S, begin, end, keep

from gpulaunch.exporters.store.telemetry_writer import TelemetryWriter
from gpulaunch.exporters.view.as_json import to_json
from gpulaunch.exporters.view.live import view_of_state
from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import Status
from gpulaunch.profiler.record import CopyTotals, StackState, SyncTotals


def test_a_state_alone_is_a_view() -> None:
    view = view_of_state(state(10.0, findings=(SYNC,), gpu=True), earlier=state(5.0))

    json.dumps(to_json(view), allow_nan=False)
    assert (view.status, view.live, view.name, view.steps) == (Status.RUNNING, True, "demo", 100)
    assert view.steps_per_second_now == pytest.approx(10.0)
    assert view.recent_seconds == pytest.approx(5.0)
    assert (view.times_s, view.notes) == ((), ())
    assert [finding.rule for finding in view.findings] == ["sync-every-step"]
    assert view.devices[0].values["power_watts"] == 350.0


def test_before_the_first_look_back_there_is_no_pace() -> None:
    view = view_of_state(state(10.0))

    assert (view.steps, view.steps_per_second_now, view.phase_ratios_now) == (100, None, {})


def test_history_is_of_the_file_and_now_is_of_the_state(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    begin(run_dir, pid=2**22 + 1)
    keep(run_dir, [state(second, findings=(SYNC,)) for second in range(1, 60)])

    view = view_of_state(state(60.0, findings=(GC,)), run_dir=run_dir)

    assert (view.status, view.steps) == (Status.RUNNING, 600)
    assert len(view.steps_per_second) > 50
    assert view.steps_per_second_now == pytest.approx(10.0, abs=0.1)
    assert [(finding.rule, finding.active) for finding in view.findings] == [
        ("gc-pauses", True),
        ("sync-every-step", False),
    ]


def test_of_a_gpu_that_is_gone_nothing_is_told_as_now(tmp_path: Path) -> None:
    """As on the metrics page. What it has done stays, and so does what a rank had that has ended."""
    run_dir = tmp_path / "run"
    begin(run_dir)
    there = [state(second, gpu=True) for second in range(1, 60)]
    keep(run_dir, [*there, *(state(second, ranks=(0,)) for second in range(60, 90))])

    of_sidecar = view_of_state(state(90.0, ranks=(0,)), run_dir=run_dir, earlier=state(85.0, ranks=(0,)))
    for view in (of_sidecar, load_run(run_dir, now_s=NOW_S)):
        (device,) = view.devices
        assert {"utilization_ratio", "power_watts", "memory_used_bytes"}.isdisjoint(device.values)
        assert (device.model, device.values["energy_joules"]) == ("NVIDIA H200", 350.0 * 59)
        assert device.curves["power_watts"]
        assert view.ranks[1].memory.gpu_bytes["allocated"] == 1 << 20


def test_nor_where_the_sidecar_was_killed_before_it_wrote_that_down(tmp_path: Path) -> None:
    """The last document is some seconds older than the last look."""
    run_dir = tmp_path / "run"
    begin(run_dir)
    announce(tmp_path / "channel", run_dir)
    keeper = TelemetryWriter(tmp_path / "channel")
    for second in range(1, 20):
        keeper.write_now(state(second, gpu=second < 15))

    (device,) = load_run(run_dir, now_s=NOW_S).devices
    keeper.write_now(None, last=True)

    assert device.values == {"energy_joules": 350.0 * 14, "pcie_receive_bytes": 14 << 20, "pcie_transmit_bytes": 0.0}


def test_a_new_run_in_an_old_directory_shows_nothing_of_the_old_one_as_its_own(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 60)])
    end(run_dir, 60)
    begin(run_dir, run_id="bbbb")
    fresh = state(2.0, run_id="bbbb")
    fresh = replace(fresh, taken_wall_ns=fresh.taken_wall_ns + 10**12)

    view = view_of_state(fresh, run_dir=run_dir)

    assert (view.run_id, view.steps, view.steps_per_second_now) == ("bbbb", 20, None)
    assert view.ranks[0].phase_seconds["forward"] == pytest.approx(1.5)


def test_a_label_that_nobody_knows_costs_what_it_says_and_no_more() -> None:
    """Of a newer driver, say: everything else is told, and the page is no error."""
    odd = "none we know"
    before = state(10.0, gpu=True)
    (gpu,) = before.devices
    assert before.host is not None
    assert before.run is not None
    planted = replace(
        before,
        devices=(
            replace(
                gpu,
                throttle_seconds={"power_cap": 2.0, odd: 1.0},
                pcie_bytes={**gpu.pcie_bytes, odd: 1},
                nvlink_bytes={odd: 1},
                remapped_rows={odd: 1},
                gpm_ratios={"sm_active": 0.5, odd: 0.5},
            ),
        ),
        host=replace(before.host, pressure_s={**before.host.pressure_s, (odd, "some"): 1.0, ("io", odd): 1.0}),
        run=replace(before.run, goodput_ns={**before.run.goodput_ns, odd: 1}, restarts={"segfault": 1, odd: 1}),
        stacks=StackState(source="py-spy", samples={"forward": 3, odd: 1}, cpu_s=0.1),
        training=tuple(
            replace(
                each,
                step_source=odd,
                phase_ns={**each.phase_ns, odd: 10**9},
                copies={**each.copies, (odd, odd): CopyTotals(count=1, size_bytes=1, blocked_ns=1, gpu_ns=1)},
                syncs={**each.syncs, odd: SyncTotals(calls=1, blocked_ns=1)},
            )
            for each in before.training
        ),
        collectives=tuple(replace(each, calls={**each.calls, odd: 1}) for each in before.collectives),
    )

    view, usual = view_of_state(planted), view_of_state(before)

    assert odd not in json.dumps({**to_json(view), "ranks": []})
    (device,) = view.devices
    assert device.throttle_seconds == {"power_cap": 2.0}
    assert {**device.values, "sm_active_ratio": 0.0} == {**usual.devices[0].values, "sm_active_ratio": 0.0}
    assert device.values["sm_active_ratio"] == 0.5
    assert view.restarts == {"segfault": 1}
    assert (view.goodput_seconds, view.nodes[0].pressure_seconds) == (
        usual.goodput_seconds,
        usual.nodes[0].pressure_seconds,
    )
    for rank, same in zip(view.ranks, usual.ranks, strict=True):
        assert replace(rank, step_source=None) == replace(same, step_source=None)


def test_what_lives_is_not_told_to_be_gone(tmp_path: Path) -> None:
    """Its launcher is on another host, or has not opened its directory yet: its sidecar asks, so it lives."""
    run_dir = tmp_path / "run"
    begin(run_dir, pid=2**22 + 1)

    live = view_of_state(state(5.0), run_dir=run_dir)

    assert (live.status, live.attempts[0].status, live.notes) == (Status.RUNNING, Status.RUNNING, ())
    gone = load_run(run_dir, now_s=NOW_S)  # seen from outside, it is
    assert gone.status is Status.LOST
    assert "the launcher of this run is gone" in " ".join(gone.notes)
