"""The report as Markdown: whole tables, and nobody's text is markup."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from reported import a_run, with_everything, with_text

from gpulaunch.exporters.report.content import report_of
from gpulaunch.exporters.report.markdown import as_markdown
from gpulaunch.exporters.view.model import RunView, Status


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return with_everything(a_run(tmp_path_factory.mktemp("markdown") / "run"))


def tables(text: str) -> list[list[str]]:
    """The rows of each table."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def test_it_says_what_the_page_says(view: RunView) -> None:
    text = as_markdown(report_of(view))

    assert text.startswith("# demo: finished\n\nFinished after 1 min 50 s; 990 steps on 2 ranks; 1 restart;")
    assert text.index("## Bottlenecks") < text.index("## Step time")
    assert "| sync-every-step | train.py:88 | 20 ms | 12 min 00 s |" in text
    assert "Say less often." in text
    assert "| Rank | Steps | Step | data wait | forward | backward |" in text
    assert "| 0 | 990 | 100 ms | 0.0 % | 75.0 % | 25.0 % |" in text


def test_a_run_that_was_stopped_says_by_what_and_evidence_has_its_units(view: RunView) -> None:
    measured = {
        "data_wait_seconds_per_step": 0.0123456,
        "size_bytes": 8.0 * (1 << 30),
        "used_ratio": 0.98765,
        "gpus": 2,
    }
    stopped = replace(
        view,
        status=Status.STOPPED,
        stopped_by="SIGINT",
        exit_code=130,
        attempts=(*view.attempts[:-1], replace(view.attempts[-1], status=Status.STOPPED)),
        findings=(replace(view.findings[0], evidence=measured), *view.findings[1:]),
    )
    text = as_markdown(report_of(stopped))

    assert text.startswith("# demo: stopped\n\nStopped after 1 min 50 s by SIGINT; 990 steps on 2 ranks;")
    assert "The job was told to end, by SIGINT." in text
    assert "- exit code: 130\n" in text
    assert "- data wait per step: 12.3 ms\n- size: 8 GiB\n- used: 98.8 %\n- gpus: 2\n" in text
    assert "failed" not in text.lower().partition("## failures")[0]


def test_every_row_has_as_many_cells_as_its_head(view: RunView) -> None:
    found = tables(as_markdown(report_of(view)))

    assert len(found) > 10
    for table in found:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1, table


@pytest.mark.parametrize(
    "text",
    [
        *("| a | b |", "[a](http://b)", "![a](http://b)", "<b>a</b>", "`a`", "**a**", "~~a~~", "$a$", "\\"),
        *("@somebody", "http://a.b", "www.a.b", "#1", "\n# owned", "\x1b[2J", "\u202e", "\ud800", "&amp;", "--- "),
    ],
    ids=ascii,
)
def test_hostile_text_stays_text(view: RunView, text: str) -> None:
    quiet = as_markdown(report_of(with_text(view, lambda each: each + "quiet")))

    said = as_markdown(report_of(with_text(view, lambda each: each + text)))

    assert len(said.splitlines()) == len(quiet.splitlines())
    assert all(line.isprintable() for line in said.splitlines())
    assert not re.search(r"<[a-z/]|(?<!\\)[`*_\[~$]|@|://|(?i:www\.)", said)
    assert [len(table) for table in tables(said)] == [len(table) for table in tables(quiet)]
    for table in tables(said):
        assert len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in table}) == 1, table


@pytest.mark.parametrize("text", ["- a", "+ a", "1. a", "2) a", "=== ", "# a", "> a", "| a"])
def test_a_line_begins_no_list_and_no_heading(view: RunView, text: str) -> None:
    said = as_markdown(report_of(replace(view, notes=(text,))))

    line = said.partition("missing or damaged data\n\n")[2].splitlines()[0]
    assert line.startswith("- ")
    assert not re.match(r"- ([-+=#>|]|\d+[.)] )", line)


def test_no_machine_path_is_made_up(view: RunView, tmp_path: Path) -> None:
    """What is named is what the run has: its own directory."""
    text = as_markdown(report_of(replace(view, run_dir="runs/demo")))

    assert str(tmp_path.parent) not in text
