"""Findings appear when they have been seen twice, go when they have been missed thrice; no window breaks a rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from healthy_node import (
    MS,
    NO_PAUSES,
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
from hypothesis import given
from hypothesis import strategies as st
from rule_cases import CASES

from gpulaunch.profiler.analysis import advisor as advisor_room
from gpulaunch.profiler.analysis.advisor import Advisor, advise
from gpulaunch.profiler.analysis.finding import Loss
from gpulaunch.profiler.analysis.pause_rules import recompiles
from gpulaunch.profiler.analysis.window import Window
from gpulaunch.profiler.record import Finding

WELL = window()
COLLECTS = CASES["gc-pauses"].fault


def collects(gc_ms: float) -> Window:
    return window(
        rank(phases_ms={"gc": gc_ms}, pauses=replace(NO_PAUSES, gc_collections=10, gc_ns_total=int(gc_ms * STEPS * MS)))
    )


def heard(*windows: Window) -> list[list[str]]:
    advisor = Advisor()
    return [[found.rule for found in advisor.add_window(each)] for each in windows]


def test_a_finding_appears_in_its_second_window() -> None:
    assert heard(COLLECTS, COLLECTS, COLLECTS) == [[], ["gc-pauses"], ["gc-pauses"]]


def test_one_window_alone_is_forgotten() -> None:
    assert heard(COLLECTS, WELL, COLLECTS, WELL, COLLECTS) == [[], [], [], [], []]


def test_memory_that_is_full_in_minutes_stands_before_every_loss() -> None:
    """5 GB of 16 in half a minute, in windows of five seconds."""
    points = tuple(replace(point, at_s=5.0 * at) for at, point in enumerate(memory(points=4, trainer_mib=800)))
    tight = host(memory_available_bytes=11 << 30)
    both = replace(COLLECTS, ranks=(replace(COLLECTS.ranks[0], memory=points),), host=tight)

    urgent, loss = advise(both)

    assert (urgent.rule, loss.rule) == ("host-memory-growth", "gc-pauses")
    assert urgent.advice.startswith("At this rate the memory is full in 1.2 minutes. Look for objects")
    assert advise(replace(both, host=host(memory_available_bytes=1 << 40)))[0].rule == "gc-pauses"
    roomy = replace(both, host=host(memory_available_bytes=30 << 30))  # grown by less than a tenth of it
    assert [found.rule for found in advise(roomy)] == ["gc-pauses"]


def test_a_finding_goes_after_three_windows_without_it() -> None:
    assert heard(COLLECTS, COLLECTS, WELL, WELL, COLLECTS, WELL, WELL, WELL, COLLECTS) == [
        *([], ["gc-pauses"], ["gc-pauses"], ["gc-pauses"], ["gc-pauses"]),
        *(["gc-pauses"], ["gc-pauses"], [], []),
    ]


def test_the_figures_told_are_the_median_of_the_last_five() -> None:
    advisor = Advisor()
    for gc_ms in (10.0, 20.0, 90.0, 30.0, 20.0, 10.0):
        advisor.add_window(collects(gc_ms))

    (found,) = advisor.add_window(collects(20.0))

    assert found.seconds_per_step == pytest.approx(0.020)


def test_what_is_told_is_one_window_and_not_the_loss_of_one_beside_the_figures_of_another() -> None:
    """Collections become rarer: a loss of before is larger than a whole step of now."""
    advisor = Advisor()
    windows = [collects(gc_ms) for gc_ms in (300.0, 250.0, 200.0, 20.0, 10.0)]
    for each in windows:
        told = advisor.add_window(each)

    assert told == advise(windows[2])
    (found,) = told
    assert found.seconds_per_step == pytest.approx(0.200)
    made = found.evidence["collections_per_step"] * found.evidence["seconds_per_collection"]
    assert made == pytest.approx(found.seconds_per_step)
    assert found.evidence["step_seconds"] > found.seconds_per_step


def test_a_slow_transform_is_one_finding_whichever_of_its_lines_holds_most_of_the_samples_so_far() -> None:
    """A run of four windows was told nothing: the innermost line held 0.8 of the samples of the outer one, or less."""
    fault = CASES["dataloader-slow-transform"].fault
    advisor = Advisor()
    told: list[list[int | None]] = []
    for inner in (74, 75, 74, 74):
        sampled = replace(fault.ranks[0], fetches=100, fetching={"train.py:70": 93, "train.py:43": inner})
        told.append([found.line for found in advisor.add_window(replace(fault, ranks=(sampled,)))])

    assert told == [[], [43], [70], [70]]


def test_what_costs_no_time_is_told_as_it_is_now() -> None:
    """An hour less to go each time: of equal losses the last window's figures are the true ones."""
    full, fuller = (window(rank(memory=memory(trainer_mib=mib))) for mib in (50.0, 100.0))
    advisor = Advisor()
    for each in (full, full, full, fuller):
        told = advisor.add_window(each)

    assert told == advise(fuller) != advise(full)


