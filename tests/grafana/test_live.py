"""Every query of every dashboard, asked of a real Prometheus.

It scrapes two runs at once. One is real: two ranks train on the CPU under gpulaunch, with its sidecar. The other one
never was: 64 ranks and 8 GPUs, of which the pages are written by the real writers and the driver is a stand-in, before
a real sidecar. Both go well, then their loaders are slow, then one rank is, then they are restarted; and each time a
picture is taken of all that the dashboards show. No Grafana is here: what it does to a query, `scene.Target` does.

The target of the made-up run has the labels that jobs which announce themselves give theirs, the real one has none.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from exprs import Query, dashboards, queries
from many_ranks import GPUS, SLOW
from scene import SCRAPE_S, WINDOW_S, ManyRanks, Prometheus, Target, until, wrong_with
from story import RUNS, RealRun, Story

pytestmark = [pytest.mark.torch, pytest.mark.live, pytest.mark.timeout(1800)]

MANY = 64
SCENES = ("healthy", "slow-loader", "slow-rank", "restarted")
each_run = pytest.mark.parametrize("run", RUNS)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    binary = shutil.which("prometheus")
    if binary is None:
        assert not os.environ.get("CI"), "prometheus is required in CI"
        pytest.skip("no prometheus (Debian's package prometheus)")
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        (channel := tmp_path_factory.mktemp("many") / "channel").mkdir()
        many = ManyRanks(channel, MANY, GPUS, listener)
        stack.callback(many.stop)
        real = RealRun(tmp_path_factory.mktemp("real"))
        stack.callback(real.stop)
        many.ready()
        real.ready()
        addresses = {"real": real.address, "many": f"127.0.0.1:{listener.getsockname()[1]}"}
        groups = [
            {"targets": [addresses["real"]]},
            {"targets": [addresses["many"]], "labels": {"run": "many-of-all-nodes", "node": "host1", "name": "many"}},
        ]
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), groups)
        stack.callback(prometheus.stop)
        prometheus.start(binary)

        def runs() -> dict[str, Target]:
            found = {
                each["instance"]: each["run"]
                for each, _ in prometheus.instant("gpulaunch_run_info").series
                if prometheus.instant(
                    f'rate(gpulaunch_steps_total{{instance="{each["instance"]}"}}[{WINDOW_S}s]) > 0'
                ).series
            }
            there = {name: address for name, address in addresses.items() if address in found}
            return {name: Target(run=found[at], node=at) for name, at in there.items()} if len(there) == 2 else {}

        story = Story(prometheus, until(runs, "both runs make steps"))

        def scene(name: str, order: str) -> None:
            real.tell(order)
            many.tell(order)
            if name == "slow-rank":
                node = story.targets["many"].node
                until(
                    lambda: prometheus.instant(f'gpulaunch_finding_active{{instance="{node}"}}').series,
                    "the straggler is found",
                )
            story.take(name)

        scene("healthy", "healthy")
        scene("slow-loader", "slow-loader")
        scene("slow-rank", "slow-rank")
        victim = prometheus.instant(f'gpulaunch_rank_info{{instance="{real.address}", rank="1"}}').series[0][0]["pid"]
        os.kill(int(victim), signal.SIGKILL)
        many.tell("restart")
        until(
            lambda: (
                len(prometheus.instant("gpulaunch_attempt == 1").series) == 2
                and prometheus.instant(
                    f'rate(gpulaunch_steps_total{{instance="{real.address}", rank="0"}}[{2 * SCRAPE_S + 1}s]) > 0'
                ).series
            ),
            "both runs go on in another attempt",
        )
        scene("restarted", "healthy")
        yield story


# --- every query -----------------------------------------------------------------------------------------------------

NOTHING_FOUND = {("overview", "What was found, and what it costs"), ("overview", "Found now")}
NO_RESTART = {("recovery", "Restarts by cause"), ("recovery", "Went on from")}
NO_TROUBLE = {("cost", "Parts of the probe out of service"), ("cost", "Parts switched off for their price")}
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


def may_be_empty(query: Query, run: str, scene: str) -> bool:
    place = (query.dashboard, query.panel)
    if run == "many" and place == ("cost", "Stacks sampled"):
        return True  # there is no Python stack of a rank that never was
    if (*place, query.legend) == QUOTA or place in OF_THE_MACHINE:
        return True
    return place in NOTHING_FOUND


def must_be_empty(query: Query, run: str, scene: str) -> bool:
    place = (query.dashboard, query.panel)
    if run == "real" and (query.needs_gpu or place in NO_TROUBLE):
        return True
    return place in NO_RESTART and scene != "restarted"


@each_run
@pytest.mark.parametrize("scene", SCENES)
def test_every_query_gives_something_finite_with_the_labels_of_its_legend(story: Story, run: str, scene: str) -> None:
    """Or rightly nothing: on the CPU there is no GPU, and nothing has to be found in a healthy run."""
    wrong: list[str] = []
    for query, answer in story.albums[run, scene].answers.items():
        if must_be_empty(query, run, scene):
            wrong += [f"{query}: {answer.series} where nothing should be"] if answer.series else []
        elif not answer.series and not may_be_empty(query, run, scene):
            wrong.append(f"{query}: nothing for {story.targets[run].into(query.expr)}")
        wrong += [f"{query}: {what}" for what in wrong_with(query, answer)]

    assert not wrong, "\n".join(wrong)


def test_shares_are_of_a_whole(story: Story) -> None:
    """What is drawn as parts of a whole adds up to it."""
    for (run, scene), album in story.albums.items():
        for place in (("overview", "Where the time of a step goes"), ("recovery", "Where the time goes")):
            parts = album.panel(*place)
            assert sum(parts.last) == pytest.approx(1, abs=0.02), (run, scene, place)


def test_there_is_a_row_for_every_rank(story: Story) -> None:
    album = story.albums["many", "healthy"]

    for place in (("ranks", "Own work in a step, by rank"), ("dataloader", "Waiting for data, by rank")):
        answer = album.panel(*place)
        assert {labels["rank"] for labels, _ in answer.series} == {str(rank) for rank in range(MANY)}


def test_every_gpu_is_there(story: Story) -> None:
    album = story.albums["many", "healthy"]

    assert len(album.panel("gpus", "Cards").series) == GPUS
    assert [labels["xid"] for labels, _ in album.panel("gpus", "Critical errors").series] == ["94"]


def test_one_rank_can_be_looked_at_alone(story: Story) -> None:
    """And what is no rank's, the sidecar's own cost, stays."""
    one = Target(run=story.targets["many"].run, node=story.targets["many"].node, rank=str(SLOW))
    own, cores = (
        next(query for query in queries() if query.panel == panel)
        for panel in ("Own work in a step, by rank", "Cores of the sidecars")
    )

    answer = story.prometheus.instant(one.into(own.expr), story.at_s)

    assert [labels["rank"] for labels, _ in answer.series] == [str(SLOW)]
    assert story.prometheus.instant(one.into(cores.expr), story.at_s).last[0] > 0


def test_of_another_run_on_the_same_address_nothing_is_shown(story: Story) -> None:
    """Whether its targets have a label run or not; of one that was there, test_runs_in_turn has the story."""
    for run in RUNS:
        other = Target(run="another", node=story.targets[run].node)
        asked = [query for query in queries() if "or vector(0)" not in query.expr]

        assert [str(each) for each in asked if story.prometheus.instant(other.into(each.expr), story.at_s).series] == []


# --- variables and annotations ---------------------------------------------------------------------------------------


@each_run
def test_a_run_can_be_chosen_by_its_nodes_and_ranks(story: Story, run: str) -> None:
    """As Grafana asks for the values of variables: `query_result` is a query, `label_values` one of label values."""
    prometheus, target = story.prometheus, story.targets[run]
    chosen = {each["name"]: each for each in dashboards()["gpulaunch-overview.json"]["templating"]["list"]}

    query = re.fullmatch(r"query_result\((.*)\)", chosen["run"]["query"]["query"])
    assert query is not None
    lines = [
        ",".join(f'{name}="{value}"' for name, value in labels.items())
        for labels, _ in prometheus.instant(target.into(query[1])).series
    ]
    assert target.run in [found[1] for line in lines if (found := re.search(chosen["run"]["regex"].strip("/"), line))]
    assert values(prometheus, target, chosen["node"]["query"]["query"]) == [target.node]
    ranks = values(prometheus, target, chosen["rank"]["query"]["query"])
    assert ranks == sorted(str(rank) for rank in range(MANY if run == "many" else 2))


def values(prometheus: Prometheus, target: Target, query: str) -> list[str]:
    asked = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
    assert asked is not None
    found = prometheus.get(f"/api/v1/label/{asked[2]}/values", **{"match[]": target.into(asked[1])})
    return sorted(found)


@each_run
def test_a_restart_is_marked_and_only_then(story: Story, run: str) -> None:
    assert {scene: story.marked[run, scene, "Restarts"] for scene in SCENES} == {
        **dict.fromkeys(SCENES, 0),
        "restarted": 1,
    }


def test_a_finding_is_marked(story: Story) -> None:
    assert story.marked["many", "healthy", "Findings"] == 0
    assert story.marked["many", "slow-rank", "Findings"] == 1


# --- faults move what is meant to show them --------------------------------------------------------------------------


@each_run
def test_a_slow_loader_is_seen(story: Story, run: str) -> None:
    before, after = story.albums[run, "healthy"], story.albums[run, "slow-loader"]

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
    assert (
        after.panel("overview", "Steps per second", "slowest rank").of()
        < before.panel("overview", "Steps per second", "slowest rank").of() / 1.5
    )
    blocked = [
        album.panel("dataloader", "Shares of that", "{{state}}").of(state="blocked") for album in (before, after)
    ]
    assert blocked[1] > blocked[0] + 0.1


def test_the_queue_is_full_where_the_loader_is_fast_and_empty_where_it_is_slow(story: Story) -> None:
    """Of the made-up run: how many a real one had ready at one moment is chance."""
    ready = [story.albums["many", scene].panel("dataloader", "Batches ready").of() for scene in SCENES[:2]]

    assert ready == [2, 0]


@each_run
def test_a_slow_rank_is_seen_and_named(story: Story, run: str) -> None:
    before, after = story.albums[run, "healthy"], story.albums[run, "slow-rank"]
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


def test_what_is_found_is_named_and_priced(story: Story) -> None:
    before, after = (story.albums["many", scene] for scene in ("healthy", "slow-rank"))

    assert before.panel("overview", "What was found, and what it costs").series == ()
    assert after.panel("overview", "What was found, and what it costs").of(rule="straggler") > 0.1
    assert [labels["rule"] for labels, _ in after.panel("overview", "Found now").series] == ["straggler"]


def test_one_fault_does_not_look_like_the_other(story: Story) -> None:
    healthy, loader, rank = (story.albums["many", scene] for scene in ("healthy", "slow-loader", "slow-rank"))

    assert loader.panel("ranks", "Longest own work").of() < healthy.panel("ranks", "Longest own work").of() + 0.005
    waiting = ("dataloader", "Waiting for data")
    assert rank.panel(*waiting).of() < healthy.panel(*waiting).of() + 0.05


@each_run
def test_a_restart_is_counted_and_its_cause_told(story: Story, run: str) -> None:
    before, after = story.albums[run, "slow-rank"], story.albums[run, "restarted"]

    assert [album.panel("overview", "Restarts").of() for album in (before, after)] == [0, 1]
    assert [album.panel("recovery", "Attempt").of() for album in (before, after)] == [0, 1]
    (kind,) = [labels["kind"] for labels, _ in after.panel("recovery", "Restarts by cause").series]
    assert kind == ("exception" if run == "many" else "signal")
    goodput = [album.panel("overview", "Goodput").of() for album in (before, after)]
    assert goodput[1] < goodput[0], "what is done again does not count"
    assert after.panel("recovery", "Went on from").of() > 0
    assert after.panel("recovery", "Newest").of() > 0
