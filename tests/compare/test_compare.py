"""What changed between two runs, and what of it is chance; with runs that were."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from kept_run import GC, SYNC, state
from recordings import Recorded, recorded
from runs_on_disk import begin, end, keep, unseen, whole

from gpulaunch.exporters.report.compare import Change, Comparison, compare, settings_of
from gpulaunch.exporters.report.compared import as_json, as_text, verdict
from gpulaunch.exporters.report.crowding import Crowding, crowding_of
from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import FindingView, RunView
from gpulaunch.launcher.cli import compare as verb
from gpulaunch.launcher.job.options import UsageError


def compared(a: Recorded, b: Recorded) -> Comparison:
    return compare(a.view, b.view, jobs=(a.job, b.job))


def alone(run: RunView) -> RunView:
    """A run of whose node nothing is known: nobody looks for others."""
    return replace(run, nodes=())


def of(found: Comparison, name: str) -> Change:
    return next(change for change in found.changes if change.name == name)


def cut(run: RunView, part: slice) -> RunView:
    """A stretch of a run, as a run of its own."""

    def cut_curves(value: Any) -> Any:
        if isinstance(value, tuple) and len(value) == len(run.times_s) and not is_dataclass(value[0]):
            return value[part]
        if isinstance(value, dict):
            return {name: cut_curves(each) for name, each in value.items()}
        return value

    def cut_all(whole: Any) -> Any:
        return replace(whole, **{each.name: cut_curves(getattr(whole, each.name)) for each in fields(whole)})

    return replace(cut_all(run), ranks=tuple(map(cut_all, run.ranks)))


# -- positive and negative control, recorded


def test_data_that_really_came_later_is_told() -> None:
    """20 ms late, then 40 ms: the wait for data became 20 ms longer, and the report says so."""
    found = compared(recorded("calm"), recorded("calm-late"))

    wait = of(found, "data wait in a step")
    assert (wait.told, wait.better) == ("changed", False)
    assert wait.judgement is not None
    assert wait.judgement.shift == pytest.approx(0.020, abs=0.004)
    assert of(found, "step time").told == "changed"
    assert verdict(found).startswith("Steps are 77.2 % longer in B: 30.6 ms in A, 54.2 ms in B")
    assert "Most of it: data wait in a step, +20.3 ms" in verdict(found)
    assert of(found, "forward in a step").told in ("noise", "short")
    assert found.settings == (("program.args", "--seconds 45 --late-ms 20", "--seconds 40 --late-ms 40"),)


def test_the_way_back_is_as_much_better() -> None:
    found = compared(recorded("calm-late"), recorded("calm"))

    assert (of(found, "data wait in a step").told, of(found, "data wait in a step").better) == ("changed", True)


@pytest.mark.parametrize(("a", "b"), [("calm", "calm-again"), ("crowded", "crowded-again"), ("full", "full-again")])
def test_the_same_program_again_is_not_told_apart(a: str, b: str) -> None:
    """Nobody else had the cores; or others had, in one run more: medians differ by up to a third, and that says
    nothing."""
    found = compared(recorded(a), recorded(b))

    assert [change.name for change in found.changes if change.told == "changed"] == []


@pytest.mark.parametrize(("a", "b"), [("crowded", "crowded-again"), ("full", "full-again")])
def test_what_chance_does_is_not_told_even_where_nobody_asks_for_others(a: str, b: str) -> None:
    """The same pairs, as if the cores had been their own: it is the blocks, and no gate, that must hold here."""
    found = compare(alone(recorded(a).view), alone(recorded(b).view))

    assert found.step is not None
    assert found.step.a is not None
    assert found.step.told in ("noise", "short")
    assert [change.name for change in found.changes if change.told in ("changed", "crowded")] == []


def test_a_share_that_is_not_known_is_not_none_of_it() -> None:
    """Every other second the phases were not seen. Taken for nothing, the wait for data would be half as long."""
    run = recorded("calm").view
    seen = run.phase_ratios["data_wait"]
    blinking = tuple(share if second % 2 else None for second, share in enumerate(seen))
    other = replace(run, phase_ratios={**run.phase_ratios, "data_wait": blinking})

    wait = of(compare(run, other), "data wait in a step")

    assert wait.a is not None
    assert wait.b == pytest.approx(wait.a, rel=0.05)
    assert wait.told != "changed"


def test_it_is_those_others_that_keep_it_from_being_told() -> None:
    """Without a look at the cores, the same pair would pass for a difference: the control of the control."""
    a, b = recorded("calm"), recorded("full")

    blind = compare(alone(a.view), alone(b.view))
    seeing = compared(a, b)

    assert of(blind, "forward in a step").told == of(blind, "step time").told == "changed"
    assert of(seeing, "forward in a step").told == "crowded"
    assert of(seeing, "step time").told == "crowded"
    assert "others had the cores" in verdict(seeing)
    assert any("others had the cores in B" in note for note in seeing.notes)


@pytest.mark.parametrize("name", ["calm", "calm-late"])
def test_a_run_is_not_told_from_itself(name: str) -> None:
    """Every second interval against the others, and the whole against the whole."""
    run = recorded(name).view

    for a, b in ((run, run), (cut(run, slice(0, None, 2)), cut(run, slice(1, None, 2)))):
        size = min(len(a.times_s), len(b.times_s))
        found = compare(cut(a, slice(0, size)), cut(b, slice(0, size)))
        assert [change.name for change in found.changes if change.told == "changed"] == []


# -- everything else


def finding(rule: str, line: int | None, **more: Any) -> FindingView:
    told: dict[str, Any] = {
        "file": "train.py",
        "subject": "",
        "ranks": (0,),
        "seconds_per_step": 0.01,
        "seconds_per_hour": 100.0,
        "lost_seconds": None,
        "confidence": 0.9,
        "evidence": {},
        "advice": "",
        "active": True,
        "first_seen_s": 0.0,
        "last_seen_s": 1.0,
    }
    return FindingView(rule=rule, line=line, **{**told, **more})


def test_findings_come_go_and_stay_though_their_lines_move(tmp_path: Path) -> None:
    run = load_run(whole(tmp_path / "run"))
    a = replace(
        run, findings=(finding("sync-every-step", 88), finding("gc-pauses", None), finding("unpinned-copies", 7))
    )
    b = replace(
        run,
        findings=(
            finding("sync-every-step", 91),  # the line moved
            finding("unpinned-copies", 7, file="elsewhere/train.py", seconds_per_step=0.02),
            finding("straggler", None),
            finding("straggler", None, node=1),  # the same, on another node
            finding("throttled", None, earlier=True),  # of a run before it, in the same directory
        ),
    )

    found = compare(a, b)

    assert [each.rule for each in found.came] == ["straggler"]
    assert [each.rule for each in found.went] == ["gc-pauses"]
    assert [(one.line, other.line) for one, other in found.stayed] == [(7, 7), (88, 91)]
    assert "findings that came:\n  straggler" in as_text(found)
    assert "unpinned-copies elsewhere/train.py:7: 10 ms of every step -> 20 ms of every step" in as_text(found)


def test_settings_that_differ_are_told_once_and_what_always_differs_never() -> None:
    job = {
        "version": 1,
        "gpulaunch_pid": 1,
        "run_id": "a",
        "job_dir": "a",
        "command": ["gpulaunch", "a"],
        "max_restarts": 0,
        "env": {"LR": "1"},
        "program": {"target": "train.py", "args": ["--lr", "1"]},
        "options": {"max-restarts": 0, "job-dir": "a", "OMP_NUM_THREADS": 1},
        "origins": {"job-dir": "command line"},
        "versions": {"torch": "2.12"},
    }
    other = {
        **job,
        "gpulaunch_pid": 2,
        "run_id": "b",
        "job_dir": "b",
        "max_restarts": 3,
        "env": {},
        "options": {"max-restarts": 3, "job-dir": "b", "OMP_NUM_THREADS": 2},
        "versions": {"torch": "2.13"},
    }
    view = recorded("calm").view

    found = compare(view, view, jobs=(job, other))

    assert found.settings == (("env.LR", "1", None), ("max_restarts", 0, 3), ("options.OMP_NUM_THREADS", 1, 2))
    assert found.versions == (("torch", "2.12", "2.13"),)
    assert "program.args" in settings_of(job)
    assert "torch: 2.12 -> 2.13" in as_text(found)
    assert "versions: the same" in as_text(compare(view, view, jobs=(job, job)))
    assert "versions: not on record" in as_text(compare(view, view))


def test_runs_without_curves_say_that_nothing_can_be_said(tmp_path: Path) -> None:
    """--no-profile, or an older gpulaunch: what there is is shown, and no verdict is made up."""
    for name in ("a", "b"):
        begin(tmp_path / name)
        end(tmp_path / name, 100)

    found = compare(load_run(tmp_path / "a"), load_run(tmp_path / "b"))

    assert "cannot be compared" in verdict(found)
    assert {change.told for change in found.changes} == {"single"}
    assert "A has no curve of its steps" in as_text(found)
    json.dumps(as_json(found), allow_nan=False)


def test_runs_of_seconds_have_no_curve_but_their_means(tmp_path: Path) -> None:
    """Both say how long their steps were: so does who compares them, and judges nothing."""
    no_curves: Any = {"times_s": (), "step_mean_seconds": (), "steps_per_second": (), "samples_per_second": ()}
    no_curves["phase_ratios"] = {}
    fast, slow = (
        replace(load_run(whole(tmp_path / name)), **no_curves, step_seconds_now=step_s)
        for name, step_s in (("a", 0.010), ("b", 0.072))
    )

    found = compare(fast, slow)

    assert verdict(found) == (
        "The steps of the two runs cannot be compared: there is no curve of them in both. "
        "On the average one took 10 ms in A, 72 ms in B."
    )
    assert next((change.name, change.told) for change in found.changes) == ("step time", "single")


def test_of_steps_that_nobody_saw_no_change_is_told(tmp_path: Path) -> None:
    """It is a run with --no-profile, and no loss of all that the other one has."""
    said = as_text(compare(load_run(whole(tmp_path / "a")), load_run(unseen(tmp_path / "b"))))

    assert "The steps of the two runs cannot be compared: none was seen in B (--no-profile?)." in said
    assert "-100.0 %" not in said
    rows = {line.split("  ")[0]: line.split()[-6:] for line in said.splitlines() if line.endswith("one figure a run")}
    assert [rows[name][:2] for name in ("steps", "goodput", "startup")] == [["-", "-"]] * 3, said


def test_a_slow_run_from_disk_to_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way, of two run directories: at a third of the pace, with a finding that the first did not have."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    begin(fast)
    keep(fast, [state(second, findings=(GC,)) for second in range(1, 90)])
    end(fast, 90)
    begin(slow, run_id="bbbb")
    keep(slow, [state(second, run_id="bbbb", steps_per_s=4.0, findings=(SYNC,)) for second in range(1, 90)])
    end(slow, 90)

    assert verb.run([str(fast), str(slow)]) == 0
    said = capsys.readouterr().out
    assert "Steps are 150.0 % longer in B: 100 ms in A, 250 ms in B" in said
    assert "sync-every-step train.py:88" in said.partition("findings that came")[2]

    assert verb.run([str(fast), str(slow), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == 1
    assert [each["rule"] for each in told["findings"]["went"]] == ["gc-pauses"]
    step = next(change for change in told["changes"] if change["name"] == "step time")
    assert (step["told"], step["better"], step["change_ratio"]) == ("changed", False, pytest.approx(1.5))


HOSTILE = ("\x1b]0;owned\x07", "\x1b[2J", "a\nB: fine", "\u202eevil", "\u2028", "\ud800", "<script>alert(1)</script>")


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_text_moves_no_cursor(text: str) -> None:
    run = recorded("calm").view
    hostile = replace(run, run_dir=text, notes=(text,), findings=(finding(text, 1, file=text, subject=text),))

    said = as_text(compare(run, hostile, jobs=({"env": {text: text}}, {"env": {}})))

    assert all(line.isprintable() for line in said.split("\n"))
    assert not any(line.startswith("B: fine") for line in said.split("\n"))


def test_secrets_in_settings_are_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, secret in (("a", "hf_AAAAAAAAAAAA"), ("b", "hf_BBBBBBBBBBBB")):
        run_dir = whole(tmp_path / name, 20)
        job = json.loads((run_dir / "job.json").read_text())
        job["program"] = {"args": ["--hf-token", "word-" + name * 8, "--key-file", "k"], "target": secret}
        (run_dir / "job.json").write_text(json.dumps(job))

    assert verb.run([str(tmp_path / "a"), str(tmp_path / "b")]) == 0

    said = capsys.readouterr().out
    assert "program.args" in said
    assert "hf_AAAA" not in said
    assert "word-aaaa" not in said


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "two runs are needed, not 0"),
        (["a"], "two runs are needed, not 1"),
        (["a", "b", "c"], "two runs are needed, not 3"),
        (["nosuch", "b"], "there is no run directory nosuch"),
        (["--jsn", "a", "b"], "did you mean --json?"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError) as caught:
        verb.run(argv)

    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run(["--help"]) == 0
    assert "RUN_A RUN_B" in capsys.readouterr().out


@pytest.mark.parametrize(("cores", "crowded"), [(16, True), (2, False)])
def test_others_on_the_cores_are_seen_in_what_the_run_has_kept(tmp_path: Path, cores: int, crowded: bool) -> None:
    """Somebody waits for a core half of the time. The two ranks use 1.9: of 16, others have the rest; of 2, nobody."""
    run_dir = tmp_path / "run"
    begin(run_dir)
    states = [state(second) for second in range(1, 90)]
    keep(
        run_dir,
        [
            replace(each, host=replace(each.host, cores=cores, pressure_s={("cpu", "some"): 0.5 * second}))
            for second, each in enumerate(states)
            if each.host is not None
        ],
    )
    end(run_dir, 90)

    found = crowding_of(load_run(run_dir))

    assert found is not None
    assert (found.pressure_ratio, found.cores_used) == (pytest.approx(0.5, abs=0.01), pytest.approx(1.9, abs=0.02))
    assert (found.cores_allowed, found.crowded) == (cores, crowded)


def test_cores_that_the_job_itself_fills_are_not_others() -> None:
    """Ranks that wait for each other's cores are what the job is, and may have changed."""
    assert Crowding(pressure_ratio=0.9, cores_used=0.2, cores_allowed=2).crowded
    assert not Crowding(pressure_ratio=0.9, cores_used=1.9, cores_allowed=2).crowded
    assert not Crowding(pressure_ratio=0.1, cores_used=0.2, cores_allowed=2).crowded
