"""What a picture of each scene must show, of both runs. Not a test module.

Pictures are taken until they show it, within bounds; the tests say what the last ones do not.
"""

from __future__ import annotations

from collections.abc import Callable

from exprs import Query, queries
from many_ranks import ODD, SLOW
from moves import AGAIN, DATA, HEALTHY, RANK, SLOW_RANK, TROUBLE, past_already, unmoved
from scene import RANGE_S, wrong_with
from sidecar_with_gpus import ILL, XID
from story import Story

__all__ = ["SHOWS", "every_query", "moved", "restart", "shows", "slow_rank", "trouble", "well"]

# --- every query -----------------------------------------------------------------------------------------------------

FOUND = {("overview", "What was found, and what it costs"), ("overview", "Found now")}
NO_COLLECTOR = {("cost", "Collectors out of service")}
"""Of a node without a driver those for GPUs are in the table; of the figure there is always one."""
MAY_BE_EMPTY = {
    "many": FOUND | NO_COLLECTOR,
    "real": FOUND
    | NO_COLLECTOR
    | {
        ("memory", "Of the control group's limit"),  # where the control group has a limit
        ("memory", "Control groups"),
        ("cost", "Stacks sampled"),  # where py-spy, or our own reader, may look into the ranks
        ("ranks", "Communication of DistributedDataParallel"),  # DDP logs one of many steps
        ("ranks", "Waiting for a core"),  # where the kernel counts it
    },
}
"""Panels that may be empty, by run: what is made up is whole, a real run depends on the machine and on its time."""
QUOTA = ("ranks", "Threads and cores", "quota")
NO_RESTART = {("recovery", "Restarts by cause"), ("recovery", "Went on from")}
NO_TROUBLE = {
    ("cost", "Parts of the probe out of service"),
    ("gpus", "Critical errors"),
}
STANDSTILL = "rank {{rank}}, told"
"""There only while one is told."""
WITH_A_RESTART = {AGAIN, TROUBLE}


def may_be_empty(query: Query, run: str) -> bool:
    place = (query.dashboard, query.panel)
    return place in MAY_BE_EMPTY[run] or (run == "real" and (*place, query.legend) == QUOTA)


def must_be_empty(query: Query, run: str, scene: str) -> bool:
    place = (query.dashboard, query.panel)
    if run == "real" and query.needs_gpu:
        return True
    if place in NO_TROUBLE or query.legend == STANDSTILL:
        return (run, scene) != ("many", TROUBLE)
    return place in NO_RESTART and scene not in WITH_A_RESTART


def every_query(story: Story, run: str, scene: str) -> None:
    """Something finite with the labels of its legend, or rightly nothing."""
    wrong: list[str] = []
    for query, answer in story.albums[run, scene].answers.items():
        if must_be_empty(query, run, scene):
            wrong += [f"{query}: {answer.series} where nothing should be"] if answer.series else []
        elif not answer.series and not may_be_empty(query, run):
            wrong.append(f"{query}: nothing for {story.targets[run].into(query.expr)}")
        wrong += [f"{query}: {what}" for what in wrong_with(query, answer)]
    assert not wrong, "\n".join(wrong)


# --- what moves ------------------------------------------------------------------------------------------------------


def well(story: Story, run: str, scene: str) -> None:
    """Nothing is past its limit that is about what comes later; nor is there an error of a card, or an alert."""
    if run == "real":
        return  # it has no GPU, and its memory is the machine's
    album = story.albums[run, scene]
    past = past_already(run, scene, album)
    assert not past, "\n".join(past)
    assert album.panel("gpus", "Critical errors").series == ()
    assert album.panel("cost", "Collectors out of service", "collectors").last == [0]
    assert story.fired[run, scene] == set()


def healthy(story: Story, run: str, scene: str) -> None:
    """All ranks get on, and the sidecar: what later pictures are compared with is no machine out of breath."""
    album = story.albums[run, scene]
    slowest, fastest = (
        album.panel("overview", "Steps per second", f"{which} rank").of() for which in ("slowest", "fastest")
    )
    assert slowest > 0.85 * fastest
    if run == "many":
        assert album.panel("cost", "Refreshes", "too late").of() < 0.05


