"""What a picture of each scene must show, of both runs. Not a test module.

Pictures are taken until they show it, within bounds; the tests say what the last ones do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from exprs import Query, dashboards, panels, queries
from many_ranks import SLOW
from scene import RANGE_S, wrong_with
from sidecar_with_gpus import ILL, XID
from story import Story

__all__ = ["SHOWS", "Shows", "every_query", "restart", "shows", "slow_loader", "slow_rank", "trouble", "well"]

# --- every query -----------------------------------------------------------------------------------------------------

NOTHING_FOUND = {("overview", "What was found, and what it costs"), ("overview", "Found now")}
NO_RESTART = {("recovery", "Restarts by cause"), ("recovery", "Went on from")}
NO_TROUBLE = {
    ("cost", "Parts of the probe out of service"),
    ("cost", "Parts switched off for their price"),
    ("gpus", "Critical errors"),
}
OF_THE_MACHINE = {
    ("memory", "Of the control group's limit"),  # where the control group has a limit
    ("memory", "Control groups"),
    ("cost", "Longer steps"),  # once there are comparisons
    ("cost", "By how much steps are longer"),
    ("cost", "Collectors out of service"),  # the table: none, where there is a driver
    ("cost", "Stacks sampled"),  # where py-spy, or our own reader, may look into the ranks
    ("ranks", "Communication of DistributedDataParallel"),  # DDP logs one of many steps
    ("ranks", "Waiting for a core"),
}
"""Panels that may be empty: it depends on the machine, or on how long the run has run."""
QUOTA = ("ranks", "Threads and cores", "quota")
WITH_A_RESTART = {"restarted", "trouble"}


def may_be_empty(query: Query, run: str) -> bool:
    place = (query.dashboard, query.panel)
    if run == "many" and place == ("cost", "Stacks sampled"):
        return True  # there is no Python stack of a rank that never was
    return (*place, query.legend) == QUOTA or place in OF_THE_MACHINE | NOTHING_FOUND


def must_be_empty(query: Query, run: str, scene: str) -> bool:
    place = (query.dashboard, query.panel)
    if run == "real" and query.needs_gpu:
        return True
    if place in NO_TROUBLE:
        return (run, scene) != ("many", "trouble")
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


# --- limits ----------------------------------------------------------------------------------------------------------


def is_past(dashboard: str, panel: str, value: float) -> bool:
    """Whether a value is past a limit of its panel: in no green."""
    steps = steps_of(dashboard, panel)
    color: str = [step["color"] for step in steps if step["value"] is None or step["value"] <= value][-1]
    return color != "green"


@cache
def steps_of(dashboard: str, panel: str) -> list[dict[str, Any]]:
    (steps,) = (
        each["fieldConfig"]["defaults"]["thresholds"]["steps"]
        for each, _ in panels(dashboards()[f"gpulaunch-{dashboard}.json"])
        if each["title"] == panel and each["type"] != "table"
    )
    assert len(steps) > 1, f"{dashboard} / {panel} has no limit"
    return list(steps)


ILL_CARD = {"gpu": str(ILL)}
PAST_THEIR_LIMITS: list[tuple[str, str, str | None, dict[str, str]]] = [
    ("transfer", "Pageable, of what went to the GPU", None, {}),
    ("transfer", "Standing still for copies", None, {}),
    ("transfer", "Standing still for syncs", None, {}),
    ("transfer", "Syncs in a step", None, {}),
    ("transfer", "Standing still for syncs, by rank", "highest", {}),
    ("transfer", "Width of the link, of what it could be", "GPU {{gpu}} width", ILL_CARD),
    ("overview", "Waiting for the GPU", "copies", {}),
    ("overview", "Waiting for the GPU", "syncs", {}),
    ("memory", "Memory of the nodes in use", None, {}),
    ("memory", "Shared memory in use", None, {}),
    ("memory", "Of the control group's limit", None, {}),
    ("memory", "Reserved and not usable", "median", {}),
    ("memory", "Trouble", "given back", {}),
    ("memory", "Trouble", "failed", {}),
    ("gpus", "Utilization", None, ILL_CARD),
    ("gpus", "Memory", None, ILL_CARD),
    ("gpus", "Throttled", None, {"reason": "thermal"}),
    ("gpus", "Temperature", None, ILL_CARD),
    ("gpus", "Memory errors", None, {**ILL_CARD, "severity": "uncorrected"}),
    ("gpus", "Rows not replaced", "{{instance}} {{gpu}} wait", ILL_CARD),
    ("gpus", "Packets sent again", None, ILL_CARD),
    ("cost", "Inside of the ranks", None, {}),
    ("cost", "Time inside the probe", "highest", {}),
    ("cost", "Longer steps", None, {}),
    ("cost", "Parts switched off", None, {}),
    ("cost", "Errors of collectors", None, {"collector": "findings"}),
]
"""Panels that are about the faults of the scene `trouble`: past their limit then, and well within it before."""
TIMES_MORE: list[tuple[str, str, str | None, dict[str, str], float]] = [
    ("transfer", "Copied", None, {"direction": "h2d", "host_memory": "pageable"}, 20),
    ("transfer", "Standing still for copies, by kind", None, {"direction": "h2d", "host_memory": "pageable"}, 20),
    ("transfer", "Syncs", None, {"kind": "item"}, 20),
    ("transfer", "Standing still for syncs, by kind", None, {"kind": "item"}, 20),
    ("transfer", "Across PCIe", None, {**ILL_CARD, "direction": "receive"}, 2),
    ("memory", "torch's allocator", None, {"state": "inactive_split"}, 3),
    ("memory", "Pinned", None, {}, 3),
    ("memory", "Shared memory", "{{state}}", {"state": "used"}, 3),
    ("memory", "Control groups", None, {"state": "used"}, 2),
    ("memory", "The five largest ranks", None, {"rank": str(SLOW)}, 3),
]
"""Panels without a limit that are about them: so many times as much as before, and in all scenes before the same."""


def well(story: Story, run: str, scene: str) -> None:
    """Nothing is wrong with copies, memory, cards and the profiler itself."""
    if run == "real":
        return  # it has no GPU, and its memory is the machine's
    album = story.albums[run, scene]
    past = [
        (dashboard, panel, value)
        for dashboard, panel, legend, labels in PAST_THEIR_LIMITS
        for value in album.panel(dashboard, panel, legend).all_of(**labels)
        if is_past(dashboard, panel, value)
    ]
    assert past == []
    assert album.panel("gpus", "Critical errors").series == ()
    assert album.panel("cost", "Collectors out of service", "collectors").last == [0]
    assert story.fired[run, scene] == set()


def healthy(story: Story, run: str, scene: str) -> None:
    """All ranks get on: what later pictures are compared with is no picture of a machine out of breath."""
    album = story.albums[run, scene]
    slowest, fastest = (
        album.panel("overview", "Steps per second", f"{which} rank").of() for which in ("slowest", "fastest")
    )
    assert slowest > 0.85 * fastest


# --- faults move what is meant to show them --------------------------------------------------------------------------


def slow_loader(story: Story, run: str, scene: str) -> None:
    before, after = story.albums[run, "healthy"], story.albums[run, scene]

    for dashboard, panel, legend in (
        ("overview", "Where the time of a step goes", None),
        ("overview", "Waiting for data", "worst rank"),
        ("overview", "Waiting for data", "all ranks"),
        ("dataloader", "Waiting for data", None),
    ):
        waited = {"phase": "data_wait"} if legend is None and dashboard == "overview" else {}
        shares = [album.panel(dashboard, panel, legend).of(**waited) for album in (before, after)]
        assert shares[1] > shares[0] + 0.2, (panel, shares)
    waits = [album.panel("dataloader", "How long a batch is waited for", "95 %").of() for album in (before, after)]
    assert waits[1] > 1.5 * waits[0]
    assert after.panel("overview", "Step time", "mean").of() > 1.5 * before.panel("overview", "Step time", "mean").of()
    fast, slow = (
        album.panel("overview", "Steps per second", f"{which} rank").of()
        for album, which in ((before, "fastest"), (after, "slowest"))
    )
    assert slow < fast / 1.3, "half as many; a rank that was held up makes up for it within the window of a rate"
    blocked = [
        album.panel("dataloader", "Shares of that", "{{state}}").of(state="blocked") for album in (before, after)
    ]
    assert blocked[1] > blocked[0] + 0.1


def slow_rank(story: Story, run: str, scene: str) -> None:
    before, after = story.albums[run, "healthy"], story.albums[run, scene]
    slow = str(SLOW if run == "many" else 1)

    excess = [album.panel("ranks", "Longest own work").of() for album in (before, after)]
    assert excess[1] > excess[0] + 0.008, "of 30 ms; the median of two ranks is between them"
    share = [album.panel("ranks", "Of a step").of() for album in (before, after)]
    assert share[1] > share[0] + 0.05
    own = {labels["rank"]: values[-1] for labels, values in after.panel("ranks", "Own work in a step, by rank").series}
    assert max(own, key=lambda rank: own[rank]) == slow
    meeting = after.panel("ranks", "Where ranks meet: time in a step, by rank").series
    waited = {labels["rank"]: values[-1] for labels, values in meeting}
    assert min(waited, key=lambda rank: waited[rank]) == slow
    late = after.panel("ranks", "The five with most work of their own")
    assert late.of(rank=slow) == max(late.last)
    why = "Why: the rank with most of each phase, above the median rank"
    assert after.panel("ranks", why, "forward").of() > before.panel("ranks", why, "forward").of() + 0.008
    if run == "many":
        assert after.panel("overview", "What was found, and what it costs").of(rule="straggler") > 0.1
        assert [labels["rule"] for labels, _ in after.panel("overview", "Found now").series] == ["straggler"]
        assert story.marked[run, scene, "Findings"] == 1


def restart(story: Story, run: str, scene: str) -> None:
    before, after = story.albums[run, "slow-rank"], story.albums[run, scene]

    assert [album.panel("overview", "Restarts").of() for album in (before, after)] == [0, 1]
    assert [album.panel("recovery", "Attempt").of() for album in (before, after)] == [0, 1]
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
    assert after.panel("recovery", "Went on from").of() > 0
    assert after.panel("recovery", "Newest").of() > 0
    assert story.marked[run, scene, "Restarts"] == 1


def trouble(story: Story, run: str, scene: str) -> None:
    """Of the made-up run: copies, syncs, memory, one card, the probe and a collector all at once."""
    if run == "real":
        return
    before, after = story.albums[run, "healthy"], story.albums[run, scene]

    within = [
        (dashboard, panel, value)
        for dashboard, panel, legend, labels in PAST_THEIR_LIMITS
        for value in (after.panel(dashboard, panel, legend).of(**labels),)
        if not is_past(dashboard, panel, value)
    ]
    assert within == []
    for dashboard, panel, legend, labels, times in TIMES_MORE:
        amounts = [album.panel(dashboard, panel, legend).all_of(**labels) for album in (before, after)]
        assert amounts[1], (panel, "has none")
        if amounts[0] or "five" not in panel:  # of five of many alike, it was hardly one before
            assert amounts[1][0] > times * amounts[0][0], (panel, amounts)
    assert after.panel("memory", "The five largest ranks").of(rank=str(SLOW)) == max(
        after.panel("memory", "The five largest ranks").last
    )
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
    for panel, part in (
        ("Parts switched off for their price", "every_step"),
        ("Parts of the probe out of service", "gpu_memory_fraction"),
    ):
        assert [(labels["rank"], labels["part"]) for labels, _ in after.panel("cost", panel).series] == [("2", part)]
    assert story.fired[run, scene] >= {"GpulaunchXid", "GpulaunchEccErrors"}


Shows = Callable[[Story, str, str], None]
SHOWS: dict[str, tuple[Shows, ...]] = {
    "healthy": (every_query, well, healthy),
    "slow-loader": (every_query, well, slow_loader),
    "slow-rank": (every_query, well, slow_rank),
    "restarted": (every_query, well, restart),
    "trouble": (every_query, trouble),
}


def shows(story: Story, run: str, scene: str) -> None:
    """All of it."""
    for each in SHOWS[scene]:
        each(story, run, scene)
