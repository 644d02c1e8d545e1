"""The rules for Prometheus fire when they should, are silent when they should, and name nothing that does not exist."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE, Metric
from gpulaunch.exporters.prometheus.metrics.metric import Kind
from gpulaunch.profiler.xid import PROGRAM_XIDS

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/gpulaunch.rules.yml"
STORIES = sorted((ROOT / "deploy/prometheus/tests").glob("*.yml"))

ADDRESS = frozenset({"job", "instance"})
DISCOVERED = frozenset({"run", "node", "name"})
"""What discovery puts on a target; see gpulaunch.exporters.discovery."""

RULE_LIST: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULE_LIST if "alert" in rule}
RECORDED = {rule["record"]: rule for rule in RULE_LIST if "record" in rule}


def tool(promtool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=60)


# --- what promtool says of them


def test_the_rules_are_valid(promtool: str) -> None:
    checked = tool(promtool, "check", "rules", "--lint=all", "--lint-fatal", RULES)

    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_the_stories_end_as_told(promtool: str, story: Path) -> None:
    told = tool(promtool, "test", "rules", story)

    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize("planted", ["vector(1) == 0", "vector(1)"], ids=["never", "always"])
@pytest.mark.parametrize("alert", ALERTS)
def test_the_stories_would_notice(promtool: str, alert: str, planted: str, tmp_path: Path) -> None:
    """An alert that never fires, and one that always does, fail what the stories ask about it."""
    rule = {**ALERTS[alert], "expr": planted, "for": "0m"}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "planted", "rules": [rule]}]}))
    told = [
        {"interval": "1m", "input_series": [], "promql_expr_test": questions}
        for story in stories()
        if (questions := [each for each in story.get("promql_expr_test", ()) if is_about(alert, each)])
    ]
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": told}
    (tmp_path / "story.yml").write_text(yaml.safe_dump(document))

    ended = tool(promtool, "test", "rules", tmp_path / "story.yml")

    assert ended.returncode != 0, f"nobody noticed {planted}"
    assert "FAILED" in ended.stdout + ended.stderr


def test_the_stories_would_notice_words_that_have_lost_a_label(promtool: str, tmp_path: Path) -> None:
    """As where a sum leaves it out: every alert says which job it is about, and a story has the words."""
    (tmp_path / "rules.yml").write_text(RULES.read_text().replace("$labels.name ", "$labels.nobody "))
    told = [{**story, "promql_expr_test": []} for story in stories() if "alert_rule_test" in story]
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": told}
    (tmp_path / "story.yml").write_text(yaml.safe_dump(document))

    ended = tool(promtool, "test", "rules", tmp_path / "story.yml")

    assert ended.returncode != 0
    assert set(re.findall(r"alertname: (\w+)", ended.stdout + ended.stderr)) == set(ALERTS)


# --- what can be said without it


def stories() -> Iterator[dict[str, Any]]:
    for path in STORIES:
        yield from yaml.safe_load(path.read_text())["tests"]


def is_about(alert: str, question: Mapping[str, Any]) -> bool:
    """Whether a story asks here if the alert fires."""
    return re.match(rf'ALERTS\{{.*alertname="{alert}"', question["expr"]) is not None


def asked(alert: str) -> list[bool]:
    """For each time that a story asks whether the alert fires: whether it is to."""
    return [
        bool(question.get("exp_samples"))
        for story in stories()
        for question in story.get("promql_expr_test", ())
        if is_about(alert, question)
    ]


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_story_of_firing_and_one_of_silence(alert: str) -> None:
    assert set(asked(alert)) == {True, False}


@pytest.mark.parametrize("alert", ALERTS)
def test_what_each_alert_says_is_in_a_story(alert: str) -> None:
    told = [
        firing
        for story in stories()
        for asked in story.get("alert_rule_test", ())
        if asked["alertname"] == alert
        for firing in asked["exp_alerts"]
    ]

    assert told
    for firing in told:
        assert firing["exp_annotations"].keys() == ALERTS[alert]["annotations"].keys()
        assert firing["exp_annotations"]["runbook"] == ALERTS[alert]["annotations"]["runbook"]


def test_no_story_is_about_an_alert_that_does_not_exist() -> None:
    named = {name for path in STORIES for name in re.findall(r'alertname[=:] ?"?(\w+)', path.read_text())}

    assert named == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_says_what_to_do_and_where_to_read_on(alert: str) -> None:
    rule = ALERTS[alert]
    page, _, place = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M)

    assert set(rule) - {"keep_firing_for"} == {"alert", "expr", "for", "labels", "annotations"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert len(rule["annotations"]["summary"]) < 200
    assert len(rule["annotations"]["description"]) > 80
    assert not place or place in [re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in headings]


@pytest.mark.parametrize("alert", sorted(set(ALERTS) - {"GpulaunchTargetDown"}))
def test_each_alert_ends_with_its_job(alert: str) -> None:
    """It needs the job's gpulaunch_run_info of this moment, by itself or by what is recorded."""
    seen: set[str] = set()
    todo = [ALERTS[alert]["expr"]]
    while todo:
        names = set(re.findall(r"\bgpulaunch:[a-z0-9_:]+", todo.pop())) - seen
        seen |= names
        todo += [RECORDED[name]["expr"] for name in names]

    assert "gpulaunch:run_info" in seen


