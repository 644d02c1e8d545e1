"""Every line of the judge's table: a history that it must tell of or act on, and one that it must not."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.hang import frames as stacks
from gpulaunch.launcher.hang.activity import following
from gpulaunch.launcher.hang.judge import judge
from gpulaunch.launcher.hang.values import Limits, RankProgress, Recorders, Sample, Verdict
from gpulaunch.profiler.channel.layout import Region
from gpulaunch.profiler.stack import Frame

LIMITS = Limits()
HZ = os.sysconf("SC_CLK_TCK")
TORCH = "/venv/lib/python3.11/site-packages/torch"
MAIN = Frame("<module>", "/home/me/train.py", 100)

ALL_REDUCE = (
    Frame("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 3252),
    Frame("_exception_logger.<locals>.wrapper", f"{TORCH}/distributed/c10d_logger.py", 83),
    Frame("sync", "/home/me/train.py", 60),
    MAIN,
)
BROADCAST = (Frame("broadcast", f"{TORCH}/distributed/distributed_c10d.py", 2000), replace(MAIN, line=64))
BARRIER = (Frame("barrier", f"{TORCH}/distributed/distributed_c10d.py", 4000), replace(MAIN, line=70))
BACKWARD = (
    Frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 900),
    Frame("tapped_run_backward", "/venv/lib/python3.11/site-packages/gpulaunch/profiler/probe/edges.py", 200),
    Frame("Tensor.backward", f"{TORCH}/_tensor.py", 600),
    MAIN,
)
IN_DATASET = (
    Frame("Images.__getitem__", "/home/me/data.py", 40),
    Frame("_MapDatasetFetcher.fetch", f"{TORCH}/utils/data/_utils/fetch.py", 50),
    Frame("_SingleProcessDataLoaderIter._next_data", f"{TORCH}/utils/data/dataloader.py", 700),
    MAIN,
)
ELSEWHERE = (Frame("step", "/home/me/train.py", 88), MAIN)
VALIDATE = (Frame("validate", "/home/me/train.py", 30), MAIN)
SAVE = (Frame("save", f"{TORCH}/serialization.py", 900), MAIN)
ITEM = (Frame("synchronize", f"{TORCH}/cuda/__init__.py", 1000), replace(MAIN, line=80))
RECV = (Frame("recv", f"{TORCH}/distributed/distributed_c10d.py", 2500), replace(MAIN, line=66))
SET_UP = (
    Frame("_store_based_barrier", f"{TORCH}/distributed/distributed_c10d.py", 900),
    Frame("init_process_group", f"{TORCH}/distributed/distributed_c10d.py", 1700),
    MAIN,
)


def standing(rank: int, region: Region = Region.BACKWARD, **given: object) -> RankProgress:
    known: dict[str, object] = {
        "steps": 10, "armed": True, "begun": True, "saving": False, "quiet_s": 40.0, "allowed_s": 30.0, "stopped_s": 0.0
    }  # fmt: skip
    return RankProgress(rank=rank, pid=1000 + rank, region=region, **{**known, **given})  # type: ignore[arg-type]


def still(
    frames: tuple[Frame, ...], *, for_s: float = 30.0, every_s: float = 2.0, cores: float = 0.0, **given: object
) -> list[Sample]:
    """A rank that is seen in one place; its main thread uses so many cores."""
    times = [every_s * index for index in range(int(for_s / every_s) + 1)]
    samples: list[Sample] = []
    for at_s in times:
        ticks = int(at_s * cores * HZ)
        known: dict[str, object] = {
            "state": "S", "frames": frames, "main_ticks": ticks, "own_ticks": ticks, "tree_ticks": ticks
        }  # fmt: skip
        samples.append(Sample(at_s=at_s, **{**known, **given}))  # type: ignore[arg-type]
    return samples


def followed(standing: RankProgress, samples: list[Sample]) -> list[Sample]:
    """As the helper puts them together, which has looked since the floor."""
    began = replace(standing, quiet_s=min(standing.quiet_s, LIMITS.floor_s))
    known: list[Sample] = []
    for sample in samples:
        known.append(following(known[-1] if known else None, sample, began, LIMITS))
    return known


def decide(*ranks: tuple[RankProgress, list[Sample]], whole: bool = True, **given: object) -> Verdict:
    samples = {one.rank: followed(one, seen) for one, seen in ranks}
    known = {"closed": True, **given}
    return judge([one for one, _ in ranks], samples, LIMITS, whole=whole, **known)  # type: ignore[arg-type]


# -- stopped, traced, gone


def test_a_rank_stopped_by_a_signal_is_acted_on() -> None:
    verdict = decide(
        (standing(0, stopped_s=4.0), still(ELSEWHERE, for_s=2, state="T")), (standing(1), still(ALL_REDUCE, for_s=2))
    )

    assert (verdict.acts, verdict.tells, verdict.rule, verdict.odd) == (True, True, "stopped", (0,))
    assert verdict.sentence == "rank 0 is stopped by a signal (state T), rank 1 waits for it in all_reduce"


def test_one_that_was_stopped_a_moment_ago_is_not() -> None:
    verdict = decide((standing(0, stopped_s=1.0, quiet_s=2.0), still(ELSEWHERE, for_s=2, state="T")))

    assert not verdict.tells


PROMPTS = [
    (Frame("interaction", file, 300), MAIN)
    for file in (
        "/usr/lib/python3.11/pdb.py",
        "/usr/lib/python3.11/code.py",
        "/venv/lib/python3.11/site-packages/IPython/terminal/interactiveshell.py",
        "/venv/lib/python3.11/site-packages/debugpy/server/api.py",
    )
]


@pytest.mark.parametrize("seen", [{"traced": True}, {"state": "t"}, *({"frames": frames} for frames in PROMPTS)])
def test_while_a_debugger_is_attached_or_a_prompt_is_open_nothing_is_told(seen: dict[str, object]) -> None:
    looked_at = still(**{"frames": IN_DATASET, **seen})  # type: ignore[arg-type]

    verdict = decide((standing(0, quiet_s=1e5), looked_at), (standing(1, quiet_s=1e5), still(IN_DATASET)))

    assert (verdict.tells, verdict.acts, verdict.rule) == (False, False, "traced")


# -- deadlock: collectives that can never match


def test_ranks_in_different_collectives_are_a_deadlock_and_the_rarer_is_the_odd_one() -> None:
    ranks = [(standing(rank), still(ALL_REDUCE)) for rank in range(3)]

    verdict = decide(*ranks, (standing(3), still(BROADCAST)))

    assert (verdict.acts, verdict.rule, verdict.odd) == (True, "deadlock", (3,))
    assert verdict.sentence == "rank 3 waits in broadcast (train.py:64), ranks 0-2 wait in all_reduce (train.py:60)"


def test_ddp_waits_inside_the_backward() -> None:
    """A rank that skips an all_reduce and waits in the next one, the others in DDP's own: the fault table's row."""
    ranks = [(standing(rank, Region.BACKWARD), still(BACKWARD)) for rank in range(3)]

    verdict = decide(*ranks, (standing(3, Region.OTHER), still(ALL_REDUCE)))

    assert (verdict.rule, verdict.odd) == ("deadlock", (3,))


def test_a_deadlock_is_one_before_it_is_time_to_tell() -> None:
    ranks = [(standing(rank, quiet_s=20.0, allowed_s=300.0), still(frames)) for rank, frames in enumerate(DIFFERENT)]

    assert decide(*ranks).rule == "deadlock"


def test_a_group_with_processes_outside_of_the_job_is_no_deadlock() -> None:
    """They wait for a learner started elsewhere, one directly, the other for the first; a recorder says the same."""
    alone = (standing(0), still(RECV))
    ranks = [alone, (standing(1), still(BROADCAST))]

    for seen in ([alone], ranks):
        for recorders in (Recorders(), Recorders(behind=(0,))):
            verdict = decide(*seen, closed=False, recorders=recorders)
            assert (verdict.acts, verdict.tells) == (False, True)
            assert decide(*seen, recorders=recorders).rule == "deadlock", "the control"


def test_ranks_that_all_receive_wait_for_what_none_sends() -> None:
    assert decide(*((standing(rank), still(RECV)) for rank in range(2))).rule == "deadlock"


@pytest.mark.parametrize("quiet_s", [40.0, 590.0])
def test_the_same_collective_of_all_ranks_is_no_proof_and_is_told(quiet_s: float) -> None:
    """It may have been made with processes outside of the job."""
    verdict = decide(*((standing(rank, quiet_s=quiet_s), still(ALL_REDUCE)) for rank in range(4)))

    assert (verdict.acts, verdict.tells, verdict.rule, verdict.odd) == (False, True, "late", ())
    assert verdict.sentence == "ranks 0-3 wait in all_reduce (train.py:60)"
    assert (verdict.due_in_s, verdict.due_by) == (600.0 - quiet_s, "--hang-timeout")


def test_the_same_collective_of_all_ranks_is_acted_on_after_the_timeout() -> None:
    verdict = decide(*((standing(rank, quiet_s=600.0), still(ALL_REDUCE)) for rank in range(4)))

    assert (verdict.acts, verdict.rule, verdict.odd) == (True, "timeout", ())


def test_recorders_that_differ_prove_it_in_the_same_place() -> None:
    ranks = [(standing(rank), still(ALL_REDUCE)) for rank in range(4)]

    behind = decide(*ranks, recorders=Recorders(behind=(2,)))
    clashing = decide(*ranks, recorders=Recorders(clashing=(1,)))

    assert (behind.rule, behind.odd) == ("deadlock", (2,))
    assert (clashing.rule, clashing.odd) == ("deadlock", (1,))


LOGS = (ALL_REDUCE[0], replace(MAIN, line=200))
"""Rank 0 takes the mean of a metric in the branch in which it logs; the others in another: they match."""


def test_recorders_that_agree_excuse_ranks_on_different_lines() -> None:
    ranks = [(standing(0), still(LOGS)), (standing(1), still(ALL_REDUCE))]

    assert not decide(*ranks, recorders=Recorders(agree=True)).acts
    assert decide(*ranks).acts, "without a record: matched, it would have been over at once"


def test_collectives_that_match_from_different_lines_go_on_and_are_no_deadlock() -> None:
    """Each of them lasts for as long as the slowest rank takes, never for two looks."""
    seen = [
        [replace(sample, frames=ALL_REDUCE if (index + rank) % 2 else LOGS) for index, sample in enumerate(still(LOGS))]
        for rank in range(2)
    ]

    assert not decide(*((standing(rank), seen[rank]) for rank in range(2))).acts


DIFFERENT = (ALL_REDUCE, BARRIER)


@pytest.mark.parametrize(
    "given",
    [
        {"assisted": True},  # a thread of the program's own may yet send, or end the wait
        {"gpu": True},  # long computation may come before the collective that is waited for
        {"gpu": True, "cores": 1.0},
    ],
)
def test_in_doubt_different_collectives_are_no_proof(given: dict[str, object]) -> None:
    ranks = [(standing(rank), still(frames, **given)) for rank, frames in enumerate(DIFFERENT)]  # type: ignore[arg-type]

    verdict = decide(*ranks)

    assert (verdict.acts, verdict.tells) == (False, True)


def test_with_a_gpu_two_operations_under_one_number_are_proof() -> None:
    ranks = [(standing(rank), still(ALL_REDUCE, cores=1.0, gpu=True)) for rank in range(3)]

    assert not decide(*ranks, recorders=Recorders(behind=(1,))).acts
    assert decide(*ranks, recorders=Recorders(clashing=(1,))).odd == (1,)


def test_ranks_that_make_a_process_group_may_wait_for_processes_outside() -> None:
    ranks = [(standing(0), still(SET_UP)), (standing(1), still(ALL_REDUCE))]

    assert not decide(*ranks).acts


@pytest.mark.parametrize(
    "seen",
    [
        still(ALL_REDUCE, for_s=4),  # not for long enough yet
        still(ALL_REDUCE, own_ticks=0, cores=0.0)[:2],  # two samples are no history
        still(ALL_REDUCE)[:-1] + still(BARRIER, for_s=32)[-1:],  # it went on to the next one
        still(ALL_REDUCE, cores=1.0),  # gloo moves bytes: a large tensor on a slow network
        still(VALIDATE, cores=0.8),  # rank 0 validates alone
        still(VALIDATE),  # by asking a service elsewhere
        [],  # nothing is known
    ],
)
def test_one_live_rank_is_why_the_others_wait(seen: list[Sample]) -> None:
    others = [(standing(rank, Region.OTHER), still(BARRIER)) for rank in range(1, 4)]

    assert not decide((standing(0, Region.OTHER), seen), *others).acts


def test_on_several_nodes_waiting_may_be_for_another_node() -> None:
    ranks = [(standing(rank), still(frames)) for rank, frames in enumerate(DIFFERENT)]

    verdict = decide(*ranks, whole=False)

    assert (verdict.acts, verdict.tells, verdict.odd) == (False, True, ())
    assert verdict.sentence.endswith(", for a rank of another node")


def test_before_the_first_step_a_deadlock_takes_twice_as_long() -> None:
    """The store that all ranks ask may still be starting."""

    def starting(for_s: float) -> Verdict:
        given = {"begun": False, "allowed_s": 120.0}
        return decide(*((standing(r, Region.NONE, **given), still(DIFFERENT[r], for_s=for_s)) for r in range(2)))

    assert not starting(14.0).acts
    assert starting(16.0).rule == "deadlock"


# -- telling


def test_the_rank_in_the_dataset_is_named_and_those_that_wait_for_it() -> None:
    ranks = [(standing(rank), still(BACKWARD)) for rank in range(3)]

    verdict = decide(*ranks, (standing(3, Region.LOADER), still(IN_DATASET)))

    assert (verdict.acts, verdict.tells, verdict.rule, verdict.odd) == (False, True, "late", (3,))
    assert verdict.sentence == "rank 3 is in data.py:40 in __getitem__(), ranks 0-2 wait for it in backward"
    assert (verdict.quiet_s, verdict.due_in_s, verdict.due_by) == (40.0, 560.0, "--hang-timeout")


def test_a_loader_worker_is_named_by_where_it_is() -> None:
    polling = (Frame("poll", "/usr/lib/python3.11/selectors.py", 400), *IN_DATASET[2:])
    seen = still(polling, worker_pid=77, worker_frames=IN_DATASET[:2])

    verdict = decide((standing(0, Region.LOADER), seen))

    assert verdict.sentence == "rank 0 waits for its DataLoader worker (pid 77) in data.py:40 in __getitem__()"


def test_polling_in_a_loader_is_no_progress() -> None:
    """It comes back every five seconds to see whether its workers live."""
    places = [(Frame("poll", "/usr/lib/python3.11/selectors.py", line), *IN_DATASET[2:]) for line in range(400, 420)]
    samples = [replace(sample, frames=places[i % 20]) for i, sample in enumerate(still(IN_DATASET))]

    assert decide((standing(0, Region.LOADER, quiet_s=600.0), samples)).rule == "timeout"


def by(index: int, sample: Sample, **given: object) -> Sample:
    """The same sample with counters that advance."""
    return replace(sample, **{name: index * step for name, step in given.items()})  # type: ignore[arg-type]


WORK = {
    "cpu of its own": still(ELSEWHERE, cores=0.5),
    "cpu of compile workers below it": [by(i, one, tree_ticks=HZ) for i, one in enumerate(still(ELSEWHERE))],
    "bytes of its loader workers": [by(i, one, io_bytes=1 << 20) for i, one in enumerate(still(ELSEWHERE))],
    "its stack changes": [replace(one, frames=(Frame("f", "x.py", i),)) for i, one in enumerate(still(ELSEWHERE))],
    "a little cpu, as it gets a core half of the time": [
        by(i, one, main_delay_s=1.0) for i, one in enumerate(still(ELSEWHERE, cores=0.04))
    ],
    "it waits for a CPU": still(ELSEWHERE, state="R"),
    "a compile worker below it gets no CPU": [replace(one, running=(7, 8)) for one in still(ELSEWHERE)],
    "a compile worker below it gets hardly any CPU, and is looked at between": [
        replace(one, wanted_s={7: 0.6 * one.at_s}) for one in still(ELSEWHERE)
    ],
    "it spins in one place, with a GPU": still(ELSEWHERE, cores=1.0, gpu=True),
}


@pytest.mark.parametrize("samples", WORK.values(), ids=WORK.keys())
def test_a_rank_at_work_is_told_of_late_and_never_acted_on(samples: list[Sample]) -> None:
    def after(quiet_s: float) -> Verdict:
        return decide((standing(0, Region.OTHER, quiet_s=quiet_s), samples), (standing(1), still(BARRIER)))

    assert not after(119.0).tells
    assert after(120.0).sentence.startswith("rank 0 runs in ")
    assert (after(120.0).tells, after(120.0).due_in_s) == (True, None)
    assert not after(1e6).acts


def test_a_little_cpu_on_a_free_or_a_crowded_host_is_no_work() -> None:
    free = still(ELSEWHERE, for_s=1e3, cores=0.04)
    crowded = [by(i, one, main_delay_s=1.0) for i, one in enumerate(still(ELSEWHERE, for_s=1e3, cores=0.005))]

    for samples in (free, crowded):
        assert decide((standing(0, Region.OTHER, quiet_s=1e3), samples)).rule == "timeout"


def test_a_logger_below_it_that_runs_now_and_then_is_no_work() -> None:
    samples = [replace(one, running=(7,) if i % 2 else (8,)) for i, one in enumerate(still(ELSEWHERE))]

    assert decide((standing(0, Region.OTHER, quiet_s=1e6), samples)).rule == "timeout"


def test_a_logger_below_it_that_waits_for_a_core_after_each_look_is_no_work() -> None:
    """And one that is started anew each time, after it has waited long."""
    polls = [replace(one, wanted_s={7: 0.4 * one.at_s}) for one in still(ELSEWHERE)]
    anew = [replace(one, wanted_s={i: 9.0}) for i, one in enumerate(still(ELSEWHERE))]

    for samples in (polls, anew):
        assert decide((standing(0, Region.OTHER, quiet_s=1e6), samples)).rule == "timeout"


def test_while_a_rank_works_none_is_acted_on() -> None:
    """Rank 0 tokenizes for an hour; the others look every second whether its file is there."""
    working = (standing(0, Region.OTHER, quiet_s=3600.0), still(VALIDATE, cores=1.0))
    others = [(standing(rank, Region.OTHER, quiet_s=3600.0), still(ELSEWHERE)) for rank in range(1, 4)]

    assert decide(*others).acts, "the control"
    verdict = decide(working, *others)
    assert (verdict.acts, verdict.tells, verdict.due_in_s) == (False, True, None)


@pytest.mark.parametrize(
    ("frames", "given"),
    [
        (VALIDATE, {}),  # by its name
        (SAVE, {}),  # by its file
        ((Frame("load", "/home/me/data.py", 5), Frame("read_sample", "/home/me/data.py", 9)), {}),
        (ELSEWHERE, {"saving": True, "allowed_s": 120.0}),
        (ELSEWHERE, {"begun": False, "allowed_s": 120.0}),  # the first epoch's data
    ],
)
def test_what_may_take_minutes_is_told_of_after_two_and_acted_on_like_anything_else(
    frames: tuple[Frame, ...], given: dict[str, object]
) -> None:
    def after(quiet_s: float) -> Verdict:
        return decide((standing(0, Region.LOADER, quiet_s=quiet_s, **given), still(frames)))

    assert not after(119.0).tells
    assert (after(120.0).tells, after(120.0).acts) == (True, False)
    assert after(600.0 if given.get("begun", True) else 3600.0).rule == "timeout"


@pytest.mark.parametrize("region", [Region.LOADER, Region.FORWARD, Region.BACKWARD, Region.OTHER, Region.VALIDATION])
@pytest.mark.parametrize("state", ["S", "D"])
def test_rest_is_told_of_beyond_the_allowance_wherever_it_is(region: Region, state: str) -> None:
    def after(quiet_s: float) -> Verdict:
        return decide((standing(0, region, quiet_s=quiet_s, allowed_s=45.0), still(ELSEWHERE, state=state)))

    assert not after(44.0).tells
    assert (after(45.0).tells, after(45.0).acts) == (True, False)


def test_a_gpu_rank_that_synchronizes_waits_for_the_rank_that_rests() -> None:
    spinning = (standing(0, Region.OTHER, quiet_s=600.0), still(ITEM, cores=1.0, gpu=True))
    resting = (standing(1, Region.LOADER, quiet_s=600.0), still(IN_DATASET))

    verdict = decide(spinning, resting)

    assert (verdict.rule, verdict.odd) == ("timeout", (1,))
    assert verdict.sentence.endswith("rank 0 waits for it in synchronize")


# -- the GIL

HOLDING = still(ELSEWHERE, gil_thread=1000, gil_frames=ELSEWHERE, for_s=200)


def test_the_gil_in_the_hands_of_an_idle_thread_is_a_hang_wherever_it_is() -> None:
    holding = still(ELSEWHERE, gil_thread=1000, gil_frames=ELSEWHERE, for_s=120)

    verdict = decide((standing(0, Region.OTHER, quiet_s=130.0), holding))

    assert (verdict.acts, verdict.rule, verdict.odd) == (True, "held", (0,))
    assert verdict.sentence == "rank 0 holds the GIL in train.py:88 in step() without using the CPU"


@pytest.mark.parametrize(
    "samples",
    [
        HOLDING[:30],  # 60 s: h5py on a file system over a network
        still(ELSEWHERE, gil_thread=1000, gil_frames=ELSEWHERE, for_s=200, cores=1.0),
        still(ELSEWHERE, gil_thread=1000, gil_frames=ELSEWHERE, for_s=200, state="D"),  # an import from a slow disk
        still(ELSEWHERE, for_s=200),
        [replace(one, gil_thread=index) for index, one in enumerate(HOLDING)],
        [replace(one, io_bytes=index * (20 << 20)) for index, one in enumerate(HOLDING)],  # 10 MB/s are read
        [replace(one, tree_ticks=index * HZ) for index, one in enumerate(HOLDING)],  # a compiler works below it
    ],
)
def test_a_gil_that_is_used_is_not(samples: list[Sample]) -> None:
    assert not decide((standing(0, Region.OTHER, quiet_s=210.0), samples)).acts


def test_a_gil_held_while_another_rank_works_may_be_held_for_it() -> None:
    """A call of a pybind11 module that waits for rank 1 and does not let go of the GIL."""
    held = (standing(0, Region.OTHER, quiet_s=210.0), HOLDING)

    verdict = decide(held, (standing(1, Region.OTHER, quiet_s=210.0), still(VALIDATE, for_s=200, cores=1.0)))

    assert (verdict.acts, verdict.tells, verdict.due_in_s) == (False, True, None)
    assert decide(held, (standing(1, Region.OTHER, quiet_s=210.0), still(BARRIER, for_s=200))).rule == "held"


def test_a_held_gil_is_told_early_with_when_it_is_acted_on() -> None:
    verdict = decide((standing(0, Region.LOADER, quiet_s=50.0), HOLDING[:21]))

    assert (verdict.acts, verdict.tells, verdict.due_in_s, verdict.due_by) == (False, True, 80.0, "")


def test_a_program_that_has_finished_and_is_stuck_in_its_teardown_is_told_as_that() -> None:
    """As `main()` returns, ~ProcessGroupGloo joins a thread that waits for the GIL."""
    returning = (Frame("main", "/home/me/train.py", 120), MAIN)
    holding = still(returning, gil_thread=1000, gil_frames=returning, for_s=120)
    finished = standing(0, Region.OTHER, steps=276, left_group=True, quiet_s=130.0)

    verdict = decide((finished, holding), (standing(1), [Sample(at_s=0.0, state="")]))

    assert (verdict.acts, verdict.rule, verdict.odd) == (True, "teardown", (0,))
    assert verdict.sentence.startswith(
        "rank 0 has finished (276 steps; its process group is destroyed), is stuck in its teardown and holds the GIL"
    )
    still_running = replace(finished, left_group=False)
    assert decide((still_running, holding), (standing(1), [Sample(at_s=0.0, state="")])).rule == "held"


# -- the timeout


def test_what_rests_is_acted_on_after_the_timeout() -> None:
    def after(quiet_s: float) -> Verdict:
        return decide((standing(0, Region.LOADER, quiet_s=quiet_s), still(IN_DATASET)))

    assert not after(599.0).acts
    assert (after(600.0).acts, after(600.0).rule, after(600.0).odd) == (True, "timeout", (0,))


def test_before_the_first_step_the_timeout_is_another() -> None:
    given = {"begun": False, "allowed_s": 120.0}

    before = decide((standing(0, quiet_s=3599.0, **given), still(ELSEWHERE)))

    assert (before.acts, before.due_by) == (False, "--first-step-timeout")
    assert decide((standing(0, quiet_s=3600.0, **given), still(ELSEWHERE))).rule == "timeout"


def test_the_time_counts_from_the_last_work_not_from_the_last_edge() -> None:
    """A validation of twenty minutes that ends in a wait: it has not stood still for as long as it was quiet."""
    busy = still(ELSEWHERE, for_s=1200.0, every_s=60.0, cores=1.0)
    rests = [replace(busy[-1], at_s=1200.0 + after_s, own_ticks=busy[-1].own_ticks) for after_s in range(60, 660, 60)]

    verdict = decide((standing(0, Region.OTHER, quiet_s=1800.0), [*busy, *rests[:9]]))
    later = decide((standing(0, Region.OTHER, quiet_s=1860.0), [*busy, *rests]))

    assert (verdict.acts, verdict.due_in_s) == (False, 60.0)
    assert later.rule == "timeout"


def test_a_helper_that_comes_late_has_not_seen_what_was_before() -> None:
    """The one before it was lost after 20 minutes, in which the rank was perhaps at work."""
    late = standing(0, Region.OTHER, quiet_s=1200.0)
    seen = [following(None, still(ELSEWHERE)[0], late, LIMITS)]
    for sample in still(ELSEWHERE)[1:]:
        seen.append(following(seen[-1], sample, late, LIMITS))

    verdict = judge([late], {0: seen}, LIMITS, whole=True)

    assert (verdict.acts, verdict.due_in_s) == (False, 570.0)


def test_without_a_look_none_is_acted_on() -> None:
    verdict = decide((standing(0, quiet_s=1e5), []))

    assert (verdict.acts, verdict.tells) == (False, True)


def test_waiting_past_the_timeout_for_a_rank_that_moves_is_no_hang() -> None:
    waits = (standing(1, Region.OTHER, quiet_s=2000.0), still(BARRIER))

    assert not decide((standing(0, Region.OTHER, quiet_s=1.0), still(VALIDATE, cores=1.0)), waits).acts
    elsewhere = decide(waits, whole=False)
    assert (elsewhere.rule, elsewhere.acts, elsewhere.due_in_s) == ("late", False, None), "one on another node may move"
    rests = (standing(2, Region.OTHER, quiet_s=2000.0), still(ELSEWHERE))
    assert decide(rests, waits, whole=False).rule == "timeout"


@pytest.mark.parametrize("whole", [True, False])
def test_a_rank_that_rests_is_given_time_to_see_that_another_has_finished_its_work(whole: bool) -> None:
    """It may poll for the result."""
    rests = (standing(0, Region.OTHER, quiet_s=2000.0), still(ELSEWHERE))

    just_now, soon = decide(rests, whole=whole, idle_s=0.0), decide(rests, whole=whole, idle_s=45.0)

    assert (just_now.acts, just_now.due_in_s, just_now.works) == (False, LIMITS.settle_s, False)
    assert (soon.acts, soon.due_in_s) == (False, LIMITS.settle_s - 45.0)
    assert decide(rests, whole=whole, idle_s=LIMITS.settle_s).rule == "timeout"


def test_while_a_rank_of_another_node_works_none_is_acted_on_for_time() -> None:
    rests = (standing(0, Region.OTHER, quiet_s=2000.0), still(ELSEWHERE))
    holds = (standing(1, Region.OTHER, quiet_s=2000.0), still(ELSEWHERE, for_s=200.0, gil_thread=7))

    for ranks in ([rests], [holds]):
        assert decide(*ranks, whole=False).acts, "the control: no other node works"
        verdict = decide(*ranks, whole=False, idle_s=None)
        assert (verdict.acts, verdict.tells, verdict.due_in_s) == (False, True, None)
    stopped = (standing(2, Region.OTHER, stopped_s=9.0), still(ELSEWHERE))
    assert decide(stopped, whole=False, idle_s=None).rule == "stopped", "that is proof"


@pytest.mark.parametrize("given", [{"traced": True}, {"cores": 1.0}])
def test_a_node_whose_rank_works_or_is_debugged_says_so_to_the_others(given: dict[str, Any]) -> None:
    waits = (standing(1, Region.OTHER, quiet_s=2000.0), still(BARRIER))

    assert not decide(waits, whole=False).works
    assert decide(waits, (standing(0, Region.OTHER, quiet_s=2000.0), still(ELSEWHERE, **given)), whole=False).works


@pytest.mark.parametrize(
    "given",
    [
        {"armed": False},  # no probe
        {"region": Region.NONE, "begun": False},  # torch is imported, and it may serve or evaluate
    ],
)
def test_time_alone_tells_nothing_of_a_program_that_never_trained(given: dict[str, object]) -> None:
    region = Region(given.pop("region", Region.OTHER))  # type: ignore[arg-type]

    assert not decide((standing(0, region, quiet_s=1e6, **given), still(ELSEWHERE))).tells


@pytest.mark.parametrize("waits", [SET_UP, BROADCAST])
def test_it_is_told_when_another_rank_waits_for_it_in_a_collective(waits: tuple[Frame, ...]) -> None:
    """An inference server without requests is like that: rank 0 on its socket, the others in broadcast."""

    def both(region: Region) -> Verdict:
        given: dict[str, object] = {"quiet_s": 3600.0, "begun": False, "allowed_s": 120.0}
        return decide((standing(0, region, **given), still(ELSEWHERE)), (standing(1, region, **given), still(waits)))

    verdict = both(Region.NONE)
    assert (verdict.acts, verdict.rule, verdict.odd, verdict.due_in_s) == (False, "late", (0,), None)
    assert both(Region.LOADER).rule == "timeout", "the control"


ON_A_LINE = (Frame("step", "/home/me/solve.py", 3), MAIN)


@pytest.mark.parametrize(
    ("calls", "acts"), [(("from_numpy", "spsolve", "to"), False), (("item", "float"), True)], ids=["solves", "waits"]
)
def test_a_call_that_computes_on_a_line_that_moves_to_the_gpu_is_work(
    monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...], acts: bool
) -> None:
    """`torch.from_numpy(spsolve(A, b)).to(device)` for ten minutes, in one thread."""
    monkeypatch.setattr(stacks, "calls_at", lambda _: calls)
    solves = (standing(0, Region.OTHER, quiet_s=620.0), still(ON_A_LINE, for_s=620.0, cores=1.0, gpu=True))
    waits = (standing(1, Region.OTHER, quiet_s=620.0), still(BARRIER, for_s=620.0, gpu=True))

    assert decide(solves, waits).acts is acts
    assert not decide(solves).acts, "alone it may be its GPU that computes"


def test_a_main_thread_that_works_alone_for_minutes_and_rests_for_a_second_has_not_stood_still() -> None:
    """duckdb.execute() in a process with a GPU."""
    works = still(ELSEWHERE, for_s=660.0, cores=1.0, gpu=True)
    rests = replace(works[-1], at_s=works[-1].at_s + 2)

    verdict = decide((standing(0, Region.OTHER, quiet_s=662.0), [*works, rests]))

    assert (verdict.acts, verdict.due_in_s) == (False, 598.0)


def test_a_program_that_has_ended_may_wait_for_its_threads() -> None:
    ended = (
        Frame("_wait_for_tstate_lock", "/usr/lib/python3.11/threading.py", 1116),
        Frame("_shutdown", "/usr/lib/python3.11/threading.py", 1590),
        Frame("_finish", "/venv/lib/python3.11/site-packages/gpulaunch/launcher/loop/rank_end.py", 60),
    )

    verdict = decide((standing(0, Region.FORWARD, quiet_s=1e5), still(ended)))

    assert (verdict.acts, verdict.tells, verdict.due_in_s) == (False, True, None)
    assert verdict.sentence == "rank 0 has ended its program and waits for its threads"


# -- when to look again, and progress


def test_a_candidate_is_looked_at_again_soon_and_work_is_left_alone() -> None:
    soon = decide((standing(0), still(ALL_REDUCE, for_s=2)), (standing(1), still(BARRIER, for_s=2)))
    later = decide((standing(0, Region.OTHER, quiet_s=300.0), still(VALIDATE, cores=1.0)))

    assert (soon.again_s, later.again_s) == (LIMITS.again_s, LIMITS.rest_s)


def test_the_next_look_comes_when_it_is_time_to_tell_or_to_act() -> None:
    """Not up to a minute later."""
    tells = decide((standing(0, Region.OTHER, quiet_s=113.0), still(VALIDATE)))
    acts = decide((standing(0, Region.OTHER, quiet_s=593.0), still(VALIDATE)))

    assert (tells.again_s, acts.again_s) == (7.0, 7.0)


@given(st.data())
def test_progress_never_leads_to_an_act(data: st.DataObject) -> None:
    """Whatever the ranks do, for however long, as long as one of them makes progress and none is definitely hung."""
    stacks = st.sampled_from([ALL_REDUCE, BARRIER, BACKWARD, IN_DATASET, ELSEWHERE, VALIDATE, SAVE, RECV, ()])
    regions = st.sampled_from(list(Region))
    num_ranks = data.draw(st.integers(1, 5))
    alive = data.draw(st.integers(0, num_ranks - 1))
    ranks: list[tuple[RankProgress, list[Sample]]] = []
    for rank in range(num_ranks):
        region = data.draw(regions)
        quiet_s = data.draw(st.floats(10.0, 1e5))
        samples = still(data.draw(stacks), cores=data.draw(st.sampled_from([0.0, 1.0])))
        if rank == alive:
            how = data.draw(st.sampled_from(["edge", "cpu", "stack"]))
            if how == "edge":
                region, quiet_s = Region.OTHER, data.draw(st.floats(0.0, 9.0))
            elif how == "cpu":
                samples = still(ELSEWHERE, cores=data.draw(st.floats(0.1, 8.0)))
            else:
                samples = [replace(one, frames=(Frame("f", "x.py", i),)) for i, one in enumerate(samples)]
        ranks.append((standing(rank, region, quiet_s=quiet_s), samples))

    assert not decide(*ranks).acts