def test_the_largest_loss_comes_first() -> None:
    one = COLLECTS.ranks[0]
    both = replace(
        one,
        phase_ns={**one.phase_ns, "compile": 50 * STEPS * MS},
        step_ns=one.step_ns + 50 * STEPS * MS,
        pauses=replace(one.pauses, compiles=3, compile_ns_total=50 * STEPS * MS),
    )

    assert [found.rule for found in advise(window(both))] == ["recompiles", "gc-pauses"]


# --- a rule that fails


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    """A rule with a fault of ours; it speaks before it fails."""

    def judge(seen: Window) -> Iterator[Loss]:
        yield from recompiles(seen)
        raise ZeroDivisionError

    rules = [replace(rule, judge=judge) if rule.id == "recompiles" else rule for rule in advisor_room.RULES]
    monkeypatch.setattr(advisor_room, "RULES", tuple(rules))
    return "recompiles"


def test_a_rule_that_fails_silences_no_other(broken: str) -> None:
    failed: list[tuple[str, str]] = []
    found = advise(COLLECTS, lambda rule, error: failed.append((rule, type(error).__name__)))

    assert [each.rule for each in found] == ["gc-pauses"]
    assert failed == [(broken, "ZeroDivisionError")]


def test_nobody_who_does_not_listen_misses_that_it_failed(broken: str) -> None:
    """Else no test of the rules could find a fault in one."""
    with pytest.raises(ZeroDivisionError):
        advise(COLLECTS)


def test_an_advisor_goes_on_with_the_others_and_knows_who_failed(broken: str) -> None:
    advisor = Advisor()
    told = [[found.rule for found in advisor.add_window(COLLECTS)] for _ in range(3)]

    assert told == [[], ["gc-pauses"], ["gc-pauses"]]
    assert advisor.failed == {broken: "ZeroDivisionError"}


def test_where_all_rules_are_well_nobody_failed() -> None:
    advisor = Advisor()
    for case in CASES.values():
        advisor.add_window(case.fault)

    assert advisor.failed == {}


# --- any window at all

