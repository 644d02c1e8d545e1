"""`gpulaunch report`: the whole report as a page and as Markdown; and the page that is written when a run has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from parsed import parse
from runs_on_disk import whole

from gpulaunch.launcher.cli import report, report_page
from gpulaunch.launcher.job.options import UsageError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    whole(tmp_path / "mine", 40)
    return tmp_path


def test_the_page_goes_beside_the_run_for_its_owner_only(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.run(["mine", "--html", "--static"]) == 0

    assert capsys.readouterr().out == "report in ./mine/report.html\n"
    page = here / "mine" / "report.html"
    assert page.stat().st_mode & 0o777 == 0o600
    assert parse(page.read_text()).title == "demo: finished - gpulaunch report"
    assert sorted(each.name for each in (here / "mine").glob("report.html*")) == ["report.html"]


def test_the_page_goes_where_it_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.run(["mine", "--static", "--html", "mine.html"]) == 0
    assert report.run(["--html", "mine", "--static"]) == 0, "a run behind --html is the run"
    assert report.run(["mine", "--static", "--html", "-"]) == 0

    out = capsys.readouterr().out
    assert parse((here / "mine.html").read_text()).title == parse((here / "mine" / "report.html").read_text()).title
    page = out[out.index("<!DOCTYPE") :]
    assert parse(page).counts["h1"] == 1
    assert '<meta name="generator" content="gpulaunch">' in page[:512], "by which `runs prune` knows it"


def test_markdown_is_for_stdout(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.run(["mine", "--md"]) == 0

    assert capsys.readouterr().out.startswith("# demo: finished\n\nFinished after 50 s; 390 steps on 2 ranks;")


def test_secrets_are_in_none_of_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line may have them, and a report is passed on."""
    job = json.loads((here / "mine" / "job.json").read_text())
    job["command"] = ["gpulaunch", "train.py", "--hf-token", "very-secret-word", "hf_AbCdEfGhIjKlMn", "--lr", "3"]
    (here / "mine" / "job.json").write_text(json.dumps(job))

    report.run(["mine", "--md"])
    report.run(["mine", "--html", "-", "--static"])

    out = capsys.readouterr().out
    assert "very-secret-word" not in out
    assert "hf_AbCd" not in out
    assert out.count("--lr 3") == 2


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["mine", "--html", "page.txt"], "--html page.txt: the file name must end in .html"),
        (["mine", "--html", "no/such/place.html"], "cannot write no/such/place.html: No such file or directory"),
        (["mine", "--json", "--md"], "not allowed with argument"),
        (["mine", "--static"], "--static requires --html"),
        (["--html", "nosuch"], "there is no run directory nosuch"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(here: Path, argv: list[str], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        report.run(argv)

    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.alone  # it has 8 s, and takes the cores last
def test_a_run_that_has_ended_gets_its_page_from_a_process_of_its_own(here: Path) -> None:
    pid = report_page.begin("mine")
    assert pid is not None
    assert report_page.wait(pid)
    assert parse((here / "mine" / "report.html").read_text()).counts["h1"] == 1


def test_a_run_that_cannot_be_reported_leaves_nothing(here: Path) -> None:
    (here / "mine" / "report.html").mkdir()

    done = subprocess.run(
        [sys.executable, "-P", "-c", report_page.ENTRY, str(here / "mine"), str(os.getpid())],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert sorted(each.name for each in (here / "mine").glob("report.html*")) == ["report.html"]


def test_what_takes_too_long_ends_itself_and_leaves_nothing(here: Path) -> None:
    """The alarm comes while a page of another size than any is being written."""
    program = f"""
import os, sys
from gpulaunch.launcher.cli import report_document, report_page
from gpulaunch.launcher.loop import files
report_page.WRITE_TIMEOUT_S = 1
def endless(run_dir, **_):
    while True:
        pass
report_document.as_page = endless
sys.exit(report_page.run([{str(here / "mine")!r}, "{os.getpid()}"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert list((here / "mine").glob("report.html*")) == []


def lives(cmdline: Path) -> bool:
    """A zombie has no command line."""
    try:
        return bool(cmdline.read_bytes())
    except OSError:
        return False


def test_the_end_of_a_job_is_not_held_up_for_long(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs is ended by who waits for it, and so is one that the launcher, killed, has left alone."""
    monkeypatch.setattr(report_page, "WAIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(report_page, "ENTRY", "import time; time.sleep(60)")
    pid = report_page.begin("mine")
    assert pid is not None
    assert not report_page.wait(pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

    program = """
import os
from gpulaunch.launcher.cli import report_page
report_page.ENTRY = (
    "import sys, time; from gpulaunch.launcher.cli import report_document, report_page;"
    "report_document.as_page = lambda *_, **__: time.sleep(60); report_page.run(sys.argv[1:])"
)
print(report_page.begin("mine"), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    orphan = Path("/proc", done.stdout.strip(), "cmdline")
    for _ in range(3000):
        if not lives(orphan):
            break
        time.sleep(0.02)
    assert not lives(orphan)


def test_it_steps_back_behind_the_ranks(here: Path) -> None:
    program = f"""
import os, sys
from gpulaunch.launcher.cli import report_page
report_page.WRITE_TIMEOUT_S = 50  # behind other tests, at this priority
code = report_page.run([{str(here / "mine")!r}, "{os.getpid()}"])
print(code, os.getpriority(os.PRIO_PROCESS, 0))
"""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert done.stdout == f"0 {max(10, nice)}\n", done.stderr
