"""Every attempt goes on from the newest complete checkpoint, and the program need not be changed for it."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest

from gpulaunch.launcher.checkpoint.manifest import read

pytestmark = pytest.mark.torch

# Saves a step at a time, as any script does; the first attempt dies in the middle.
PLAIN = """
    import argparse, os, sys, torch
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    args = parser.parse_args()
    print("RESUME", args.resume and os.path.basename(args.resume), os.environ.get("GPULAUNCH_RESUME_FROM"), flush=True)
    start = torch.load(args.resume)["step"] if args.resume else 0
    for step in range(start + 1, 6):
        if os.environ["RANK"] == "0":
            torch.save({"step": step}, os.path.join(os.environ["GPULAUNCH_CHECKPOINT_DIR"], f"ckpt_{step}.pt"))
        if step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            {dying}
    print("STEPS", start, step, flush=True)
"""
KILL = "os.kill(os.getpid(), 9)"


def script(path: Path, text: str = PLAIN, *, dying: str = KILL) -> Path:
    file = path / "train.py"
    file.write_text(textwrap.dedent(text).replace("{dying}", dying))
    return file


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    directory = tmp_path / "ckpt"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_unmodified_script_is_told_by_its_own_argument(
    gpulaunch, tmp_path: Path, checkpoints: Path, method: str
) -> None:
    ended = gpulaunch(
        *("--start-method", method, "--max-restarts", "1", "--checkpoint-dir", checkpoints),
        *("--resume-arg", "--resume {path}", script(tmp_path)),
    )

    assert ended.code == 0, ended
    assert "RESUME None None" in ended.stdout
    assert f"RESUME ckpt_3.pt {checkpoints}/ckpt_3.pt" in ended.stdout
    assert "STEPS 3 5" in ended.stdout
    assert "resuming from ./ckpt/ckpt_3.pt (step 3)" in ended.stderr


def test_a_truncated_newest_checkpoint_is_passed_over_and_named(gpulaunch, tmp_path: Path, checkpoints: Path) -> None:
    cut = 'os.truncate(os.path.join(os.environ["GPULAUNCH_CHECKPOINT_DIR"], "ckpt_3.pt"), 700); ' + KILL

    ended = gpulaunch(
        *("--max-restarts", "1", "--checkpoint-dir", checkpoints, "--resume-arg", "--resume {path}"),
        script(tmp_path, dying=cut),
    )

    assert ended.code == 0, ended
    assert "checkpoint ./ckpt/ckpt_3.pt is skipped: " in ended.stderr
    assert f"RESUME ckpt_2.pt {checkpoints}/ckpt_2.pt" in ended.stdout


def test_the_newest_checkpoint_is_known_after_a_good_end_too(gpulaunch, tmp_path: Path, checkpoints: Path) -> None:
    """It had been the one that the last attempt went on from, whatever was saved since."""
    ended = gpulaunch(
        *("--max-restarts", "1", "--checkpoint-dir", checkpoints, "--resume-arg", "--resume {path}"),
        *("--job-dir", tmp_path / "job", script(tmp_path)),
    )

    assert ended.code == 0, ended
    history = [json.loads(line) for line in (tmp_path / "job/events.jsonl").read_text().splitlines()]
    (last,) = (event for event in history if event["event"] == "run_ended")
    assert (last["resumed_step"], last["checkpoint_step"]) == (3, 5)


def test_a_pattern_that_fits_nothing_is_said_when_a_checkpoint_is_looked_for(
    gpulaunch, tmp_path: Path, checkpoints: Path
) -> None:
    ended = gpulaunch(
        *("--max-restarts", "1", "--checkpoint-dir", checkpoints, "--checkpoint-pattern", "model-{step}.pt"),
        script(tmp_path),
    )

    assert "nothing in it matches the pattern 'model-{step}.pt': ckpt_" in ended.stderr
    assert "the program starts without one" in ended.stderr


def test_another_run_goes_on_from_the_same_job_directory(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "job" / "checkpoints").mkdir(parents=True)
    options = ["--job-dir", tmp_path / "job", "--resume-arg", "--resume {path}"]

    first = gpulaunch(*options, script(tmp_path))
    second = gpulaunch(*options, script(tmp_path, dying="pass"))
    anew = gpulaunch(*options, "--resume", "never", script(tmp_path, dying="pass"))

    assert first.code == 137, first
    assert "STEPS 3 5" in second.stdout
    assert "RESUME None \n" in anew.stdout, "set, and empty: from none"


def test_a_named_checkpoint_is_the_first_attempts_and_then_our_own_newer_ones(
    gpulaunch, tmp_path: Path, checkpoints: Path
) -> None:
    import torch

    named = tmp_path / "pretrained.pt"
    torch.save({"step": 1}, named)
    torch.save({"step": 9}, checkpoints / "ckpt_9.pt")  # of another run, and newer than anything this one will save
    os.utime(checkpoints / "ckpt_9.pt", (1e9, 1e9))

    ended = gpulaunch(
        *("--max-restarts", "1", "--checkpoint-dir", checkpoints, "--resume", named),
        *("--resume-arg", "--resume {path}", script(tmp_path)),
    )

    assert ended.code == 0, ended
    said = [line.split("RESUME ")[1].split()[0] for line in ended.stdout.splitlines() if "RESUME" in line]
    assert said[0] == "pretrained.pt"
    assert said[1] == "ckpt_3.pt"


def test_a_named_checkpoint_that_is_damaged_is_refused_before_anything_runs(gpulaunch, tmp_path: Path) -> None:
    import torch

    named = tmp_path / "pretrained.pt"
    torch.save({"step": 1}, named)
    os.truncate(named, 500)

    ended = gpulaunch("--resume", named, script(tmp_path))

    assert ended.code == 1
    assert f"--resume {named}: " in ended.stderr
    assert "RESUME" not in ended.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--resume", "nowhere.pt"], "--resume: there is no nowhere.pt"),
        (["--resume-arg", "--resume"], "--resume-arg: "),
        (["--checkpoint-pattern", "../{step}"], "--checkpoint-pattern: "),
    ],
)
def test_what_cannot_be_meant_is_refused(gpulaunch, tmp_path: Path, options: list[str], complaint: str) -> None:
    ended = gpulaunch(*options, script(tmp_path))

    assert ended.code == 2
    assert complaint in ended.stderr
    assert ended.stderr.count("\n") == 1


# -- the restart policy, as a user sees it


def test_the_same_exception_at_the_same_step_again_is_not_tried_a_third_time(gpulaunch, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import os
        from gpulaunch import mark
        print("ATTEMPT", os.environ["TORCHELASTIC_RESTART_COUNT"])
        for _ in range(3):
            mark.step()
        {}["lr"]
        """,
    )

    ended = gpulaunch("--max-restarts", "10", program)

    assert ended.code == 93, ended
    assert ended.stdout.count("ATTEMPT") == 2
    assert "not restarted: the same exception after 3 steps as before" in ended.stderr
    assert "KeyError: 'lr'" in ended.stderr