counts = st.integers(0, 10**12)
ratios = st.none() | st.floats(0, 1)
milliseconds = st.floats(0, 1e5)
junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=3)
graphs = junk | st.builds(dict, nodes=junk, at_least=junk) | st.builds(dict, nodes=st.integers(200, 4096))
sites = st.builds(
    site,
    st.sampled_from(["h2d", "item", "built_on_cpu", "save", "cpu", "elsewhere"]),
    st.text(max_size=20) | st.just("train.py:4 f"),
    count=st.integers(1, 10**6),
    blocked_ns=counts,
    gpu_ns=counts,
    size_bytes=counts,
    pinned=st.integers(0, 10**6),
    non_blocking=st.integers(0, 10**6),
)
phases = st.dictionaries(
    st.sampled_from(["data_wait", "h2d", "forward", "backward", "gc", "compile", "checkpoint", "other"]), milliseconds
)
ranks = st.builds(
    rank,
    st.integers(0, 7),
    phases_ms=phases,
    steps=st.integers(1, 10**6),
    loader=st.builds(
        loader,
        workers=st.integers(0, 64),
        wait_ms=milliseconds,
        transfer_ms=milliseconds,
        blocked_ms=milliseconds,
        batches=st.integers(0, 10**6),
    ),
    workers=st.builds(
        fetching,
        milliseconds,
        cpu=st.floats(0, 0.5),
        runqueue=st.floats(0, 0.5),
        storage_bytes=counts,
        cached_bytes=counts,
        batches=st.integers(0, 10**6),
    ),
    sites=st.lists(sites, max_size=4).map(tuple),
    gpu=st.none() | st.builds(gpu_memory, reserved_bytes=counts, inactive_split_bytes=counts, alloc_retries=counts),
    memory=st.builds(
        memory,
        points=st.integers(0, 12),
        trainer_mib=st.floats(-100, 1e4),
        workers_mib=st.floats(-10, 1e4),
        allocated_mib=st.floats(-10, 1e4),
        gpu_mib=st.floats(-10, 1e4),
    ),
    trainer_cpu_s=st.floats(0, 1e4),
    workers_cpu_s=st.floats(0, 1e4),
    trainer_runqueue_s=st.none() | st.floats(0, 1e4),
    facts=st.builds(
        facts, device=junk, torch_threads=junk, dataparallel=junk, precision=junk, loaders=junk, graph=graphs
    )
    | st.just(facts()),
    samples=st.integers(0, 100),
    logged=st.dictionaries(st.sampled_from(["a.py:1", "b.py:2"]), st.integers(0, 100)),
    fetches=st.integers(0, 100),
    fetching=st.dictionaries(st.sampled_from(["a.py:1", "b.py:2", ""]), st.integers(0, 100)),
    calling=st.dictionaries(st.sampled_from(["a.py:1", "b.py:2", ""]), st.integers(0, 100)),
    calls=st.dictionaries(st.sampled_from(["a.py:1", "b.py:2"]), st.sampled_from(["copy.deepcopy", "update", ""])),
    indexing=st.integers(0, 100),
    before_backward=st.integers(0, 100),
    looping=st.dictionaries(st.sampled_from(["a.py:1", "b.py:2", ""]), st.integers(0, 100)),
    loop_ends=st.dictionaries(st.sampled_from(["a.py:1", ""]), st.integers(1, 9)),
    backward=st.dictionaries(st.sampled_from(["a.py:1", ""]), st.integers(0, 100)),
    saving_share=st.floats(0, 1),
    gil_waits=st.dictionaries(st.sampled_from(["a.py f", "json.dump"]), st.integers(0, 100)),
    gil_lines=st.dictionaries(
        st.tuples(st.sampled_from(["a.py f", "json.dump"]), st.sampled_from(["a.py:1", "b.py:2", ""])),
        st.integers(0, 100),
    ),
    thread_waits=st.integers(0, 100),
    locked=st.integers(0, 100),
    microsteps=st.integers(0, 1000),
    worker_cores=st.frozensets(st.integers(0, 3)),
)
windows = st.builds(
    lambda seen, **more: window(*seen, **more),
    st.lists(ranks, max_size=4, unique_by=lambda each: each.rank),
    seconds=st.floats(0, 1e6),
    cores=st.none() | st.floats(0.1, 512),
    pressure_s=st.dictionaries(st.just(("cpu", "some")), st.floats(0, 1e6)),
    host=st.none()
    | st.builds(
        host, shm_used_bytes=st.none() | counts, shm_size_bytes=st.none() | counts, memory_available_bytes=counts
    ),
    gpus=st.lists(
        st.builds(
            gpu,
            st.integers(0, 2),
            utilization_ratio=ratios,
            ratios=st.dictionaries(st.sampled_from(["sm_active", "tensor_active", "fp32_active"]), st.floats(0, 1)),
            throttle_s=st.dictionaries(st.sampled_from(["thermal", "power_cap"]), st.floats(0, 1e6)),
        ),
        max_size=3,
    ).map(tuple),
)


def sampled(count: int) -> Window:
    """A line of a window that holds a share of its 40 samples."""
    return window(rank(gpu=None, samples=40, calling={"a.py:1": count}, calls={"a.py:1": "json.dump"}))


def test_a_line_is_told_at_once_and_with_the_samples_of_the_whole_run() -> None:
    advisor = Advisor()

    (first,) = advisor.add_window(sampled(28))
    assert first.rule == "hot-line"
    (last,) = advisor.conclude(sampled(36), None)
    assert last.seconds_per_step == pytest.approx(first.seconds_per_step * 36 / 28)


def test_what_is_left_of_a_run_is_no_window_for_other_rules() -> None:
    fault = CASES["gc-pauses"].fault
    advisor = Advisor()
    for _ in range(2):
        found = advisor.add_window(fault)

    assert advisor.conclude(window(), None) == found
    assert Advisor().conclude(fault, None) == ()


def test_at_its_end_a_run_is_judged_as_a_whole_by_what_the_last_window_had() -> None:
    """Not by what it had before, such as a first epoch with cold caches."""
    fault = CASES["dataloader-lists"].fault
    earlier, later = Advisor(), Advisor()
    for advisor, windows in ((earlier, (fault, window())), (later, (window(), fault))):
        for each in windows:
            assert advisor.add_window(each) == ()

    (found,) = later.conclude(None, fault)
    assert (found.rule, found.confidence) == ("dataloader-lists", 0.4)
    assert earlier.conclude(None, fault) == later.conclude(None, window()) == ()