@pytest.mark.parametrize("alert", ALERTS)
def test_what_fires_at_once_is_told_even_if_it_ends_its_job(alert: str) -> None:
    """Alertmanager waits before it tells anybody (group_wait: 30 s), and forgets what is over by then."""
    at_once = ALERTS[alert]["for"] == "0m"

    assert ALERTS[alert].get("keep_firing_for") == ("15m" if at_once else None)


def test_what_is_recorded_is_on_the_page_about_it() -> None:
    page = (ROOT / "docs/prometheus.md").read_text()

    assert [name for name in [*RECORDED, *ALERTS] if f"`{name}`" not in page] == []


def test_the_page_has_when_and_how_bad() -> None:
    """Row by row: how long it must hold, and its severity."""
    rows = re.findall(
        r"^\| `(Gpulaunch\w+)` \|.*\| ([^|]+) \| (\w+) \|$", (ROOT / "docs/prometheus.md").read_text(), re.M
    )
    told = {
        alert: ("0m" if held == "at once" else held.replace(" min", "m"), severity) for alert, held, severity in rows
    }

    assert told == {alert: (rule["for"], rule["labels"]["severity"]) for alert, rule in ALERTS.items()}


def test_the_xids_of_programs_are_left_out() -> None:
    (left_out,) = set(re.findall(r'xid!~"([\d|]+)"', ALERTS["GpulaunchXid"]["expr"]))

    assert {int(xid) for xid in left_out.split("|")} == PROGRAM_XIDS


# --- names and labels, against the catalogue