def test_a_mount_that_comes_back_for_the_last_attempt_is_waited_for(gpulaunch, tmp_path: Path) -> None:
    """Three equal failures before the first step: restarted as asked, after a pause."""
    program = script(
        tmp_path,
        """
        import os
        if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 3:
            open("/nonexistent/data")
        print("OK")
        """,
    )

    ended = gpulaunch("--max-restarts", "3", program)

    assert ended.code == 0, ended
    assert "no progress in 2 attempts: waiting 1 s before the next one" in ended.stderr
    assert "OK" in ended.stdout


def test_an_exception_that_passes_is_restarted(gpulaunch, tmp_path: Path) -> None:
    program = script(
        tmp_path, "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise OSError('network')\nprint('OK')"
    )

    ended = gpulaunch("--max-restarts", "10", program)

    assert (ended.code, ended.stdout.strip()) == (0, "OK")


def test_so_many_restarts_within_a_time_and_no_more(gpulaunch, tmp_path: Path) -> None:
    program = script(tmp_path, "import os; print('ATTEMPT', flush=True); os.kill(os.getpid(), 9)")

    ended = gpulaunch("--max-restarts", "10", "--restart-rate", "3/1h", program)

    assert ended.code == 137, ended
    assert ended.stdout.count("ATTEMPT") == 4
    assert "--restart-rate allows 3 restarts within 3600 s" in ended.stderr


def test_every_second_of_a_run_is_accounted_for(gpulaunch, tmp_path: Path, checkpoints: Path) -> None:
    loop = "    for step in range(start + 1, 6):\n"
    weight = "    weight = torch.nn.Parameter(torch.zeros(1)); optimizer = torch.optim.SGD([weight])\n"
    stepping = PLAIN.replace(loop, f"{weight}{loop}        weight.sum().backward(); optimizer.step()\n")

    ended = gpulaunch(
        *("--max-restarts", "1", "--checkpoint-dir", checkpoints, "--resume-arg", "--resume {path}"),
        script(tmp_path, stepping),
    )

    summary = json.loads((ended.run_dir / "summary.json").read_text())
    assert summary["elapsed_s"] == pytest.approx(sum(summary["goodput_seconds"].values()), abs=0.2)
    last = json.loads((ended.run_dir / "events.jsonl").read_text().splitlines()[-1])
    assert last["goodput_seconds"] == pytest.approx(summary["goodput_seconds"], abs=0.2)
    assert last["restarts"] == {"signal": 1}
    assert "goodput " in ended.stderr


