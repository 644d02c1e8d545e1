"""Every line of the judge's table, with a history that it must call hung and one that it must not."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.hang.judge import judge
from gpulaunch.launcher.hang.values import Frame, Limits, Sample, Standing, Verdict
from gpulaunch.profiler.channel.layout import Region

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
ITEM = (Frame("step", __file__, 1), MAIN)  # line 1 of this file calls nothing


def standing(rank: int, region: Region = Region.BACKWARD, **given: object) -> Standing:
    known: dict[str, object] = {
        "steps": 10, "armed": True, "begun": True, "saving": False, "quiet_s": 40.0, "allowed_s": 10.0, "stopped_s": 0.0
    }  # fmt: skip
    return Standing(rank=rank, pid=1000 + rank, region=region, **{**known, **given})  # type: ignore[arg-type]


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


def decide(*ranks: tuple[Standing, list[Sample]], whole: bool = True, **given: object) -> Verdict:
    samples = {one.rank: seen for one, seen in ranks}
    return judge([one for one, _ in ranks], samples, LIMITS, whole=whole, **given)  # type: ignore[arg-type]


# -- stopped, traced, gone


def test_a_rank_stopped_by_a_signal_is_hung() -> None:
    verdict = decide(
        (standing(0, stopped_s=4.0), still(ELSEWHERE, for_s=2, state="T")), (standing(1), still(ALL_REDUCE, for_s=2))
    )

    assert (verdict.hung, verdict.rule, verdict.odd) == (True, "stopped", (0,))
    assert verdict.sentence == "rank 1 waits in all_reduce, rank 0 is stopped by a signal (state T)"


def test_one_that_was_stopped_a_moment_ago_is_not() -> None:
    verdict = decide((standing(0, stopped_s=1.0, quiet_s=2.0), still(ELSEWHERE, for_s=2, state="T")))

    assert not verdict.hung


@pytest.mark.parametrize("seen", [{"traced": True}, {"state": "t"}])
def test_while_a_debugger_is_attached_nobody_is_hung(seen: dict[str, object]) -> None:
    verdict = decide((standing(0), still(IN_DATASET, **seen)), (standing(1), still(IN_DATASET)))

    assert (verdict.hung, verdict.rule) == (False, "traced")


def test_what_waits_for_a_rank_that_has_ended_waits_for_ever() -> None:
    verdict = decide((standing(0), still(BARRIER)), (standing(1), [Sample(at_s=0.0, state="")]))

    assert (verdict.hung, verdict.rule) == (True, "deadlock")
    assert "rank 1 has ended" in verdict.sentence


# -- deadlock


def test_all_ranks_in_a_collective_that_does_not_move_are_a_deadlock() -> None:
    verdict = decide(*((standing(rank), still(ALL_REDUCE)) for rank in range(4)))

    assert (verdict.hung, verdict.rule, verdict.odd) == (True, "deadlock", ())
    assert verdict.sentence == "ranks 0-3 wait in all_reduce (train.py:60)"


def test_a_deadlock_is_one_in_a_validation_too() -> None:
    ranks = [(standing(rank, Region.OTHER, allowed_s=1800.0), still(BARRIER)) for rank in range(2)]

    assert decide(*ranks).rule == "deadlock"


def test_of_two_collectives_the_rarer_is_the_odd_one() -> None:
    ranks = [(standing(rank), still(ALL_REDUCE)) for rank in range(3)]

    verdict = decide(*ranks, (standing(3), still(BROADCAST)))

    assert verdict.odd == (3,)
    assert verdict.sentence == "ranks 0-2 wait in all_reduce (train.py:60), rank 3 waits in broadcast (train.py:64)"


def test_the_flight_recorder_knows_better_who_is_behind() -> None:
    ranks = [(standing(rank), still(ALL_REDUCE)) for rank in range(4)]

    assert decide(*ranks, behind=(2,)).odd == (2,)


def test_ddp_waits_inside_the_backward() -> None:
    ranks = [(standing(rank), still(BACKWARD)) for rank in range(2)]

    assert decide(*ranks).rule == "deadlock"


@pytest.mark.parametrize(
    "seen",
    [
        still(ALL_REDUCE, for_s=4),  # not for long enough yet
        still(ALL_REDUCE, own_ticks=0, cores=0.0)[:2],  # two samples are no history
        still(ALL_REDUCE)[:-1] + still(BARRIER, for_s=32)[-1:],  # it went on to the next one
        still(ALL_REDUCE, cores=1.0),  # gloo moves bytes: a large tensor on a slow network
        still(VALIDATE, cores=0.8),  # rank 0 validates alone
        still(VALIDATE),  # by asking a service elsewhere
        [],  # nobody knows
    ],
)
def test_one_live_rank_is_why_the_others_wait(seen: list[Sample]) -> None:
    others = [(standing(rank, Region.OTHER, allowed_s=1800.0), still(BARRIER)) for rank in range(1, 4)]

    verdict = decide((standing(0, Region.OTHER, allowed_s=1800.0), seen), *others)

    assert not verdict.hung


def test_on_several_nodes_waiting_may_be_for_another_node() -> None:
    ranks = [(standing(rank), still(ALL_REDUCE)) for rank in range(4)]

    assert not decide(*ranks, whole=False).hung


def test_a_gpu_waits_by_spinning_and_that_is_waiting() -> None:
    spinning = still(ALL_REDUCE, cores=1.0, gpu=True)

    assert decide(*((standing(rank), spinning) for rank in range(2))).rule == "deadlock"


def test_before_the_first_step_a_deadlock_takes_twice_as_long() -> None:
    """The store that all ranks ask may still be starting."""

    def starting(for_s: float) -> Verdict:
        given = {"begun": False, "allowed_s": 3600.0}
        return decide(*((standing(r, Region.NONE, **given), still(BARRIER, for_s=for_s)) for r in range(2)))

    assert not starting(14.0).hung
    assert starting(16.0).rule == "deadlock"


# -- stuck


def test_the_rank_in_the_dataset_is_named_and_those_that_wait_for_it_are_not() -> None:
    ranks = [(standing(rank), still(BACKWARD)) for rank in range(3)]

    verdict = decide(*ranks, (standing(3, Region.LOADER), still(IN_DATASET)))

    assert (verdict.hung, verdict.rule, verdict.odd) == (True, "stuck", (3,))
    assert verdict.sentence == "ranks 0-2 wait in backward, rank 3 is in data.py:40 in __getitem__()"


def test_a_loader_worker_is_named_by_where_it_is() -> None:
    polling = (Frame("poll", "/usr/lib/python3.11/selectors.py", 400), *IN_DATASET[2:])
    seen = still(polling, worker_pid=77, worker_frames=IN_DATASET[:2])

    verdict = decide((standing(0, Region.LOADER), seen))

    assert verdict.sentence == "rank 0 waits for its DataLoader worker (pid 77) in data.py:40 in __getitem__()"


def test_polling_in_a_loader_is_no_progress() -> None:
    """It comes back every five seconds to see whether its workers live."""
    places = [(Frame("poll", "/usr/lib/python3.11/selectors.py", line), *IN_DATASET[2:]) for line in range(400, 420)]
    samples = [replace(sample, frames=places[i % 20]) for i, sample in enumerate(still(IN_DATASET))]

    assert decide((standing(0, Region.LOADER), samples)).rule == "stuck"


def by(index: int, sample: Sample, **given: object) -> Sample:
    """The same sample with counters that advance."""
    return replace(sample, **{name: index * step for name, step in given.items()})  # type: ignore[arg-type]


ALIVE = {
    "not for long enough": still(ELSEWHERE, for_s=10),
    "cpu of its own": still(ELSEWHERE, cores=0.5),
    "cpu of compile workers below it": [by(i, one, tree_ticks=HZ) for i, one in enumerate(still(ELSEWHERE))],
    "bytes of its loader workers": [by(i, one, io_bytes=1 << 20) for i, one in enumerate(still(ELSEWHERE))],
    "its stack changes": [replace(one, frames=(Frame("f", "x.py", i),)) for i, one in enumerate(still(ELSEWHERE))],
    "it waits for a CPU": still(ELSEWHERE, state="R"),
    "a disk": still(ELSEWHERE, state="D"),
    "a validation by name": still(VALIDATE),
    "a save by file": still(SAVE),
    "no stack": still(()),
}


@pytest.mark.parametrize("samples", ALIVE.values(), ids=ALIVE.keys())
def test_what_is_not_stuck(samples: list[Sample]) -> None:
    assert decide((standing(0, Region.FORWARD), still(ELSEWHERE))).rule == "stuck"  # the control

    assert not decide((standing(0, Region.FORWARD), samples)).hung


@pytest.mark.parametrize(
    "given",
    [
        {"region": Region.OTHER, "allowed_s": 1800.0},  # validation, checkpoint, logging
        {"saving": True, "allowed_s": 1800.0},
        {"begun": False, "allowed_s": 3600.0},  # the first epoch's data
        {"allowed_s": 50.0},  # learnt
        {"armed": False},
    ],
)
def test_the_same_stack_is_not_stuck_where_it_may_take_long(given: dict[str, object]) -> None:
    region = Region(given.pop("region", Region.LOADER))  # type: ignore[arg-type]

    assert not decide((standing(0, region, **given), still(IN_DATASET))).hung


@pytest.mark.parametrize(
    "other",
    [
        (standing(1), still(ELSEWHERE, cores=1.0)),  # it recompiles, and the first one waits for it in some way
        (standing(1, Region.OTHER, allowed_s=1800.0), still(VALIDATE)),
        (standing(1, quiet_s=1.0), still(ELSEWHERE)),
        (standing(1, armed=False), still(ELSEWHERE)),
    ],
)
def test_a_live_rank_excuses_the_one_that_may_wait_for_it(other: tuple[Standing, list[Sample]]) -> None:
    stuck = (standing(0, Region.FORWARD), still(ELSEWHERE))
    assert not decide(stuck, other).hung

    ahead = (replace(other[0], steps=20), other[1])
    assert decide(stuck, ahead).odd == (0,)


def test_a_gpu_rank_that_spins_in_one_place_waits_for_the_rank_that_is_stuck() -> None:
    spinning = (standing(0, Region.FORWARD), still(ITEM, cores=1.0, gpu=True))
    stuck = (standing(1, Region.LOADER), still(IN_DATASET))

    verdict = decide(spinning, stuck)

    assert (verdict.rule, verdict.odd) == ("stuck", (1,))
    assert verdict.sentence.startswith("rank 0 waits in GPU work, ")


def test_without_a_gpu_the_same_is_work() -> None:
    working = (standing(0, Region.FORWARD), still(ITEM, cores=1.0))

    assert not decide(working, (standing(1, Region.LOADER), still(IN_DATASET))).hung


# -- the GIL


def test_the_gil_in_the_hands_of_an_idle_thread_is_a_hang_wherever_it_is() -> None:
    holding = still(ELSEWHERE, gil_thread=1000, gil_frames=ELSEWHERE)

    verdict = decide((standing(0, Region.OTHER, allowed_s=1800.0), holding))

    assert (verdict.rule, verdict.odd) == ("held", (0,))
    assert verdict.sentence == "rank 0 holds the GIL in train.py:88 in step() without using the CPU"


@pytest.mark.parametrize(
    "samples",
    [
        still(ELSEWHERE, gil_thread=1000, gil_frames=ELSEWHERE, for_s=10),
        still(ELSEWHERE, gil_thread=1000, gil_frames=ELSEWHERE, cores=1.0),
        still(ELSEWHERE, gil_thread=1000, gil_frames=ELSEWHERE, state="D"),  # an import from a slow disk
        still(ELSEWHERE),
        [replace(one, gil_thread=index) for index, one in enumerate(still(ELSEWHERE))],
    ],
)
def test_a_gil_that_is_used_is_not(samples: list[Sample]) -> None:
    assert not decide((standing(0, Region.OTHER, allowed_s=1800.0), samples)).hung


# -- the cap


def test_at_the_cap_even_a_busy_rank_is_hung() -> None:
    verdict = decide((standing(0, Region.OTHER, quiet_s=1800.0, allowed_s=1800.0), still(VALIDATE, cores=1.0)))

    assert (verdict.hung, verdict.rule, verdict.odd) == (True, "cap", (0,))


def test_before_the_first_step_the_cap_is_another() -> None:
    compiling = still(ELSEWHERE, cores=1.0)

    assert not decide((standing(0, quiet_s=3599.0, begun=False, allowed_s=3600.0), compiling)).hung
    assert decide((standing(0, quiet_s=3600.0, begun=False, allowed_s=3600.0), compiling)).rule == "cap"


def test_at_the_cap_no_stack_is_needed() -> None:
    assert decide((standing(0, quiet_s=1800.0), [])).rule == "cap"


def test_waiting_past_the_cap_for_a_rank_that_moves_is_no_hang() -> None:
    waits = (standing(1, Region.OTHER, quiet_s=2000.0, allowed_s=1800.0), still(BARRIER))

    assert not decide((standing(0, Region.OTHER, quiet_s=1.0), still(VALIDATE, cores=1.0)), waits).hung
    assert decide(waits, whole=False).rule == "cap"  # nobody here moves


@pytest.mark.parametrize(
    "given",
    [
        {"armed": False},  # no probe
        {"region": Region.NONE, "begun": False},  # torch is imported, and it may serve or evaluate
    ],
)
def test_time_alone_judges_nobody_who_never_trained(given: dict[str, object]) -> None:
    region = Region(given.pop("region", Region.OTHER))  # type: ignore[arg-type]

    assert not decide((standing(0, region, quiet_s=1e6, allowed_s=3600.0, **given), still(ELSEWHERE))).hung


def test_but_it_does_when_another_rank_waits_for_them_in_a_collective() -> None:
    verdict = decide(
        (standing(0, Region.NONE, quiet_s=3600.0, begun=False, allowed_s=3600.0), still(ELSEWHERE)),
        (standing(1, Region.NONE, quiet_s=3600.0, begun=False, allowed_s=3600.0), still(BARRIER)),
    )

    assert (verdict.rule, verdict.odd) == ("cap", (0,))


def test_a_program_that_has_ended_may_wait_for_its_threads() -> None:
    ended = (
        Frame("_wait_for_tstate_lock", "/usr/lib/python3.11/threading.py", 1116),
        Frame("_shutdown", "/usr/lib/python3.11/threading.py", 1590),
        Frame("_finish", "/venv/lib/python3.11/site-packages/gpulaunch/launcher/loop/rank_end.py", 60),
    )

    verdict = decide((standing(0, Region.FORWARD, quiet_s=1e5), still(ended)))

    assert not verdict.hung
    assert verdict.sentence == "rank 0 has ended its program and waits for its threads"


# -- when to look again, and progress


def test_a_candidate_is_looked_at_again_soon_and_a_pause_is_left_alone() -> None:
    soon = decide((standing(0, Region.LOADER), still(IN_DATASET, for_s=2)))
    later = decide((standing(0, Region.OTHER, quiet_s=300.0, allowed_s=1800.0), still(VALIDATE, cores=1.0)))

    assert (soon.again_s, later.again_s) == (LIMITS.again_s, LIMITS.rest_s)


def test_what_is_left_alone_is_looked_at_when_its_time_is_over() -> None:
    """Not up to a minute later."""
    over_in_s = 7.0
    rank = standing(0, Region.OTHER, quiet_s=LIMITS.cap_s - over_in_s, allowed_s=LIMITS.cap_s)

    assert decide((rank, still(VALIDATE, cores=1.0))).again_s == over_in_s


@given(st.data())
def test_progress_never_leads_to_a_verdict(data: st.DataObject) -> None:
    """Whatever the ranks do, as long as one of them makes progress and none is definitely hung, the job is not."""
    stacks = st.sampled_from([ALL_REDUCE, BARRIER, BACKWARD, IN_DATASET, ELSEWHERE, VALIDATE, SAVE, ()])
    regions = st.sampled_from(list(Region))
    num_ranks = data.draw(st.integers(1, 5))
    alive = data.draw(st.integers(0, num_ranks - 1))
    ranks: list[tuple[Standing, list[Sample]]] = []
    for rank in range(num_ranks):
        region = data.draw(regions)
        quiet_s = data.draw(st.floats(10.0, 1500.0))
        allowed_s = data.draw(st.sampled_from([10.0, 1800.0]))
        samples = still(data.draw(stacks), cores=data.draw(st.sampled_from([0.0, 1.0])))
        if rank == alive:
            how = data.draw(st.sampled_from(["edge", "cpu", "stack"]))
            if how == "edge":
                region, quiet_s = Region.OTHER, data.draw(st.floats(0.0, 9.0))
            elif how == "cpu":
                samples = still(ELSEWHERE, cores=data.draw(st.floats(0.1, 8.0)))
            else:
                samples = [replace(one, frames=(Frame("f", "x.py", i),)) for i, one in enumerate(samples)]
        ranks.append((standing(rank, region, quiet_s=quiet_s, allowed_s=allowed_s), samples))

    assert not decide(*ranks).hung


# -- a pause between steps


@pytest.mark.parametrize(
    ("quiet_s", "frames", "cores", "hung"),
    [
        (60.0, ELSEWHERE, 0.0, False),  # shorter than pauses may be
        (150.0, ELSEWHERE, 0.0, True),
        (150.0, ELSEWHERE, 0.9, False),  # it works
        (150.0, VALIDATE, 0.0, False),  # it says what it is
        (150.0, SAVE, 0.0, False),
    ],
)
def test_a_rank_that_rests_between_steps(quiet_s: float, frames: tuple[Frame, ...], cores: float, hung: bool) -> None:
    """While the others wait for it in the next backward."""
    verdict = decide(
        (standing(0), still(BACKWARD)),
        (standing(1, Region.OTHER, quiet_s=quiet_s, allowed_s=120.0), still(frames, cores=cores)),
    )

    assert verdict.hung is hung
    assert verdict.odd == ((1,) if hung else ())


def test_a_gpu_that_is_waited_for_in_a_long_validation_is_no_hang() -> None:
    """A loop that reads its loss with .item() is seen in that line at every look, its main thread spinning."""
    resting = standing(0, Region.OTHER, quiet_s=300.0, allowed_s=120.0)

    assert not decide((resting, still(ITEM, cores=1.0, gpu=True))).hung