def moved(story: Story, run: str, scene: str) -> None:
    """Every panel that is about what happens in the scene has moved since the healthy run."""
    still = unmoved(run, scene, story.albums[run, HEALTHY], story.albums[run, scene])
    assert not still, "\n".join(still)


def slow_rank(story: Story, run: str, scene: str) -> None:
    """The slow rank is named: it works most by itself, and waits least."""
    after = story.albums[run, scene]
    slow = SLOW_RANK[run]

    own = {labels["rank"]: values[-1] for labels, values in after.panel("ranks", "Own work in a step, by rank").series}
    assert max(own, key=lambda rank: own[rank]) == slow
    meeting = after.panel("ranks", "Where ranks meet: time in a step, by rank").series
    waited = {labels["rank"]: values[-1] for labels, values in meeting}
    assert min(waited, key=lambda rank: waited[rank]) == slow
    late = after.panel("ranks", "The five with most work of their own")
    assert late.of(rank=slow) == max(late.last)
    if run == "many":
        assert [labels["rule"] for labels, _ in after.panel("overview", "Found now").series] == ["straggler"]
        assert story.marked[run, scene, "Findings"] == 1


def restart(story: Story, run: str, scene: str) -> None:
    """It is counted once, its cause is told, and what it cost."""
    before, after = story.albums[run, RANK], story.albums[run, scene]

    (kind,) = [labels["kind"] for labels, _ in after.panel("recovery", "Restarts by cause").series]
    assert kind == ("exception" if run == "many" else "signal")
    gone = [
        [album.panel("recovery", "Where the time has gone").of(bucket=bucket) for bucket in ("restart", "lost_work")]
        for album in (before, after)
    ]
    assert gone[0] == [0, 0]
    assert gone[1][0] > 0, "a standstill; and of what is done again there may be nothing"
    (goodput,) = (each for each in queries() if (each.dashboard, each.panel) == ("overview", "Goodput"))
    lowest = min(story.since_the_restart(run, goodput.expr).series[0][1])
    most = 1 - sum(gone[1]) / RANGE_S
    assert lowest < (1 + most) / 2, "neither counts; what a scrape saw may be nearly one scrape short of it"
    assert story.marked[run, scene, "Restarts"] == 1


def trouble(story: Story, run: str, scene: str) -> None:
    """Of the made-up run: it is told which rank, which card and which part it is, and no other."""
    if run == "real":
        return
    after = story.albums[run, scene]

    largest = after.panel("memory", "The five largest ranks")
    assert largest.of(rank=str(SLOW)) == max(largest.last)
    for panel in ("Clock", "Temperature", "Utilization", "Memory"):  # one card is ill, and no other
        values = {labels["gpu"]: values[-1] for labels, values in after.panel("gpus", panel).series}
        ill = values.pop(str(ILL))
        assert len(set(values.values())) == 1, panel
        assert ill not in values.values(), panel
    (error,) = after.panel("gpus", "Critical errors").series
    assert (error[0]["gpu"], error[0]["xid"], error[1]) == (str(ILL), str(XID), [1])
    assert after.panel("gpus", "Rows replaced").of(gpu=str(ILL), kind="uncorrectable") == 1
    assert after.panel("cost", "Collectors out of service", "collectors").of() == 1
    assert [labels["collector"] for labels, _ in after.panel("cost", "Collectors out of service", "").series] == [
        "findings"
    ]
    off = after.panel("cost", "Parts of the probe out of service").series
    assert [(labels["rank"], labels["part"]) for labels, _ in off] == [(str(ODD), "gpu_memory_fraction")]
    assert story.fired[run, scene] >= {"GpulaunchHang", "GpulaunchXid", "GpulaunchEccErrors"}


Shows = Callable[[Story, str, str], None]
SHOWS: dict[str, tuple[Shows, ...]] = {
    HEALTHY: (every_query, well, healthy),
    DATA: (every_query, well, moved),
    RANK: (every_query, well, moved, slow_rank),
    AGAIN: (every_query, well, moved, restart),
    TROUBLE: (every_query, moved, trouble),
}


def shows(story: Story, run: str, scene: str) -> None:
    """All of it."""
    for each in SHOWS[scene]:
        each(story, run, scene)