def test_a_line_that_only_the_first_window_had_is_not_told_at_the_end() -> None:
    """Of all samples so far it is no part any more."""
    advisor = Advisor()

    (first,) = advisor.add_window(sampled(28))
    assert [found.rule for found in advisor.add_window(WELL)] == [first.rule]
    assert advisor.conclude(None, None) == ()


def test_a_run_of_one_window_is_told_its_lines_and_what_is_clear_in_all_of_it() -> None:
    advisor = Advisor()
    (line,) = advisor.add_window(sampled(28))

    told = {found.rule: found for found in advisor.conclude(sampled(36), CASES["frequent-validation"].fault)}

    assert told.keys() == {"hot-line", "frequent-validation"}
    assert told["hot-line"].seconds_per_step > line.seconds_per_step


@pytest.mark.parametrize(
    ("seconds", "told"), [(4.0, []), (1.5, ["dataloader-lists"])], ids=["over", "too short to say"]
)
def test_a_cold_first_epoch_is_not_told_of_a_run_of_one_window(seconds: float, told: list[str]) -> None:
    fault = CASES["dataloader-lists"].fault
    advisor = Advisor()
    advisor.add_window(WELL)

    assert [found.rule for found in advisor.conclude(replace(WELL, seconds=seconds), fault)] == told
    assert [found.rule for found in advisor.conclude(replace(fault, seconds=seconds), fault)] == ["dataloader-lists"]


def test_slow_fetches_are_told_whichever_cure_each_window_finds_better() -> None:
    """Whether another worker saves a tenth of the step was answered otherwise in each of three windows."""
    fewer, slower = CASES["dataloader-too-few-workers"].fault, CASES["dataloader-slow-transform"].fault

    assert heard(fewer, slower, fewer) == [[], ["dataloader-slow-transform"], ["dataloader-slow-transform"]]
    assert heard(fewer, WELL, slower, COLLECTS, WELL) == [[], [], [], [], []]


def test_findings_take_no_more_than_the_time_that_there_is() -> None:
    advisor, step_s = Advisor(), WELL.ranks[0].step_s
    seen = window(
        rank(
            samples=100,
            gpu=None,
            calling={"a.py:1": 70, "b.py:2": 60},
            calls={"a.py:1": "json.dump", "b.py:2": "copy.deepcopy"},
        )
    )

    first, second = advisor.add_window(seen)

    assert first.seconds_per_step == pytest.approx(0.7 * step_s)
    assert second.seconds_per_step == pytest.approx(0.3 * step_s)
    assert second.seconds_per_hour == pytest.approx(0.3 * 3600)
    assert second.advice.endswith(f"Another {300 * step_s:.3g} ms of every step are part of the findings above.")


@given(windows)
def test_whatever_was_seen_the_rules_answer_with_figures_that_can_be(seen: Window) -> None:
    for found in advise(seen):
        json.dumps(found.as_json(), allow_nan=False)
        longest = max(each.step_s for each in seen.ranks)
        assert 0.0 <= found.seconds_per_step <= longest * 1.000001
        assert 0.0 <= found.seconds_per_hour <= 3600 * 1.000001
        assert found.ranks
        assert (found.file is None) == (found.line is None)


@given(st.lists(windows, max_size=8))
def test_no_finding_stands_that_was_not_seen_twice_unless_it_is_of_many_samples(seen: list[Window]) -> None:
    """What is told at the slowest line of a loader so far may have been seen at another line before, and slow fetches
    with another cure. Those of one rank never take more than the time that there is."""
    advisor = Advisor()
    times: dict[object, int] = {}
    other_cure = {
        "dataloader-slow-transform": "dataloader-too-few-workers",
        "dataloader-too-few-workers": "dataloader-slow-transform",
    }

    def identity(found: Finding) -> object:
        at_any_line = found.rule in ("dataloader-slow-transform", "dataloader-lock")
        return (found.rule, found.subject) if at_any_line else found.key

    for each in seen:
        found_now = advise(each)
        for one in {identity(found) for found in found_now} | {found.rule for found in found_now}:
            times[one] = times.get(one, 0) + 1
        told = advisor.add_window(each)
        for one in each.ranks:
            lost_s = sum(found.seconds_per_hour for found in told if found.ranks == (one.rank,))
            assert lost_s <= 3600 * 1.000001
        for found in told:
            of_samples = found.rule in ("hot-line", "logging-stall", "small-operations-loop", "gil-contention")
            of_other = times.get(other_cure.get(found.rule), 0)
            assert times[identity(found)] >= (1 if of_samples or of_other else 2)
