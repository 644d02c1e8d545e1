"""The dashboards as they are shipped: written by the generator, whole, and only of what the catalogue has."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from exprs import (
    GIVEN_BY_GRAFANA,
    GRAFANA,
    METRICS,
    TARGET,
    dashboards,
    faults,
    metrics_of,
    panels,
    queries,
    variables,
)

GENERATE = GRAFANA / "generate.py"
DASHBOARDS = dashboards()
each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)


def generate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(GENERATE), *args], capture_output=True, text=True, timeout=60)


def test_what_is_committed_is_what_the_generator_writes() -> None:
    checked = generate("--check")

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_dashboard_that_was_changed_by_hand_is_found_and_written_anew(tmp_path: Path) -> None:
    assert generate("--out", str(tmp_path)).returncode == 0
    file = tmp_path / "gpulaunch-overview.json"
    written = file.read_text()
    file.write_text(written.replace("Is it healthy?", "Is it well?"))
    (tmp_path / "gpulaunch-old.json").write_text("{}")

    checked = generate("--check", "--out", str(tmp_path))
    assert checked.returncode == 1
    assert checked.stdout == "out of date: gpulaunch-old.json\nout of date: gpulaunch-overview.json\n"

    assert generate("--out", str(tmp_path)).returncode == 0
    assert file.read_text() == written
    assert not (tmp_path / "gpulaunch-old.json").exists()


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ('rate("gpulaunch_stepz_total")', "gpulaunch_stepz_total is not in the catalogue"),
        ('rate("gpulaunch_attempt")', "rate() of gpulaunch_attempt, which is a gauge"),
        ('rate("gpulaunch_steps_total", phase="gc")', "gpulaunch_steps_total has no label phase"),
        ('rate("gpulaunch_phase_seconds_total", phase="sleep")', "phase is never sleep"),
        ('total(rate("gpulaunch_steps_total"), "gpu")', "no label ['gpu'] among"),
        ('quantile(0.5, "gpulaunch_steps_total")', "gpulaunch_steps_total is a counter, and no histogram"),
        ('gauge("gpulaunch_attempt") - gauge("gpulaunch_sidecar_memory_bytes")', "do not go together"),
        ('total(gauge("gpulaunch_steps_total"), "rank") / total(gauge("gpulaunch_steps_total"))', "do not match"),
        ('info("gpulaunch_attempt")', "gpulaunch_attempt is a gauge"),
    ],
)
def test_the_generator_refuses_what_the_catalogue_does_not_have(wrong: str, complaint: str) -> None:
    imports = "from source.expr import *\nfrom source.promql import *"
    program = f"import sys; sys.path.insert(0, {str(GRAFANA)!r})\n{imports}\n{wrong}"

    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert "QueryError" in refused.stderr
    assert complaint in refused.stderr


def test_the_questions_are_all_there() -> None:
    names = ("overview", "ranks", "dataloader", "transfer", "memory", "gpus", "recovery", "cost")

    assert {f"gpulaunch-{name}.json" for name in names} == DASHBOARDS.keys()
    assert [name for name, each in DASHBOARDS.items() if name != f"{each['uid']}.json"] == []
    assert len({each["title"] for each in DASHBOARDS.values()}) == len(names)


@each_dashboard
def test_every_panel_has_its_own_number_and_place(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    cells = [cells_of(panel) for panel in dashboard["panels"]]

    assert len(set(ids)) == len(ids)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])
    assert [
        (one, other) for one, other in itertools.combinations(range(len(cells)), 2) if cells[one] & cells[other]
    ] == []


def cells_of(panel: dict[str, Any]) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    columns = range(place["x"], place["x"] + place["w"])
    return set(itertools.product(columns, range(place["y"], place["y"] + place["h"])))


def test_panels_that_overlap_would_be_found() -> None:
    one = {"gridPos": {"x": 0, "y": 0, "w": 12, "h": 8}}
    beside, across = ({"gridPos": {"x": x, "y": 0, "w": 12, "h": 8}} for x in (12, 11))

    assert not cells_of(one) & cells_of(beside)
    assert cells_of(one) & cells_of(across)


@each_dashboard
def test_every_panel_says_what_it_shows_and_in_which_unit(dashboard: dict[str, Any]) -> None:
    for panel, _ in panels(dashboard):
        assert len(panel["description"]) > 5, panel["title"]
        if panel["type"] != "text":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["targets"], panel["title"]
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references)


@each_dashboard
def test_every_panel_has_a_limit_or_says_why_it_has_none(dashboard: dict[str, Any]) -> None:
    assert [wrong for panel, _ in panels(dashboard) if (wrong := wrong_limit(panel))] == []


def wrong_limit(panel: dict[str, Any]) -> str:
    """Green alone is no limit; and a limit that cannot be seen is none either."""
    _, says_none, why = panel["description"].partition(" No limit: ")
    if says_none and (len(why.split()) < 3 or not why.endswith(".")):
        return f"{panel['title']}: does not say why it has no limit"
    if panel["type"] == "text":
        return "" if says_none else f"{panel['title']}: no word of limits"
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    (lowest, *values), colors = [step["value"] for step in steps], [step["color"] for step in steps]
    if lowest is not None or values != sorted(set(values)):
        return f"{panel['title']}: {steps} do not rise"
    if bool(says_none) != (colors == ["green"]):
        return f"{panel['title']}: {'a limit, and none' if says_none else 'neither a limit nor why there is none'}"
    if not says_none and (colors.count("green") != 1 or "green" not in (colors[0], colors[-1])):
        return f"{panel['title']}: nothing, or too much, is well in {steps}"
    drawn: dict[str, Callable[[], bool]] = {
        "timeseries": lambda: panel["fieldConfig"]["defaults"]["custom"]["thresholdsStyle"]["mode"] == "dashed",
        "stat": lambda: panel["options"]["colorMode"] == "value",
        "bargauge": lambda: panel["options"]["valueMode"] == "color",
        "table": lambda: panel["fieldConfig"]["overrides"] != [],
        "heatmap": lambda: False,
    }
    return "" if says_none or drawn[panel["type"]]() else f"{panel['title']}: its limit is not drawn"


@pytest.mark.parametrize(
    ("title", "steps", "more", "complaint"),
    [
        ("Step time", [(None, "green")], "", "neither a limit nor why there is none"),
        ("Step time", [(None, "green"), (1, "red")], " No limit: it is the program's own.", "a limit, and none"),
        ("Step time", [(None, "green")], " No limit: .", "does not say why it has no limit"),
        ("Step time", [(None, "green"), (1, "red")], "", "its limit is not drawn"),
        ("Goodput", [(None, "green"), (2, "orange"), (1, "red")], "", "do not rise"),
        ("Goodput", [(None, "red"), (1, "orange")], "", "nothing, or too much, is well"),
    ],
)
def test_a_panel_without_either_is_found(title: str, steps: list[Any], more: str, complaint: str) -> None:
    (panel,) = (
        copy.deepcopy(panel) for panel, _ in panels(DASHBOARDS["gpulaunch-overview.json"]) if panel["title"] == title
    )
    panel["description"] = panel["description"].partition(" No limit: ")[0] + more
    thresholds = panel["fieldConfig"]["defaults"]["thresholds"]
    thresholds["steps"] = [{"value": value, "color": color} for value, color in steps]

    assert complaint in wrong_limit(panel)


def test_most_figures_have_a_limit() -> None:
    """What is asked for one number of is mostly asked because that number can be bad."""
    figures = [panel for each in DASHBOARDS.values() for panel, _ in panels(each) if panel["type"] == "stat"]
    limited = [panel for panel in figures if "No limit: " not in panel["description"]]

    assert len(limited) > 2 / 3 * len(figures)


def test_limits_are_those_of_the_alerts() -> None:
    """A panel is red where Prometheus would call somebody."""
    program = f"import sys; sys.path.insert(0, {str(GRAFANA)!r})\nfrom source.limits import ALERTS\n"
    said = subprocess.run(
        [sys.executable, "-c", f"{program}import json; print(json.dumps(ALERTS))"], capture_output=True, timeout=60
    )
    groups = yaml.safe_load((GRAFANA.parent / "prometheus/gpulaunch.rules.yml").read_text())["groups"]
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"] if "alert" in rule}

    limits: dict[str, float] = json.loads(said.stdout)
    assert limits
    assert [
        name for name, value in limits.items() if not re.search(rf"> {re.escape(f'{value:g}')}(?![.\d])", rules[name])
    ] == []


@each_dashboard
def test_one_gets_from_each_to_the_others_with_run_node_and_rank(dashboard: dict[str, Any]) -> None:
    (link,) = dashboard["links"]

    assert link["type"] == "dashboards"
    assert set(link["tags"]) <= set(dashboard["tags"])
    assert (link["includeVars"], link["keepTime"]) == (True, True)
    assert [each["name"] for each in dashboard["templating"]["list"]] == ["datasource", "run", "node", "rank"]


@each_dashboard
def test_every_variable_is_there(dashboard: dict[str, Any]) -> None:
    """Each of them is used, too; and one only asks for those before it."""
    known = set(GIVEN_BY_GRAFANA)
    for variable in dashboard["templating"]["list"]:
        assert variables(json.dumps(variable.get("query", "")) + json.dumps(variable.get("datasource", ""))) <= known
        known.add(variable["name"])

    asked = variables(json.dumps([dashboard["panels"], dashboard["annotations"]]))

    assert asked <= known
    assert {"run", "node", "datasource"} <= asked


@each_dashboard
def test_restarts_and_findings_are_marked(dashboard: dict[str, Any]) -> None:
    marked = {each["name"]: each for each in dashboard["annotations"]["list"] if "expr" in each}

    assert marked.keys() == {"Restarts", "Findings"}
    for each in marked.values():
        assert each["enable"]
        assert faults(each["expr"]) == []


@pytest.mark.parametrize("query", queries(), ids=str)
def test_every_query_asks_for_what_there_is(query: Any) -> None:
    assert faults(query.expr) == []
    assert 'gpulaunch_run_info{run=~"$run"}' in query.expr, "it would show another run, too"
    assert query.instant == (query.table or "[$__range]" in query.expr)


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        (
            'sum(gpulaunch_stepz_total{instance=~"$node", run=~"$run|"})',
            "gpulaunch_stepz_total is not in the catalogue",
        ),
        ('rate(gpulaunch_attempt{instance=~"$node", run=~"$run|"}[5m])', "rate() of the gauge gpulaunch_attempt"),
        (
            'changes(gpulaunch_hangs_total{instance=~"$node", run=~"$run|"}[5m])',
            "changes() of the counter gpulaunch_hangs_total",
        ),
        ('gpulaunch_hangs_total{instance=~"$node", run=~"$run|", rank="0"}', "gpulaunch_hangs_total has no label rank"),
        ('gpulaunch_steps_total{instance=~"$node", run=~"$run|"}', "gpulaunch_steps_total without rank"),
        (
            'gpulaunch_shm_bytes{instance=~"$node", run=~"$run|", state="full"}',
            "gpulaunch_shm_bytes: state is never full",
        ),
        (
            'sum by (rank) (gpulaunch_hangs_total{instance=~"$node", run=~"$run|"})',
            "by (rank), which is nowhere inside",
        ),
        ('gpulaunch_hangs_total{instance=~"$node"}', "gpulaunch_hangs_total without run"),
        (
            'gpulaunch_hangs_total{instance=~"$node", run=~"$run"}',
            "gpulaunch_hangs_total of targets with run=~$run",
        ),
        (
            'gpulaunch_profiler_overhead_seconds_total{where="sidecar", instance=~"$node", run=~"$run|", rank="0"}',
            "gpulaunch_profiler_overhead_seconds_total of a rank of a sidecar",
        ),
        ("time() - gpulaunch_attempt", "gpulaunch_attempt without a selector"),
        (
            'gpulaunch_step_duration_seconds_count{instance=~"$node", run=~"$run|", rank=~"$rank"}',
            "the histogram gpulaunch_step_duration_seconds_count without rate()",
        ),
        (
            'rate(gpulaunch_step_duration_seconds_bucket{instance=~"$node", run=~"$run|", rank=~"$rank"}[5m])',
            "gpulaunch_step_duration_seconds_bucket without histogram_quantile()",
        ),
        (
            'rate(gpulaunch_step_duration_seconds{instance=~"$node", run=~"$run|", rank=~"$rank"}[5m])',
            "gpulaunch_step_duration_seconds is not in the catalogue",
        ),
    ],
)
def test_a_wrong_expression_is_found(expr: str, complaint: str) -> None:
    assert faults(expr) == [complaint]


def test_every_metric_of_the_catalogue_is_shown_somewhere() -> None:
    shown = {metric for query in queries() for metric in metrics_of(query.expr)}

    assert METRICS.keys() - shown == set()


def test_what_needs_a_gpu_is_in_rows_that_say_so() -> None:
    """And nothing that a job on the CPU has is in them."""
    of_gpus = ("gpulaunch_gpu_", "gpulaunch_copy_", "gpulaunch_copies_", "gpulaunch_sync_", "gpulaunch_pinned_")
    of_gpus = (*of_gpus, "gpulaunch_phase_gpu_")

    for query in queries():
        needing = {name for name in metrics_of(query.expr) if name.startswith(of_gpus)}
        assert bool(needing) == query.needs_gpu, query
    for dashboard in DASHBOARDS.values():
        for panel, needs_gpu in panels(dashboard):
            if panel["type"] != "text":
                assert (panel["fieldConfig"]["defaults"].get("noValue") == "no GPU in this job") == needs_gpu


def test_provisioning_names_the_data_source_and_the_folder_of_the_dashboards() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/gpulaunch.yaml").read_text())
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/gpulaunch.yaml").read_text())
    scrapes = [GRAFANA.parent / place / "prometheus.yml" for place in ("prometheus", "docker")]

    assert (sources["apiVersion"], providers["apiVersion"]) == (1, 1)
    (source,) = sources["datasources"]
    assert (source["type"], source["access"], source["isDefault"]) == ("prometheus", "proxy", True)
    for file in scrapes:
        assert yaml.safe_load(file.read_text())["global"]["scrape_interval"] == source["jsonData"]["timeInterval"]
    (provider,) = providers["providers"]
    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)


def test_target_labels_are_no_labels_of_ours() -> None:
    """`instance` and `job` are Prometheus's: a metric of ours with such a label would be renamed when it is scraped."""
    assert {label.name for metric in METRICS.values() for label in metric.labels} & TARGET == set()