SERIES = {
    f"{metric.name}{suffix}": metric
    for metric in CATALOGUE
    for suffix in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))
}
SELECTOR = re.compile(r"(?<![\w:])([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
EVERY_LABEL = {label.name for metric in CATALOGUE for label in metric.labels} | ADDRESS | DISCOVERED | {"le"}


def labels_of(name: str) -> dict[str, frozenset[str] | None] | None:
    """The labels that a series may have, with their values where they are closed; None: there is no such series."""
    open_: dict[str, frozenset[str] | None] = dict.fromkeys(ADDRESS | DISCOVERED)
    if name == "up":
        return open_
    if name in RECORDED:
        return open_ | dict.fromkeys(EVERY_LABEL)
    if name not in SERIES:
        return None
    metric: Metric = SERIES[name]
    own = {label.name: label.values for label in metric.labels}
    clash = {f"exported_{label}": None for label in own if label in DISCOVERED}
    return open_ | own | clash | ({"le": None} if name.endswith("_bucket") else {})


def complaints(expression: str) -> list[str]:
    """What an expression names that does not exist."""
    found: list[str] = []
    text = re.sub(r'"[^"]*"', '""', expression)
    for name in set(re.findall(r"(?<![\w:])gpulaunch[_:][\w:]+", text)):
        if labels_of(name) is None:
            found.append(f"no metric {name}")
    for name, matchers in SELECTOR.findall(expression):
        known = labels_of(name) or {}
        for label, operator, value in MATCHER.findall(matchers):
            closed = known.get(label)
            values = value.split("|") if "~" in operator else [value]
            if label not in known:
                found.append(f"{name} has no label {label}")
            elif closed is not None and not set(values) <= closed:
                found.append(f"{name}: {label} is never {value}")
    for _, inside in GROUPING.findall(text):
        labels = {label.strip() for label in inside.split(",")} - {""}
        found += [f"no label {label}" for label in labels - EVERY_LABEL]
    return found


@pytest.mark.parametrize("rule", RULE_LIST, ids=lambda rule: rule.get("alert") or rule.get("record"))
def test_a_rule_names_what_is_in_the_catalogue(rule: Mapping[str, Any]) -> None:
    assert complaints(rule["expr"]) == []


@pytest.mark.parametrize("rule", RULE_LIST, ids=lambda rule: rule.get("alert") or rule.get("record"))
def test_its_words_name_what_is_in_the_catalogue(rule: Mapping[str, Any]) -> None:
    words = " ".join(rule.get("annotations", {}).values())
    fields = set(re.findall(r"\$labels\.(\w+)", words))

    assert [name for name in re.findall(r"\bgpulaunch_\w+", words) if labels_of(name) is None] == []
    assert fields <= EVERY_LABEL


@pytest.mark.parametrize("story", list(stories()), ids=lambda story: story["name"][:60])
def test_a_story_tells_of_series_that_there_are(story: Mapping[str, Any]) -> None:
    """A silence over a misspelt metric would prove nothing."""
    told = [series["series"] for series in story["input_series"]]

    assert [complaint for series in told for complaint in complaints(series)] == []
    for series in told:
        name, matchers = SELECTOR.findall(series)[0]
        missing = {label.name for label in SERIES[name].labels} if name in SERIES else set()
        assert missing <= {label for label, _, _ in MATCHER.findall(matchers)}, series


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("rate(gpulaunch_step_total[5m])", "no metric gpulaunch_step_total"),
        ("gpulaunch_step_duration_seconds", "no metric gpulaunch_step_duration_seconds"),
        ("gpulaunch:run_inf", "no metric gpulaunch:run_inf"),
        ('gpulaunch_phase_seconds_total{phase="data"}', "gpulaunch_phase_seconds_total: phase is never data"),
        ('gpulaunch_shm_bytes{state=~"used|free"}', "gpulaunch_shm_bytes: state is never used|free"),
        ('gpulaunch_attempt{rank="0"}', "gpulaunch_attempt has no label rank"),
        ("sum by (ranks) (gpulaunch_steps_total)", "no label ranks"),
    ],
)
def test_a_planted_slip_is_found(expression: str, complaint: str) -> None:
    assert complaints(expression) == [complaint]


# --- several runs at one address

JOIN = "* on (job, instance) group_left (run, name) gpulaunch:run_info"
APART = re.compile(r"max without \((\w+, )?run, name\)")
"""What is joined has no run and no name of its own."""


def mixes_runs(expression: str) -> list[str]:
    """What an expression joins with the run at an address although it can be of two runs."""
    found: list[str] = []
    for before, joined in operands(expression):
        looks_back = any(
            all("[" in each.split("unless")[0] for each in re.split(r"\band\b", either))
            for either in re.split(r"\bor\b", joined)
        )
        if re.search(rf"{APART.pattern} $", before) is None:
            found.append(f"two series for one run of an address: {joined}")
        if looks_back:
            found.append(f"what the run before has left in the window: {joined}")
    return found


def operands(expression: str) -> Iterator[tuple[str, str]]:
    """For each join: what stands in the parentheses before it, and what stands before those."""
    flat = " ".join(expression.split()).replace("( ", "(").replace(" )", ")")
    for join in re.finditer(re.escape(JOIN), flat):
        end = at = join.start() - 1
        depth = 0
        while at and (at == end or depth):
            at -= 1
            depth += {")": 1, "(": -1}.get(flat[at], 0)
        yield flat[:at], flat[at + 1 : end - 1]


