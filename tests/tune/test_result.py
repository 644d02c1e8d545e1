"""What is shown of trials."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpulaunch.exporters.files.tuned import TUNE_FILE, tried_in
from gpulaunch.exporters.view.load import load_run
from gpulaunch.launcher.cli import report, report_document
from gpulaunch.launcher.tune import result
from gpulaunch.launcher.tune.candidates import Seen
from gpulaunch.launcher.tune.change import Change
from gpulaunch.launcher.tune.search import Measured, Search
from gpulaunch.launcher.tune.session import Tuned
from gpulaunch.launcher.tune.trial import Steps

PROGRAM = """\
from torch.utils.data import DataLoader

loader = DataLoader(data, batch_size=8)
"""
SITE = "train.py:3 <module>"
WORKERS = Change(
    loaders={SITE: {"num_workers": 4, "persistent_workers": True}},
    predicted_s=0.05,
    because="dataloader-too-few-workers",
)
MORE = Change(loaders={SITE: {"num_workers": 16, "persistent_workers": True}})
VIEW = Change(ddp={"gradient_as_bucket_view": True})
THREADS = Change(torch={"num_threads": 2})


@pytest.fixture
def tuned() -> Tuned:
    search = Search([WORKERS, MORE, VIEW, THREADS])
    for change, measured in (
        *((Change(), Measured(step_s=each)) for each in (0.100, 0.104)),
        *((WORKERS, Measured(step_s=each)) for each in (0.050, 0.052)),
        (MORE, Measured(step_s=None, died="rank 0 was killed by SIGKILL: out of memory")),
        *((VIEW, Measured(step_s=each)) for each in (0.101, 0.102)),
    ):
        search.add(change, measured)
    seen = Seen(step_s=0.1, facts={}, findings=[], ranks=2)
    return Tuned(
        base_s=0.1,
        steps=Steps(first=20, count=60),
        seen=seen,
        search=search,
        base_dir="",
        spent_s=48.0,
        trials=7,
        left=[THREADS],
    )


def test_the_table_shows_what_was_predicted_and_what_was_measured(tuned: Tuned) -> None:
    assert "\n".join(result.as_table(tuned)) + "\n" == (Path(__file__).with_name("table.txt")).read_text()


def test_a_line_is_shown_for_each_trial(tuned: Tuned) -> None:
    assert result.as_line(tuned, Change(), Measured(step_s=0.1)) == "  as it is: 100.0 ms a step"
    assert (
        result.as_line(tuned, WORKERS, Measured(step_s=0.051))
        == "  num_workers=4, persistent_workers=True (train.py:3): 51.0 ms a step, +100 %"
    )
    assert result.as_line(tuned, THREADS, Measured(step_s=None, died="slower")).endswith(": slower")


def test_after_the_first_trial_its_findings_are_shown(tuned: Tuned) -> None:
    found = {"rule": "dataloader-too-few-workers", "file": "train.py", "line": 3, "seconds_per_step": 0.0421}
    first = replace(tuned, trials=1, seen=replace(tuned.seen, findings=[found]))

    assert result.as_line(first, Change(), Measured(step_s=0.1)) == (
        "  as it is, for its findings: 100.0 ms a step\n"
        "    found: dataloader-too-few-workers train.py:3: 42.1 ms of every step"
    )


def test_the_patch_is_of_the_lines_that_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    patch, hints = result.patch_of(WORKERS)

    assert "+loader = DataLoader(data, batch_size=8, num_workers=4, persistent_workers=True)\n" in patch
    assert hints == []


def test_without_workers_nothing_is_asked_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "\n\nloader = DataLoader(data, num_workers=4, persistent_workers=True, prefetch_factor=4)\n"
    )
    none = Change(loaders={"train.py:3 <module>": {"num_workers": 0}})

    assert result.patch_of(none)[0].endswith(
        "+loader = DataLoader(data, num_workers=0, persistent_workers=False, prefetch_factor=None)\n"
    )
    (tmp_path / "train.py").unlink()
    assert result.patch_of(none) == ("", ["train.py:3: for the DataLoader that it makes: num_workers=0"])


def test_what_cannot_be_patched_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    change = Change(loaders=WORKERS.loaders, ddp=VIEW.ddp, torch=THREADS.torch, gc_freeze=True)

    assert result.patch_of(change) == (
        "",
        [
            "train.py:3: for the DataLoader that it makes: num_workers=4, persistent_workers=True",
            "DistributedDataParallel(..., gradient_as_bucket_view=True)",
            "torch.set_num_threads(2), or OMP_NUM_THREADS=2 in the environment",
            "gc.collect(); gc.freeze() before the training loop",
        ],
    )


def test_all_that_shows_a_run_tells_what_was_tried(tuned: Tuned, tmp_path: Path) -> None:
    document = result.as_json(tuned, command=["train.py"], patch="")
    (tmp_path / TUNE_FILE).write_text(json.dumps(document))
    (tmp_path / "job.json").write_text("{}")
    line = "tried: num_workers=4, persistent_workers=True (train.py:3): +100 % (92 .. 108) steps a second"

    assert tried_in(tmp_path, []) == (line,)
    assert report.as_text(report.collect(tmp_path)).endswith(f"\n\n{line}")
    assert load_run(tmp_path).tried == (line,)
    assert line in report_document.as_markdown(str(tmp_path)).replace("\\", "")
    assert document["best"] == WORKERS.as_json()
    assert document["not_tried"] == [THREADS.as_json()]
    assert [each["verdict"] for each in document["tried"]] == ["gain", "failed", "none"]


@pytest.mark.parametrize("content", ["", "[", "{}", '{"tried": 3}', '{"tried": [{"verdict": "gain"}]}', "[" * 100_000])
def test_a_damaged_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / TUNE_FILE).write_text(content)
    notes: list[str] = []

    assert tried_in(tmp_path, notes) == ()
    assert notes[0].startswith("tune.json cannot be read: ")
