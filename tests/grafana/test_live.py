"""Every query of every dashboard, asked of a real Prometheus.

It scrapes two runs at once. One is real: two ranks train on the CPU under gpulaunch, with its sidecar. The other one
never was: 64 ranks and 8 GPUs, of which the pages are written by the real writers and the driver is a stand-in, before
a real sidecar. Both go well, then their loaders are slow, then one rank is, then they are restarted, and then the
made-up one has every other trouble at once: copies, memory, a GPU, pauses, saves, a rank that stands still, the node
and the profiler. `moves` says for every panel in which of these scenes it moves. Each time pictures are taken of all
that the dashboards show, until one shows what it should. No Grafana is here: what it does to a query, `scene.Target`
does.

The target of the made-up run has the labels that jobs which announce themselves give theirs, the real one has none.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import pytest
import yaml
from exprs import dashboards, queries
from many_ranks import GPUS, SLOW
from moves import AGAIN, DATA, HEALTHY, RANK, SCENES, TROUBLE, limited, moves_of, past_already, unmoved
from scene import RULES, SCRAPE_S, WINDOW_S, ManyRanks, Prometheus, Target, until
from shown import every_query, moved, restart, shows, slow_rank, trouble, well
from story import RUNS, RealRun, Story

from needed import program

pytestmark = [pytest.mark.torch, pytest.mark.live, pytest.mark.timeout(1800)]

MANY = 64
each_run = pytest.mark.parametrize("run", RUNS)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    binary = program("prometheus", package="prometheus")
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
        groups: list[dict[str, Any]] = [
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
            if name == RANK:
                node = story.targets["many"].node
                until(
                    lambda: prometheus.instant(f'gpulaunch_finding_active{{instance="{node}"}}').series,
                    "the straggler is found",
                )
            story.take(name, shows)

        scene(HEALTHY, "healthy")
        scene(DATA, "slow-loader")
        scene(RANK, "slow-rank")
        named = f'gpulaunch_rank_info{{instance="{real.address}", rank="1"}}'
        victim = until(lambda: prometheus.instant(named).series, "rank 1 is there")[0][0]["pid"]
        story.restarted_s = time.time()
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
        scene(AGAIN, "healthy")
        scene(TROUBLE, "trouble")
        yield story


# --- every query -----------------------------------------------------------------------------------------------------


@each_run
@pytest.mark.parametrize("scene", SCENES)
def test_every_query_gives_something_finite_with_the_labels_of_its_legend(story: Story, run: str, scene: str) -> None:
    """Or rightly nothing: on the CPU there is no GPU, and nothing has to be found in a healthy run."""
    every_query(story, run, scene)


def test_shares_are_of_a_whole(story: Story) -> None:
    """What is drawn as parts of a whole adds up to it."""
    for (run, scene), album in story.albums.items():
        for place in (("overview", "Where the time of a step goes"), ("recovery", "Where the time goes")):
            parts = album.panel(*place)
            assert sum(parts.last) == pytest.approx(1, abs=0.02), (run, scene, place)


def test_there_is_a_row_for_every_rank(story: Story) -> None:
    album = story.albums["many", HEALTHY]

    for place in (("ranks", "Own work in a step, by rank"), ("dataloader", "Waiting for data, by rank")):
        answer = album.panel(*place)
        assert {labels["rank"] for labels, _ in answer.series} == {str(rank) for rank in range(MANY)}


def test_every_gpu_is_there(story: Story) -> None:
    album = story.albums["many", HEALTHY]

    assert len(album.panel("gpus", "Cards").series) == GPUS


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
    told = SCENES[: SCENES.index(AGAIN) + 1]
    assert [story.marked[run, scene, "Restarts"] for scene in told] == [0, 0, 0, 1]


def test_a_finding_is_marked(story: Story) -> None:
    assert story.marked["many", HEALTHY, "Findings"] == 0
    assert story.marked["many", RANK, "Findings"] == 1


# --- faults move what is meant to show them --------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "scene"), [*product(("many",), SCENES[1:]), *product(("real",), SCENES[1:-1])])
def test_every_panel_moves_that_is_about_what_has_happened(story: Story, run: str, scene: str) -> None:
    """Whatever has a limit is past it, what has none has gone up or down, and a table has other rows."""
    moved(story, run, scene)


def test_the_queue_is_full_where_the_loader_is_fast_and_empty_where_it_is_slow(story: Story) -> None:
    """Of the made-up run: how many a real one had ready at one moment is chance."""
    ready = [story.albums["many", scene].panel("dataloader", "Batches ready").of() for scene in (HEALTHY, DATA)]

    assert ready == [2, 0]


@each_run
def test_a_slow_rank_is_named(story: Story, run: str) -> None:
    """In the made-up run it is found, too."""
    slow_rank(story, run, RANK)
    assert story.albums["many", HEALTHY].panel("overview", "What was found, and what it costs").series == ()


def test_one_fault_does_not_look_like_the_other(story: Story) -> None:
    healthy, loader, rank = (story.albums["many", scene] for scene in (HEALTHY, DATA, RANK))

    assert loader.panel("ranks", "Longest own work").of() < healthy.panel("ranks", "Longest own work").of() + 0.005
    waiting = ("dataloader", "Waiting for data")
    assert rank.panel(*waiting).of() < healthy.panel(*waiting).of() + 0.05


@each_run
def test_a_restart_is_counted_and_its_cause_told(story: Story, run: str) -> None:
    restart(story, run, AGAIN)


def test_what_is_in_trouble_is_named(story: Story) -> None:
    """One rank, one card, one part of the probe, one collector; and somebody is called."""
    trouble(story, "many", TROUBLE)


@pytest.mark.parametrize("scene", SCENES[:-1])
def test_nothing_is_seen_of_what_comes_later(story: Story, scene: str) -> None:
    """Neither in a healthy run nor beside another fault; and no alert is on that needs no time."""
    well(story, "many", scene)


@pytest.mark.parametrize("scene", SCENES[1:])
def test_a_picture_without_the_fault_would_not_do(story: Story, scene: str) -> None:
    """With the one before in its place hardly a panel has moved, and those for a reason: a slow step is a long step."""
    before, without = (story.albums["many", each] for each in (HEALTHY, SCENES[SCENES.index(scene) - 1]))
    about = [panel for panel, move in moves_of("many") if move.scene == scene]

    assert len(unmoved("many", scene, before, without)) > 0.8 * len(about)


def test_a_picture_with_all_the_trouble_would_not_pass_for_a_healthy_one(story: Story) -> None:
    past = [panel for panel, move in moves_of("many") if (move.scene, move.way) == (TROUBLE, "past") and limited(panel)]

    assert len(past_already("many", HEALTHY, story.albums["many", TROUBLE])) >= len(past)


# --- the rules -------------------------------------------------------------------------------------------------------


def test_the_rules_are_evaluated_without_errors(story: Story) -> None:
    """At each moment of the story, with two runs, restarts and GPUs; and each of them more than once."""
    groups = story.prometheus.get("/api/v1/rules")["groups"]
    metrics = story.prometheus.get("/metrics")
    shipped = [each.get("record") or each["alert"] for each in rules()]

    told = {rule["name"]: (rule["health"], rule.get("lastError", "")) for group in groups for rule in group["rules"]}
    assert told == dict.fromkeys(shipped, ("ok", ""))
    assert sum(counted(metrics, "prometheus_rule_evaluation_failures_total")) == 0
    assert min(counted(metrics, "prometheus_rule_evaluations_total")) > 2 * len(shipped)


def counted(metrics: str, name: str) -> list[float]:
    """What Prometheus says of itself, by group of rules."""
    found = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", metrics, re.MULTILINE)
    assert len(found) == len({each["group"] for each in rules()})
    return [float(value) for value in found]


def rules() -> list[dict[str, str]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [{**rule, "group": group["name"]} for group in groups for rule in group["rules"]]
