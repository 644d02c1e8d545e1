"""A state becomes a page, held against a golden page, promtool and a parser; only what the catalogue knows leaves."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE
from gpulaunch.exporters.prometheus.families import CatalogueError, Families
from gpulaunch.exporters.prometheus.metrics.metric import Kind
from gpulaunch.exporters.prometheus.render import OPENMETRICS, TEXT, Board, negotiate
from gpulaunch.exporters.prometheus.values import Facts, families
from gpulaunch.profiler.record import NodeState

GOLDEN = Path(__file__).with_name("golden.txt")


def page(state: NodeState, accept: str = "") -> str:
    board = Board(version="1.2.3", clock=lambda: 0.0)
    board.publish(state)
    board.metrics("text/plain")  # so that there is a time to tell: a page tells how long the one before it took
    board.publish(dataclasses.replace(state))
    return board.metrics(accept)[1].decode()


def test_the_page_is_the_golden_page(node: NodeState) -> None:
    """After a change that is meant: GOLDEN=write pytest tests/prometheus, and read the difference."""
    import platform

    text = page(node).replace(f'python="{platform.python_version()}"', 'python="3.x"')
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_every_metric_of_the_catalogue_can_be_on_the_page(node: NodeState) -> None:
    """...so that no row of the catalogue is a promise that nobody keeps."""
    assert node.host is not None
    full = dataclasses.replace(
        node,
        host=dataclasses.replace(
            node.host, memory_total_bytes=2, memory_available_bytes=1, page_cache_bytes=1, swap_used_bytes=1
        ),
    )
    types = {line.split()[2] for line in page(full).splitlines() if line.startswith("# TYPE")}
    assert types == {metric.name for metric in CATALOGUE}


def test_what_is_not_known_is_absent(node: NodeState, empty_node: NodeState) -> None:
    lines = page(node).splitlines()
    assert not [line for line in lines if line.startswith("gpulaunch_gpu_memory_bytes") and 'rank="1"' in line]
    assert not [line for line in lines if 'kind="pss"' in line and 'role="workers"' in line]
    assert not [line for line in lines if line.startswith("gpulaunch_node_memory")]
    assert not [line for line in lines if line.startswith("gpulaunch_checkpoint_") and 'rank="1"' in line]
    assert not [line for line in lines if line.startswith("gpulaunch_gpu_") and 'gpu="1"' in line]
    without_run = page(dataclasses.replace(node, run=None))
    assert "gpulaunch_goodput" not in without_run
    assert "gpulaunch_preempted" not in without_run
    assert 'gpulaunch_steps_total{rank="1"} 0.0' in lines
    assert "rank=" not in page(empty_node).replace('rank=""', "")


def test_xids_that_are_not_in_our_list_are_one_series_however_many_numbers_come(node: NodeState) -> None:
    well, ill = ({31: 1, 79: 2}, {79: 1, **{10**6 + each: 2 for each in range(500)}, 0: 7})
    gpus = tuple(dataclasses.replace(gpu, xids=xids) for gpu, xids in zip(node.gpus, (well, ill), strict=True))
    lines = page(dataclasses.replace(node, gpus=gpus)).splitlines()

    assert [line.removeprefix("gpulaunch_gpu_xid_errors_total") for line in lines if "xid=" in line] == [
        '{gpu="0",xid="31"} 1.0',
        '{gpu="0",xid="79"} 2.0',
        '{gpu="1",xid="79"} 1.0',
        '{gpu="1",xid="other"} 1007.0',
    ]


@pytest.mark.parametrize(("inflight", "told"), [(None, []), ({}, ["0.0"]), ({7: 5, 8: 1}, ["6.0"])])
def test_batches_that_may_not_be_seen_are_not_told_as_none(
    node: NodeState, inflight: dict[int, int] | None, told: list[str]
) -> None:
    seen = dataclasses.replace(node.processes[0], shm_inflight_bytes=inflight)
    text = page(dataclasses.replace(node, processes=(seen,)))

    assert [line.split()[1] for line in text.splitlines() if line.startswith("gpulaunch_shm_inflight_bytes{")] == told


@pytest.mark.parametrize(
    ("captured_s", "age"),
    [
        ([4], ["2.0"]),
        ([4, 5, None], ["1.0"]),
        ([7], ["0.0"]),  # saved since the refresh began
        ([None], []),
    ],
)
def test_the_age_of_the_newest_checkpoint_is_that_of_the_latest_rank(
    node: NodeState, captured_s: list[int | None], age: list[str]
) -> None:
    busy = node.training[0]
    assert busy.checkpoint is not None
    ranks = tuple(
        dataclasses.replace(
            busy,
            rank=rank,
            checkpoint=dataclasses.replace(
                busy.checkpoint, saves=0 if at_s is None else 1, captured_ns=0 if at_s is None else at_s * 1_000_000_000
            ),
        )
        for rank, at_s in enumerate(captured_s)
    )
    text = page(dataclasses.replace(node, training=ranks))
    assert [
        line.split()[1] for line in text.splitlines() if line.startswith("gpulaunch_checkpoint_age_seconds ")
    ] == age


def promtool() -> str:
    path = shutil.which("promtool")
    if path is None:
        message = "promtool is not installed (Debian: apt-get install prometheus)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.mark.parametrize("which", ["node", "empty_node"])
def test_promtool_finds_nothing_to_say(which: str, request: pytest.FixtureRequest) -> None:
    text = page(request.getfixturevalue(which))
    result = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_promtool_would_have_found_something() -> None:
    text = "# HELP gpulaunch_steps Steps.\n# TYPE gpulaunch_steps counter\ngpulaunch_steps 1\n"
    result = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert result.returncode == 3


def test_both_formats_say_the_same(node: NodeState) -> None:
    def values(families: object) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families  # type: ignore[attr-defined]
            for sample in family.samples
        }

    text = values(parse_text(page(node, "text/plain")))
    openmetrics = values(parse_openmetrics(page(node, "application/openmetrics-text")))
    assert len(text) > 80
    assert text == openmetrics


def test_a_histogram_adds_up(node: NodeState) -> None:
    (family,) = [f for f in parse_text(page(node)) if f.name == "gpulaunch_step_duration_seconds"]
    busy = [sample for sample in family.samples if sample.labels["rank"] == "0"]
    buckets = [sample.value for sample in busy if sample.name.endswith("_bucket")]
    by_suffix = {sample.name.rpartition("_")[2]: sample.value for sample in busy}
    assert buckets == sorted(buckets)
    assert buckets[-1] == by_suffix["count"] == 100
    assert by_suffix["sum"] == 130.0


@pytest.mark.parametrize(
    ("name", "labels", "complaint"),
    [
        ("gpulaunch_invented_total", {}, "not in the catalogue"),
        ("gpulaunch_steps_total", {}, "has the labels"),
        ("gpulaunch_steps_total", {"rank": "0", "pid": "1"}, "has the labels"),
        ("gpulaunch_shm_bytes", {"state": "stolen"}, "state='stolen' is not in the catalogue"),
    ],
)
def test_what_the_catalogue_does_not_know_is_refused(name: str, labels: dict[str, str], complaint: str) -> None:
    with pytest.raises(CatalogueError, match=complaint):
        Families().put(name, 1.0, **labels)


def test_a_histogram_needs_its_buckets() -> None:
    with pytest.raises(CatalogueError, match="buckets"):
        Families().put_histogram("gpulaunch_step_duration_seconds", (1.0, 2.0), (1, 2), 3.0, rank="0")
    with pytest.raises(CatalogueError, match="not a histogram"):
        Families().put_histogram("gpulaunch_steps_total", (1.0,), (1, 2), 3.0, rank="0")


def test_no_type_is_forgotten() -> None:
    assert {metric.kind for metric in CATALOGUE} == set(Kind)


def test_before_the_first_refresh_the_page_is_empty_and_well_formed() -> None:
    board = Board(version="1")
    assert board.metrics("") == (TEXT, b"")
    assert board.metrics("application/openmetrics-text") == (OPENMETRICS, b"# EOF\n")


def test_free_text_cannot_break_out_of_its_label(node: NodeState) -> None:
    assert node.group is not None
    nasty = dataclasses.replace(node, group=dataclasses.replace(node.group, name='a"} 1\nb\\'))
    for parse, accept in ((parse_text, ""), (parse_openmetrics, "application/openmetrics-text")):
        (info,) = [s for f in parse(page(nasty, accept)) for s in f.samples if s.name == "gpulaunch_run_info"]
        assert info.labels["name"] == 'a"} 1\nb\\'


def told_of(text: str) -> str:
    """A text as a page of UTF-8 can have it."""
    return text.encode(errors="replace").decode()


@pytest.mark.parametrize(
    ("parse", "accept"), [(parse_text, ""), (parse_openmetrics, "application/openmetrics-text")], ids=["text", "open"]
)
def test_whatever_others_write_the_page_has_the_same_samples(
    with_texts: Callable[[str], NodeState], hostile: str, parse: Callable[[str], Iterable[Metric]], accept: str
) -> None:
    plain, found = page(with_texts("plain"), accept), page(with_texts(hostile), accept)

    assert found.count("\n") == plain.count("\n")  # no text has made a line of its own
    expected, seen = ([sample for family in parse(each) for sample in family.samples] for each in (plain, found))
    assert len(seen) > 250
    text = told_of(hostile)
    assert seen == [
        sample._replace(labels={name: value.replace("plain", text) for name, value in sample.labels.items()})
        for sample in expected
    ]
    has_it = {name for sample in seen for name, value in sample.labels.items() if text in value}
    assert has_it == {"run", "name", "uuid", "parent", "model", "gpu"}


def test_the_state_alone_decides_the_families(node: NodeState) -> None:
    once, again = (str(list(families(node, Facts(version="1")).collect())) for _ in range(2))
    assert once == again


PROMETHEUS_2_42 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3_5 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("Application/OpenMetrics-Text; version=1.0.0", OPENMETRICS),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=0.3,text/plain;q=0.9", TEXT),
        ("application/openmetrics-text;q=nonsense", TEXT),
        (PROMETHEUS_2_42, OPENMETRICS),
        (PROMETHEUS_3_5, OPENMETRICS),
    ],
)
def test_the_format_is_what_the_scraper_likes(accept: str, content_type: str) -> None:
    assert negotiate(accept) == content_type


@given(st.text(alphabet=";,=q01.5/*\u00b2\u0663 ainoptx-", max_size=60) | st.text())
def test_any_accept_header_gets_one_of_two_formats(accept: str) -> None:
    assert negotiate(accept) in (TEXT, OPENMETRICS)


def test_what_a_later_probe_or_driver_tells_is_left_out_and_said_once(
    node: NodeState, capfd: pytest.CaptureFixture[str]
) -> None:
    """A phase, a reason and a counter of a gpulaunch to come: whoever scrapes has all the rest, by every way out."""
    busy = node.training[0]
    newer = dataclasses.replace(
        node,
        training=(dataclasses.replace(busy, phase_ns={**busy.phase_ns, "daydream": 1}), *node.training[1:]),
        devices=tuple(
            dataclasses.replace(each, throttle_seconds={**each.throttle_seconds, "moonlight": 1.0})
            for each in node.devices
        ),
    )
    assert newer.devices

    board = Board(version="1.2.3", clock=lambda: 0.0)
    for _ in range(2):
        board.publish(newer)
        text = board.metrics("")[1].decode()
    told = capfd.readouterr().err.splitlines()

    without_cost = re.compile("^(gpulaunch_sidecar_(render|scrapes).*|# .*)\n", re.MULTILINE)
    assert without_cost.sub("", text) == without_cost.sub("", page(node))
    assert [line.partition(": ")[2] for line in told] == [
        "gpulaunch_phase_seconds_total: phase='daydream' is not in the catalogue",
        "gpulaunch_gpu_throttle_seconds_total: reason='moonlight' is not in the catalogue",
    ]
    pushed = {sample.name for each in families(newer, Facts(version="1")).collect() for sample in each.samples}
    assert "gpulaunch_phase_seconds_total" in pushed
