"""The report of a run as a page: what it says first, that it needs nothing, and that nobody's text does harm."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from parsed import parse
from reported import a_finding, a_run, of_many_ranks, with_everything, with_text
from runs_on_disk import begin, end, write

from gpulaunch.exporters.report.content import report_of
from gpulaunch.exporters.report.document import rewritten
from gpulaunch.exporters.report.library import plotly_js
from gpulaunch.exporters.report.page import as_html
from gpulaunch.exporters.report.time_axis import chosen
from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import EventView, RunView, Status


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return with_everything(a_run(tmp_path_factory.mktemp("report") / "run"))


def page_of(view: RunView, library: str | None = None) -> str:
    return as_html(report_of(view), library=library)


# -- what it says


def test_what_held_the_run_back_comes_first_with_its_price(view: RunView) -> None:
    page = parse(page_of(view))

    assert page.title == "demo: finished - gpulaunch report"
    assert next(text for level, text in page.headings if level == 2) == "Bottlenecks"
    findings = page.tables[0]
    assert findings[0][:4] == ["Finding", "Where", "Per step", "Per hour"]
    assert findings[1][:4] == ["sync-every-step", "train.py:88", "20 ms", "12 min 00 s"]
    assert findings[1][-1] == "until the end"
    assert findings[2][0] == "gc-pauses"
    assert "What to change: Say less often." in page.text
    assert (3, "1. sync-every-step at train.py:88") in page.headings


def test_every_part_of_a_run_has_its_section(view: RunView) -> None:
    page = parse(page_of(view))

    assert [text for level, text in page.headings if level == 2] == [
        "Bottlenecks",
        "Step time",
        "Memory",
        "Copies and synchronization",
        "Dataloader",
        "GPUs",
        "Failures and restarts",
        "Goodput",
        "Profiler overhead",
        "Run details",
        "Notes: missing or damaged data",
    ]
    cells = [cell for table in page.tables for row in table for cell in row]
    for said in (
        *("75.0 %", "25.0 %", "train.py:10 step", "host to GPU", "NVIDIA H200", "GPU_TIME: no GPU"),
        *("rank 1: out of GPU memory at train.py:12", "Make the batch smaller.", "steps that were kept", "90.0 %"),
    ):
        assert any(said in cell for cell in cells), said
    assert "The newest attempt resumed from step 40." in page.text
    assert "something is damaged" in page.text
    assert page.counts["svg"] >= 8


def test_what_is_not_known_is_a_dash_and_never_zero(tmp_path: Path) -> None:
    """A run of which there is a history and nothing else."""
    begin(tmp_path / "run")
    end(tmp_path / "run", 100, code=1)

    page = parse(page_of(load_run(tmp_path / "run")))

    assert "This run was not profiled" in page.text
    assert "Failed after 1 min 50 s, exit code 1; no step was observed" in page.text
    facts = {row[0]: row[1] for table in page.tables for row in table if len(row) == 2}
    assert facts["step of the newest known checkpoint"] == "-"
    assert "svg" not in page.counts or page.counts["svg"] <= 2


def test_where_it_is_not_known_what_was_made_again_goodput_is_the_most_that_it_can_be(view: RunView) -> None:
    page = parse(page_of(replace(view, goodput_seconds={**view.goodput_seconds, "lost_work": None})))

    assert "; goodput at most 90.0 %" in page.text
    assert "At most 90.0 % of " in page.text
    assert "--checkpoint-dir" in page.text
    (lost,) = (row for table in page.tables for row in table if row[0] == "lost work")
    assert lost[1:3] == ["-", "-"]
    assert "goodput at most" not in parse(page_of(view)).text


def test_nothing_at_all_is_still_a_page(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    page = parse(page_of(load_run(tmp_path / "empty")))

    assert "It is unknown how the run ended" in page.text


def test_what_happened_is_told_in_words(view: RunView) -> None:
    fields = {
        "exit_code": 0,
        "seconds": {"productive": 3.25, "startup": 1.0},
        "ok": False,
        "again": True,
        "pids": [7, 8],
    }
    event = EventView(at_s=view.began_s or 0.0, what="run_ended", fields={**fields, "error": "", "resumed_step": None})

    (told,) = (table for table in parse(page_of(replace(view, events=(event,)))).tables if "Details" in table[0])

    assert told[1][1] == "run ended"
    assert told[1][-1] == "exit code 0, seconds productive 3.25, startup 1, again, pids 7 8"


def test_the_same_finding_on_two_nodes_is_two_findings(view: RunView) -> None:
    page = parse(page_of(replace(view, num_nodes=2, findings=(a_finding(7), replace(a_finding(7), node=1)))))

    assert [text for _, text in page.headings if "rule-7" in text] == [
        "1. rule-7 at train.py:7",
        "2. rule-7 at train.py:7",
    ]


@pytest.mark.parametrize("status", list(Status))
def test_every_status_has_words(view: RunView, status: Status) -> None:
    assert status.value in parse(page_of(replace(view, status=status))).title


# -- what it needs


def test_it_asks_for_nothing_and_runs_nothing(view: RunView) -> None:
    """No address but those inside the page, no script, and a policy that says so (`parse` checks more)."""
    content = page_of(view)

    page = parse(content)
    assert "script" not in page.counts
    assert "script-src 'none'" in page.policy
    assert not re.search(r"""(src|href)\s*=(?!"#)|url\(|@import|http-equiv="refresh""", content)


def test_64_ranks_are_less_than_a_megabyte(view: RunView) -> None:
    many = of_many_ranks(view, 64)
    content = page_of(replace(many, findings=tuple(a_finding(number) for number in range(1, 201))))

    page = parse(content)
    assert len(content.encode()) < 1_000_000
    assert max(len(table) for table in page.tables) >= 65


def test_of_thousands_of_ranks_the_slowest_are_shown(view: RunView) -> None:
    content = page_of(of_many_ranks(view, 4096))

    page = parse(content)
    assert len(content.encode()) < 1_500_000
    assert "128 of 4096 ranks are shown" in page.text
    assert any(row[0] == "4095" for table in page.tables for row in table)
    assert any(row[0] == "0" for table in page.tables for row in table)


def test_a_step_is_as_long_in_every_table_as_the_steps_were_that_were_timed(tmp_path: Path) -> None:
    """A rank that was killed made 1000 steps, and had told the times of 500 of them."""
    begin(tmp_path / "run")
    end(tmp_path / "run", 100, code=1)
    rank = {"steps": 1000, "timed_steps": 500, "samples": 0, "step_seconds": 50.0, "phase_seconds": {"forward": 50.0}}
    write(tmp_path / "run", "summary.json", {"version": 1, "exit_code": 1, "error": "", "ranks": {"0": rank}})
    view = load_run(tmp_path / "run")

    page = parse(page_of(view))

    assert view.step_seconds_now == 0.1
    (row,) = (table[1] for table in page.tables if table[0][:3] == ["Rank", "Steps", "Step"])
    assert row[:3] == ["0", "1,000", "100 ms"]


def test_the_slowest_rank_is_shown_though_it_made_steps_that_nobody_timed(view: RunView) -> None:
    *others, slowest = of_many_ranks(view, 4096).ranks
    killed = replace(slowest, steps=2 * slowest.steps, timed_steps=slowest.steps)

    assert [rank.rank for rank in chosen([*others, killed], 2)] == [0, 4095]


def test_light_dark_and_paper_have_their_styles(view: RunView) -> None:
    content = page_of(view)

    assert "@media (prefers-color-scheme: dark)" in content
    assert "@media print" in content
    for colour in range(12):
        assert content.count(f"--s{colour}: #") == 2


def test_every_chart_says_what_it_shows(view: RunView) -> None:
    content = page_of(view)

    charts = re.findall(r'<svg class="still".*?</svg>', content, re.DOTALL)
    assert len(charts) >= 8
    for chart in charts:
        told = re.search(r"<title id=[^>]*>([^<]+)</title><desc id=[^>]*>([^<]+)</desc>", chart)
        assert told is not None
        assert min(len(told[1]), len(told[2])) > 5


def test_a_hole_in_a_curve_is_a_hole_in_the_chart(view: RunView) -> None:
    """What is not known is not drawn as 0, nor joined over."""
    hole = (*view.samples_per_second[:40], *(None,) * 20, *view.samples_per_second[60:])

    content = page_of(replace(view, samples_per_second=hole))

    (chart,) = [
        found for found in re.findall(r'<svg class="still".*?</svg>', content, re.DOTALL) if "chart-throughput" in found
    ]
    assert chart.count('class="l0"') == 2


# -- with the library


SMALL = "window.Plotly = undefined;"


def test_with_the_library_the_figures_are_data(view: RunView) -> None:
    page = parse(page_of(view, SMALL))

    (kind, data), (_, library), (_, ours) = page.scripts
    assert (kind, library) == ("application/json", SMALL)
    assert "Plotly.react" in ours
    charts = json.loads(data)
    assert {chart["kind"] for chart in charts} == {"bars", "stack", "lines", "spans"}
    assert {f"figure-{chart['id']}" for chart in charts} <= set(page.ids)
    (shares,) = [chart for chart in charts if chart["id"] == "phases-by-rank"]
    assert [sum(series["values"][rank] for series in shares["series"]) for rank in (0, 1)] == [100, 100]
    for chart in charts:
        for series in chart["series"]:
            assert len(series["values"]) == len(chart["times"] or chart["labels"])


def test_the_library_as_it_is_shipped(view: RunView) -> None:
    """Whole, allowed by its digest, and everything else as without it."""
    pytest.importorskip("plotly")
    library = plotly_js()
    assert library is not None

    page = parse(page_of(view, library))

    assert page.scripts[1][1] == library
    assert page.tables == parse(page_of(view)).tables


@pytest.mark.parametrize("source", ["a</script>b", "a</SCRIPT >b", "<!-- a", "a\0b", 7])
def test_a_library_that_could_leave_its_element_is_not_used(monkeypatch: pytest.MonkeyPatch, source: object) -> None:
    class Offline:
        @staticmethod
        def get_plotlyjs() -> object:
            return source

    monkeypatch.setattr("gpulaunch.exporters.report.library.import_module", lambda name: Offline)

    assert plotly_js() is None


def test_without_the_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("gpulaunch.exporters.report.library.import_module", missing)

    assert plotly_js() is None


# -- text of others


HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"onmouseover='alert(1)",
    "'><svg onload=alert(1)>",
    "</title></style></table></section><h1>owned</h1>",
    "<!-- ",
    "]]>",
    "javascript:alert(1)",
    "\x1b]0;owned\x07\x1b[31mred",
    "\x9b2J",
    "train.py\nFinished",
    "a\u202eyp.b",
    "\u2066a\u2069",
    "a\u200bb\u2028c",
    "\ud800",
    "caf\udce9",
    "\0",
    "&lt;b&gt;",
    "x" * 100_000,
)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
def test_hostile_text_stays_text(view: RunView, text: str) -> None:
    """Names, paths, lines of code, causes, events, notes: programs make them of anything. Each of these is put behind
    every text of a run; the page has the elements that it has with a quiet word there, and the same scripts."""
    expected = parse(page_of(with_text(view, lambda said: said + "quiet"), SMALL))
    tail = text[:200]

    content = page_of(with_text(view, lambda said: said + text), SMALL)
    page = parse(content)  # raises for an element, an attribute or an address that is not ours

    assert page.counts == expected.counts
    assert [script for kind, script in page.scripts if not kind] == [SMALL, expected.scripts[2][1]]
    assert "<" not in page.scripts[0][1]
    if tail.isprintable():
        assert tail in page.text
    assert len(content) < 4_000_000


def test_what_is_read_from_right_to_left_is_shown_as_what_it_is(view: RunView) -> None:
    page = parse(page_of(replace(view, notes=("evil\u202etxt.exe",))))

    assert "evil\\u202etxt.exe" in page.text


def test_every_text_can_be_rewritten_and_no_figure_is(view: RunView) -> None:
    """Secrets are hidden by whoever has the rules for them."""
    document = report_of(replace(view, command=("gpulaunch", "train.py", "--token", "abc")))

    hidden = rewritten(document, lambda text: text.replace("abc", "<redacted>"))

    assert "abc" not in as_html(hidden, library=SMALL)
    assert hidden.charts() == document.charts()
    assert "--token <redacted>" in parse(as_html(hidden)).text
