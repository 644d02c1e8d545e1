"""The report for people and for machines: golden pages, planted secrets, and the file for a launcher above."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.failure.blame import Blame, blame
from gpulaunch.launcher.failure.report import headline, render, tell_parent, write_report

GOLDEN = Path(__file__).parent / "golden"
OOM = "the kernel's OOM killer struck in this job's cgroup (limit 8.0 GiB, memory.events: oom_kill 0 -> 1)"
CANARY = "c4n4ry-s3cr3t-v4lue"


@pytest.fixture(autouse=True)
def utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # of its own: undoing the shared one would undo the census's, too
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def page(verdict: Blame) -> str:
    return render(verdict, script="train.py", report_path="runs/x/attempts/0/failure.json", started_s=100.0)


def check_golden(name: str, text: str) -> None:
    """Compare with a page of golden/; `GOLDEN=write pytest` writes it anew, for a reviewer to read."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()


TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 31, in <module>
    main()
    ~~~~^^
  File "/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 367, in wrapper
    return f(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^
  File "/site-packages/gpulaunch/launcher/loop/rank_main.py", line 88, in run
    exec(code, module.__dict__)
  File "/home/me/train.py", line 27, in main
    raise ValueError(f"bad loss {loss}")
ValueError: bad loss nan
"""


def test_an_exception_with_echoes(make_end: Any, make_echo: Any, make_error: Any) -> None:
    tail = ("epoch 3", "UserWarning: loss is large", *TRACEBACK.splitlines())
    first = make_end(
        3, at_s=112.5, error=make_error("ValueError", "bad loss nan", traceback=TRACEBACK, at=112.3), tail=tail
    )
    stopped = [make_end(rank, stopped=True, signal=signal.SIGTERM, at_s=113.0) for rank in (6, 7)]

    text = page(blame([*(make_echo(rank) for rank in (0, 1, 2, 4, 5)), first, *stopped]))

    check_golden("exception", text)
    lines = text.splitlines()
    assert lines[-5].startswith("first cause, 12.3 s after the start: rank 3 ")
    assert lines[-3].startswith("what to do: ")
    assert lines[-2] == "report: runs/x/attempts/0/failure.json"
    assert text.count("bad loss nan") == 2, "in the traceback and in the verdict, not a third time in the last lines"
    for scraped in (
        "train.py FAILED",
        "Root Cause (first observed failure):",
        "exitcode",
        "rank      : 3 (local_rank: 3)",
    ):
        assert scraped in text


def test_out_of_memory(make_end: Any, make_echo: Any) -> None:
    first = make_end(1, signal=signal.SIGKILL, tail=("step 118 loss 2.31", "step 119 loss 2.29"), evidence=(OOM,))

    check_golden("oom", page(blame([make_echo(0), first])))


FAULT = """Fatal Python error: Segmentation fault

Thread 0x00007f21aa7fc6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f21b8d4b740 (most recent call first):
  File "/home/me/kernels.py", line 12 in launch
  File "/home/me/train.py", line 27 in main
  File "/home/me/train.py", line 31 in <module>
  File "/site-packages/gpulaunch/launcher/loop/rank_main.py", line 88 in run

Extension modules: numpy.core._multiarray_umath, torch._C (total: 51)
"""


def test_a_segmentation_fault_shows_the_stack_of_the_thread_that_was_hit(make_end: Any) -> None:
    check_golden("segfault", page(blame([make_end(0, signal=signal.SIGSEGV, fault=FAULT)])))


def test_the_same_failure_on_all_ranks_is_told_once(make_end: Any, make_error: Any) -> None:
    ends = [
        make_end(rank, at_s=101.0 + rank, error=make_error("ModuleNotFoundError", "No module named 'nope'"))
        for rank in range(4)
    ]

    check_golden("import_everywhere", page(blame(ends)))


def test_only_echoes(make_echo: Any) -> None:
    check_golden("only_echoes", page(blame([make_echo(0, at=110.0), make_echo(1, at=110.1)])))


def test_an_early_exit(make_end: Any, make_echo: Any) -> None:
    check_golden(
        "early_exit", page(blame([make_end(2, code=0, at_s=105.0, tail=("done",)), make_echo(0), make_echo(1)]))
    )


HUNG = "ranks 0 and 2 wait in all_reduce, rank 1 is in train.py:88 open()"
XID = "GPU 1 (GPU-5a0c) reported Xid 79 (the GPU has fallen off the bus)"


def test_a_hang(make_end: Any, make_error: Any) -> None:
    """What it raised when it was told to end is in the traceback, and not in the verdict."""
    told = make_error("KeyboardInterrupt", "", at=140.1)
    first = make_end(1, signal=signal.SIGKILL, at_s=141.5, hang=HUNG, hung_s=140.0, error=told, tail=("step 118",))
    stopped = [make_end(rank, stopped=True, signal=signal.SIGTERM, at_s=140.2) for rank in (0, 2)]

    verdict = blame([stopped[0], first, stopped[1]])

    check_golden("hang", page(verdict))
    assert headline(verdict) == f"rank 1 (local rank 1, node1, pid 4001) hung: {HUNG}"


def test_a_card_at_fault(make_end: Any, make_echo: Any, make_error: Any) -> None:
    said = make_error("AcceleratorError", "CUDA error: unspecified launch failure", at=110.0)

    check_golden("gpu_hardware", page(blame([make_end(1, error=said, evidence=(XID,)), make_echo(0)])))
    hung = blame([make_end(1, signal=signal.SIGKILL, hang=HUNG, evidence=(XID,))])
    assert headline(hung).endswith(f" hung: {HUNG}; {XID}")


def test_a_preempted_job(make_end: Any, make_error: Any) -> None:
    text = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    ckpt.step()\n'
    saved = make_error("Preempted", "75", traceback=f"{text}gpulaunch.checkpoint.save.Preempted: 75\n")

    check_golden("preempted", page(blame([make_end(rank, code=75, error=saved) for rank in (0, 1)])))


def test_a_shells_exit_code_is_decoded(make_end: Any) -> None:
    assert "exited with code 137: as a shell reports SIGKILL" in page(blame([make_end(code=137)]))


def test_a_traceback_that_the_program_printed_before_os_exit(make_end: Any) -> None:
    verdict = blame([make_end(0, code=7, tail=TRACEBACK.splitlines())])

    assert headline(verdict).endswith(" exited with code 7; its last lines: ValueError: bad loss nan")
    assert "the traceback above names the line" in page(verdict)


def test_many_different_failures_are_cut_short(make_end: Any, make_error: Any) -> None:
    ends = [make_end(rank, at_s=101.0 + rank, error=make_error("ValueError", f"sample {rank}")) for rank in range(64)]

    text = page(blame(ends))

    assert text.count(" failed too: ") == 8
    assert "ranks 9-63 failed too, for other reasons" in text


def hostile(make_end: Any, make_error: Any) -> Blame:
    secret = f"HF_TOKEN={CANARY}"
    frames = f'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    login("{secret}")\n'
    trace = f"{frames}ValueError: {secret} \x1b[2J\n"
    error = make_error("ValueError", f"{secret} \x1b[2J \udcff", traceback=trace)
    tail = (f"--password {CANARY}", "\x1b]0;title\x07 \x9b31m")
    return blame([make_end(0, error=error, tail=tail, evidence=(secret,), fault=secret)])


def test_the_page_holds_no_secret_and_nothing_that_a_terminal_obeys(make_end: Any, make_error: Any) -> None:
    text = page(hostile(make_end, make_error))

    assert CANARY not in text
    assert text.replace("\n", "").isprintable()
    assert "\\x1b[2J" in text


def test_the_headline_is_one_safe_line(make_end: Any, make_error: Any) -> None:
    line = headline(hostile(make_end, make_error))

    assert line.startswith("rank 0 (local rank 0, node1, pid 4000) raised ValueError: HF_TOKEN=<redacted>")
    assert line.isprintable()


def test_the_report_for_machines(tmp_path: Path, make_end: Any, make_echo: Any, make_error: Any) -> None:
    first = make_end(1, at_s=112.5, error=make_error("ValueError", "x", at=112.3), tail=("a", "b"), evidence=("fact",))
    verdict = blame(
        [first, make_echo(0), make_end(2, stopped=True, signal=signal.SIGTERM), make_end(3, code=0, at_s=119.0)]
    )
    path = tmp_path / "failure.json"

    problem = write_report(
        str(path),
        verdict,
        script="train.py",
        started_s=100.0,
        started_wall_s=1.7e9,
        world_size=4,
        attempt=2,
        torch_version="2.13.0",
    )

    assert problem is None
    report = json.loads(path.read_text())
    assert report["version"] == 1
    assert set(report) == {
        "version", "script", "attempt", "world_size", "exit_code", "started_wall_s", "host", "torch", "first", "ranks",
    }  # fmt: skip
    assert (report["attempt"], report["world_size"], report["exit_code"], report["torch"]) == (2, 4, 1, "2.13.0")
    assert report["first"]["rank"] == 1
    assert report["first"]["kind"] == "exception"
    assert [(rank["rank"], rank["part"]) for rank in report["ranks"]] == [
        (0, "echo"),
        (1, "first"),
        (2, "stopped"),
        (3, "finished"),
    ]
    told = report["ranks"][1]
    assert told["error"]["message"] == "x"
    assert told["failed_after_s"] == pytest.approx(12.3)
    assert (told["tail"], told["evidence"], told["code"], told["signal_name"]) == (["a", "b"], ["fact"], 1, None)
    assert report["ranks"][2]["signal_name"] == "SIGTERM"
    assert (path.stat().st_mode & 0o777) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["failure.json"]


def test_the_report_holds_no_secret_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_end: Any, make_error: Any
) -> None:
    monkeypatch.setenv("UNREMARKABLE_NAME", CANARY)
    path = tmp_path / "failure.json"

    write_report(
        str(path), hostile(make_end, make_error), script="t.py", started_s=1.0, started_wall_s=1.0, world_size=1
    )

    assert CANARY not in path.read_text()


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path: Path, make_end: Any) -> None:
    path = str(tmp_path / "none" / "failure.json")

    problem = write_report(path, blame([make_end()]), script="t", started_s=1.0, started_wall_s=1.0, world_size=1)

    assert problem == f"could not write {path}: No such file or directory"


def test_a_launcher_above_gets_the_root_cause_with_its_code(tmp_path: Path, make_end: Any) -> None:
    mine, above = tmp_path / "error.json", tmp_path / "parent.json"
    extra = {"py_callstack": "Traceback", "timestamp": "1690000000", "custom": [1]}
    mine.write_text(
        json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}, "errorTraits": {"a": "b"}})
    )
    above.write_text("something older")

    assert tell_parent(make_end(code=3), str(mine), str(above)) is None

    told = json.loads(above.read_text())
    assert told["message"] == {"message": "ValueError: x", "extraInfo": extra, "errorCode": 3}
    assert told["errorTraits"] == {"a": "b"}


def test_a_launcher_above_gets_the_code_1_of_a_rank_that_was_stopped_after_it_had_raised(
    tmp_path: Path, make_end: Any, make_error: Any
) -> None:
    """All ranks raise at once: the first to raise is often not the first to end."""
    mine, above = tmp_path / "error.json", tmp_path / "parent.json"
    mine.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1690000000"}}}))
    end = make_end(signal=signal.SIGTERM, error=make_error("ValueError", "x", at=109.0))

    tell_parent(end, str(mine), str(above))

    assert json.loads(above.read_text())["message"]["errorCode"] == 1


def test_a_launcher_above_gets_an_old_style_file_as_it_is(tmp_path: Path, make_end: Any) -> None:
    mine, above = tmp_path / "error.json", tmp_path / "parent.json"
    mine.write_text('{"message": "x", "timestamp": 1}')

    tell_parent(make_end(code=3), str(mine), str(above))

    assert json.loads(above.read_text()) == {"message": "x", "timestamp": 1}


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_a_launcher_above_hears_of_a_rank_that_left_no_words(
    tmp_path: Path, make_end: Any, content: str | None
) -> None:
    mine, above = tmp_path / "error.json", tmp_path / "parent.json"
    if content is not None:
        mine.write_text(content)

    tell_parent(make_end(2, signal=signal.SIGSEGV), str(mine), str(above))

    message = json.loads(above.read_text())["message"]
    assert message["errorCode"] == -11
    assert "rank 2" in message["message"]
    assert "SIGSEGV" in message["message"]
    assert message["extraInfo"]["timestamp"] == "1700000010"


@pytest.mark.torch
def test_torchs_own_reader_understands_what_a_launcher_above_gets(tmp_path: Path, make_end: Any) -> None:
    import subprocess
    import sys

    above = tmp_path / "parent.json"
    tell_parent(make_end(2, signal=signal.SIGSEGV), str(tmp_path / "none"), str(above))
    program = (
        "import sys; from torch.distributed.elastic.multiprocessing.errors import ProcessFailure;"
        "f = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=sys.argv[1]);"
        "print(f.timestamp, f.message['errorCode'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(above)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )

    assert done.stdout == "1700000010 -11\n", done.stderr


def test_last_lines_leave_out_the_traceback_also_where_torch_marks_it(make_end: Any, make_error: Any) -> None:
    """torch's excepthook writes `[rank1]: ` in front of every line."""
    error = make_error("ValueError", "boom")
    tail = ("saving", *(f"[rank1]: {line}" for line in error.traceback.splitlines()))

    text = page(blame([make_end(1, error=error, tail=tail)]))

    assert "    saving\n" in text
    assert "[rank1]:" not in text
