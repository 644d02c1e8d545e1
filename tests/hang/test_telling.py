"""Programs as histories with a clock of their own, through the watch, the judge and what was told: when a standstill is
told, that it is taken back, and that no healthy one is acted on. `detector` does the same with real clocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from gpulaunch.launcher.hang.activity import following
from gpulaunch.launcher.hang.announcer import Announcer
from gpulaunch.launcher.hang.judge import judge
from gpulaunch.launcher.hang.values import Limits, Sample, Verdict
from gpulaunch.launcher.hang.watch import RankSnapshot, Watch
from gpulaunch.profiler.channel.layout import Region
from gpulaunch.profiler.stack import Frame

LIMITS = Limits()
TORCH = "/venv/lib/python3.11/site-packages/torch"
MAIN = Frame("<module>", "/home/me/train.py", 100)
BACKWARD = (Frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 900), MAIN)
FETCH = (
    Frame("_MapDatasetFetcher.fetch", f"{TORCH}/utils/data/_utils/fetch.py", 50),
    Frame("_next_data", f"{TORCH}/utils/data/dataloader.py", 700),
    MAIN,
)
RETRY = (Frame("retry", "/home/me/data.py", 31), Frame("Remote.__getitem__", "/home/me/data.py", 40), *FETCH)
POLL = (Frame("poll", "/usr/lib/python3.11/selectors.py", 400), *FETCH[1:])


@dataclass(kw_only=True)
class Stand:
    """Where a rank stands for a while, after 50 fast steps."""

    frames: tuple[Frame, ...]
    region: Region = Region.OTHER
    for_s: float
    cores: float = 0.0
    bytes_per_s: float = 0.0
    begun: bool = True
    saving: bool = False
    worker_frames: tuple[Frame, ...] = ()


@dataclass
class History:
    """What was told, taken back and acted on, and when, counted from the beginning of the standstill."""

    told: list[tuple[float, Verdict]] = field(default_factory=list)
    over: list[tuple[float, tuple[int, ...], float]] = field(default_factory=list)
    acted: list[tuple[float, Verdict]] = field(default_factory=list)


def live(*ranks: Stand, limits: Limits = LIMITS, whole: bool = True) -> History:
    """Some fast steps, then each rank where it stands, until 20 s after all have gone on. As in `detector`: the watch
    ticks each second, and two samples are taken where the judge asks for a look."""
    watch, telling, history = Watch(limits), Announcer(), History()
    samples: dict[int, list[Sample]] = {}
    look_at_s, acted, begin_s = 0.0, False, 1010.0
    for now_s in map(float, range(1001, int(begin_s + max(one.for_s for one in ranks) + 20))):
        looks: list[RankSnapshot] = []
        for rank, stand in enumerate(ranks):
            stands = begin_s <= now_s < begin_s + stand.for_s
            look = RankSnapshot(
                rank=rank, pid=7 + rank, state="S", armed=True, begun=stand.begun, armed_s=1000.0,
                edge_s=begin_s - 0.1 if stands else now_s - 0.1, region=stand.region, steps=int(now_s),
            )  # fmt: skip
            looks.append(replace(look, steps=1010, saving=stand.saving) if stands else look)
        standings = watch.tick(now_s, looks)
        over = telling.resolved(watch.moved_s)
        if over is not None:
            history.over.append((now_s - begin_s, *over))
        if not standings:
            samples, look_at_s, acted = {}, 0.0, False
            continue
        if now_s < look_at_s or acted:
            continue
        for rank, stand in enumerate(ranks):
            for at_s in (now_s, now_s + limits.sample_s):
                ticks = int((at_s - begin_s) * 100 * stand.cores)
                sample = Sample(
                    at_s=at_s, state="S", frames=stand.frames, main_ticks=ticks, own_ticks=ticks, tree_ticks=ticks,
                    worker_frames=stand.worker_frames, io_bytes=int((at_s - begin_s) * stand.bytes_per_s),
                )  # fmt: skip
                kept = samples.setdefault(rank, [])
                kept.append(following(kept[-1] if kept else None, sample, standings[rank], limits))
        verdict = judge(standings, samples, limits, whole=whole)
        if verdict.acts:
            acted = True
            history.acted.append((now_s - begin_s, verdict))
        elif telling.is_due(verdict):
            history.told.append((now_s - begin_s, verdict))
            telling.reported(verdict, watch.moved_s)
        look_at_s = now_s + telling.again_s(verdict)
    return history


def waits(for_s: float, **given: object) -> Stand:
    return Stand(frames=BACKWARD, region=Region.BACKWARD, for_s=for_s, **given)  # type: ignore[arg-type]


def rests(line: int, for_s: float, name: str = "<module>", **given: object) -> Stand:
    return Stand(frames=(Frame(name, "/home/me/train.py", line), MAIN), for_s=for_s, **given)  # type: ignore[arg-type]


STALL = Stand(frames=RETRY, region=Region.LOADER, for_s=60.0)
WORKER = Stand(frames=POLL, region=Region.LOADER, for_s=60.0, worker_frames=RETRY[:3])
HEALTHY = {
    "60 s in the dataset of one rank": (STALL, waits(60.0)),
    "60 s in the dataset of all ranks": (STALL, STALL),
    "60 s in a dataloader worker": (WORKER, waits(60.0)),
    "240 s in a recv of one rank": (rests(50, 240.0), waits(240.0)),
    "240 s in a recv of all ranks": (rests(50, 240.0), rests(50, 240.0)),
    "240 s in a poll of one rank": (rests(51, 240.0), waits(240.0)),
    "240 s in a poll of all ranks": (rests(51, 240.0), rests(51, 240.0)),
    "240 s asleep, one rank": (rests(52, 240.0), waits(240.0)),
    "240 s asleep, all ranks": (rests(52, 240.0), rests(52, 240.0)),
    "a validation": (rests(53, 1500.0, "validate", cores=0.9), waits(1500.0)),
    "a validation that rests": (rests(53, 300.0, "validate"), waits(300.0)),
    "a save": (rests(54, 300.0, "save_checkpoint", saving=True), rests(54, 300.0, "save_checkpoint", saving=True)),
    "a compile": (rests(55, 900.0, cores=1.0, region=Region.FORWARD, begun=False),) * 2,
    "a compile after the first step": (rests(55, 900.0, cores=1.0, region=Region.FORWARD),) * 2,
    "a download": (rests(56, 500.0, "download"), waits(500.0)),
    "a slow network": (waits(300.0), waits(300.0)),
    "a model that is sent slowly, one rank to all": (waits(1500.0, bytes_per_s=4e6),) * 2,
    "a slow recv": (rests(56, 1500.0, bytes_per_s=4e6), waits(1500.0)),
}


@pytest.mark.parametrize("ranks", HEALTHY.values(), ids=HEALTHY.keys())
def test_a_healthy_standstill_is_told_and_taken_back_and_never_acted_on(ranks: tuple[Stand, ...]) -> None:
    history = live(*ranks)

    assert history.acted == []
    assert history.told, "told"
    assert [(after_s, len(moved) > 0) for _, moved, after_s in history.over] == [
        (pytest.approx(ranks[0].for_s, abs=1.5), True)
    ]


@pytest.mark.parametrize("stand", [STALL, WORKER, rests(50, 60.0)], ids=["dataset", "worker", "between steps"])
@pytest.mark.parametrize("both", [False, True], ids=["one rank", "all ranks"])
def test_rest_is_told_within_a_minute_with_rank_line_and_what_waits(stand: Stand, both: bool) -> None:
    history = live(stand, stand if both else waits(60.0))

    ((at_s, verdict),) = history.told
    assert 30 <= at_s <= 60
    assert verdict.odd == ((0, 1) if both else (0,))
    assert "data.py:31" in verdict.sentence or "train.py:50" in verdict.sentence
    assert both or verdict.sentence.endswith("rank 1 waits for it in backward")
    assert verdict.due_in_s == pytest.approx(600 - at_s, abs=1)


@pytest.mark.parametrize(
    "name", ["read_sample", "log_metrics", "push_batch", "sample_batch", "report_loss", "test_link", "validate"]
)
def test_a_name_lengthens_the_telling_to_two_minutes_and_changes_no_act(name: str) -> None:
    history = live(rests(60, 3600.0, name))

    assert 115 <= history.told[0][0] <= 125
    assert history.acted[0][0] == pytest.approx(600, abs=2)


def test_it_is_told_again_whenever_it_has_lasted_twice_as_long() -> None:
    at_s = [at_s for at_s, _ in live(rests(50, 500.0)).told]

    assert at_s == [pytest.approx(30 * 2**times, rel=0.05) for times in range(5)]


def test_a_file_may_be_called_as_the_sentence_begins() -> None:
    stand = Stand(frames=(Frame("sleep", "/home/me/waits.py", 17), MAIN), for_s=60.0)

    ((_, verdict),) = live(stand, waits(60.0)).told

    assert verdict.sentence.startswith("rank 0 is in waits.py:17 in sleep(), rank 1 waits for it")


def test_a_second_standstill_is_told_anew() -> None:
    watch, telling = Watch(LIMITS), Announcer()
    moved = {0: 100.0}
    late = Verdict(tells=True, acts=False, rule="late", sentence="", odd=(0,), quiet_s=40.0)
    watch.tick(1.0, [])

    telling.reported(late, moved.get)
    assert telling.resolved(moved.get) is None
    assert not telling.is_due(replace(late, quiet_s=79.0))
    moved[0] = 163.0

    assert telling.resolved(moved.get) == ((0,), 63.0)
    assert telling.resolved(moved.get) is None, "once"
    assert telling.is_due(late)


def test_of_several_ranks_it_is_taken_back_when_all_have_moved_or_ended() -> None:
    telling, moved = Announcer(), {0: 1.0, 1: 1.0, 2: 1.0}
    telling.reported(Verdict(tells=True, acts=False, rule="late", sentence="", odd=(0, 1, 2), quiet_s=40.0), moved.get)

    moved[0] = 50.0
    assert telling.resolved(moved.get) is None
    del moved[1]
    moved[2] = 60.0

    assert telling.resolved(moved.get) == ((0, 2), 59.0)


def test_what_rests_for_ever_is_acted_on_after_the_timeout() -> None:
    """--hang-timeout, one number: for the dataset, between steps, and where all wait in one collective."""
    for ranks in [(replace(STALL, for_s=3600.0), waits(3600.0)), (rests(50, 3600.0),) * 2, (waits(3600.0),) * 2]:
        history = live(*ranks)
        assert history.acted[0][0] == pytest.approx(600, abs=2)
        assert history.acted[0][1].rule == "timeout"
        assert history.over != [], "and what was told ends with it"


def test_work_is_never_acted_on() -> None:
    assert live(rests(57, 7200.0, cores=1.0), waits(7200.0)).acted == []