def test_a_program_that_finds_its_own_way_back_is_told_where_checkpoints_were_looked_for(
    gpulaunch, tmp_path: Path
) -> None:
    """It saves beside itself, and nobody has said where: what it makes again is not known, which is not nothing."""
    by_itself = """
        import os, sys
        if os.path.exists("mine.pt"):
            print("WENT ON", flush=True)
            sys.exit(0)
        open("mine.pt", "w").close()
        os.kill(os.getpid(), 9)
    """

    ended = gpulaunch("--max-restarts", "1", script(tmp_path, by_itself))

    assert ended.code == 0, ended
    assert "WENT ON" in ended.stdout
    assert "/checkpoints: the program starts without one" in ended.stderr
    assert (
        "if it resumes from another directory by itself, specify that directory with --checkpoint-dir" in ended.stderr
    )
    summary = json.loads((ended.run_dir / "summary.json").read_text())
    assert summary["goodput_seconds"]["lost_work"] is None


def test_the_time_of_a_failure_is_not_that_of_a_rank_that_had_ended_well(gpulaunch, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(0)\ntime.sleep(3)\nos._exit(3)",
    )

    ended = gpulaunch("--nproc", "2", "--no-profile", program)

    told = json.loads((ended.run_dir / "summary.json").read_text())
    known = {bucket: spent_s for bucket, spent_s in told["goodput_seconds"].items() if spent_s is not None}
    ranks_ran_s = told["elapsed_s"] - sum(known.values())
    assert ranks_ran_s > known["teardown"] + known["detection"]


def test_storage_that_cannot_be_searched_is_no_reason_to_begin_from_the_start(gpulaunch, tmp_path: Path) -> None:
    ended = gpulaunch("--checkpoint-dir", "nonsense://bucket", script(tmp_path))

    assert ended.code == 1, ended
    assert "nonsense" in ended.stderr
    assert "to start from scratch: --resume never" in ended.stderr
    assert "STEPS" not in ended.stdout


FLIPPED = """
    import os, sys, time, torch
    from gpulaunch.checkpoint import Checkpoint
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    ckpt = Checkpoint(model=torch.nn.Linear(2, 2), extra={"log": torch.nn.Linear(1, 1)}, every=1)
    print("RESUMED", ckpt.resume(), flush=True)
    for step in ckpt.steps(5):
        ckpt.step()
        if step == 3 and attempt == 0:
            ckpt.wait()
            newest = os.path.join(ckpt.directory, "step-000000000003", "__0_0.distcp")
            with open(newest, "r+b") as file:  # a flipped bit, in a place that loading does not look at
                file.seek(-1, 2)
                last = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([last ^ 1]))
            os.kill(os.getpid(), 9)
        if step == 4 and attempt == 1:
            ckpt.wait()
            log = os.path.join(os.path.dirname(ckpt.directory), "events.jsonl")
            until = time.monotonic() + 60
            while time.monotonic() < until and "checkpoint_damaged" not in open(log).read():
                time.sleep(0.05)
            os.kill(os.getpid(), 9)
"""


def test_what_is_read_behind_the_ranks_and_found_damaged_is_said_and_not_taken_again(gpulaunch, tmp_path: Path) -> None:
    """`--resume-search-timeout 0`: as if there had been no time to read it."""
    ended = gpulaunch(
        *("--max-restarts", "2", "--no-profile", "--resume-search-timeout", "0", script(tmp_path, FLIPPED))
    )

    assert ended.code == 0, ended
    assert "there was no time to read all of it (--resume-search-timeout 0)" in ended.stderr
    assert "is damaged: __0_0.distcp has changed since it was written" in ended.stderr
    history = [json.loads(line) for line in (ended.run_dir / "events.jsonl").read_text().splitlines()]
    assert "checkpoint_damaged" in {event["event"] for event in history}
    resumed = [line.split("RESUMED ")[1] for line in ended.stdout.splitlines() if "RESUMED" in line]
    assert resumed == ["None", "3", "4"]
    (began,) = (event for event in history if event["event"] == "run_started")
    saved = [read(os.fspath(path)) for path in (ended.run_dir / "checkpoints").glob("step-*")]
    assert {manifest.run for manifest in saved} == {began["run_id"]}, "each manifest names the job"
    assert len({manifest.attempt for manifest in saved}) > 1, "also after a restart"