@pytest.mark.parametrize("rule", RULE_LIST, ids=lambda rule: rule.get("alert") or rule.get("record"))
def test_a_rule_keeps_runs_apart(rule: Mapping[str, Any]) -> None:
    assert mixes_runs(rule["expr"]) == []


@pytest.mark.parametrize(
    ("expression", "complaints_of_it"),
    [
        (f"gpulaunch_attempt {JOIN}", ["two series"]),
        (f"rate(gpulaunch_steps_total[5m]) {JOIN}", ["two series", "the run before"]),
        (f"max without (run, name) (rate(gpulaunch_steps_total[5m])) {JOIN}", ["the run before"]),
        (f"max without (rank) (gpulaunch_steps_total) {JOIN}", ["two series"]),
        (f"max without (run, name) (rate(gpulaunch_steps_total[5m]) and gpulaunch_steps_total) {JOIN}", []),
        (f"max without (run, name) (gpulaunch_attempt or rate(gpulaunch_steps_total[5m])) {JOIN}", ["the run before"]),
    ],
)
def test_a_rule_that_mixes_runs_is_found(expression: str, complaints_of_it: list[str]) -> None:
    found = mixes_runs(expression)

    assert len(found) == len(complaints_of_it)
    assert all(words in complaint for words, complaint in zip(complaints_of_it, found, strict=True))


@pytest.mark.parametrize("apart", [True, False], ids=["as they are", "without what keeps runs apart"])
def test_no_rule_fails_where_two_runs_are_at_one_address(promtool: str, apart: bool, tmp_path: Path) -> None:
    """As where the file of a killed agent is left, and its port is another's: a rule that fails does so for every run.

    Without what keeps them apart every one of them does; so the story is about each.
    """
    rules = yaml.safe_load(RULES.read_text())
    joining = {rule.get("alert") or rule["record"] for rule in RULE_LIST if JOIN in " ".join(rule["expr"].split())}
    if not apart:
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            rule["expr"] = APART.sub(lambda found: f"max without ({(found[1] or '').rstrip(', ')})", rule["expr"])
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    until_then = [{"expr": "vector(0)", "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": 0}]}]
    told = [
        {"interval": "1m", "input_series": series_of_two_runs(moving), "promql_expr_test": until_then}
        for moving in (True, False)
    ]
    # promtool ends with the first time at which any rule fails: by then all have what they ask for, up to a quarter of
    # an hour of it.
    document = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "20m",
        "group_eval_order": [group["name"] for group in rules["groups"]],
        "tests": told,
    }
    (tmp_path / "story.yml").write_text(yaml.safe_dump(document))

    ended = tool(promtool, "test", "rules", tmp_path / "story.yml")

    failed = set(re.findall(r"rule: ([\w:]+), time: .* multiple matches for labels", ended.stdout + ended.stderr))
    assert failed == (set() if apart else joining)
    assert (ended.returncode == 0) == apart, ended.stdout + ended.stderr


def series_of_two_runs(moving: bool) -> list[dict[str, str]]:
    """Every series that a rule asks for, of two runs at one address; they train, or stand still."""
    found: dict[str, str] = {}
    for rule in RULE_LIST:
        for name, matchers in re.findall(r"\b(gpulaunch_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            labels = {label.name: min(label.values or ("0",)) for label in SERIES[name].labels}
            labels |= {"le": "+Inf"} if name.endswith("_bucket") else {}
            for label, operator, value in MATCHER.findall(matchers):
                labels[label] = "79" if operator == "!~" else value.split("|")[0]
            rises = SERIES[name].kind in (Kind.COUNTER, Kind.HISTOGRAM) and moving
            rises |= name in ("gpulaunch_sidecar_refreshes_total", "gpulaunch_attempt")
            for run in ("a", "b"):
                labels |= {"job": "gpulaunch", "instance": "n1:9464", "run": run, "name": "train"}
                matched = ",".join(f'{label}="{value}"' for label, value in labels.items())
                found[f"{name}{{{matched}}}"] = "_ 1+1x20" if rises else "_ 1x20"
    return [{"series": series, "values": values} for series, values in found.items()]
