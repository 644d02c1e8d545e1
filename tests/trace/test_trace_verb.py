"""`gpulaunch trace` on toy runs: ranks without torch that answer as torch's client does; and a real job with torch."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpulaunch.launcher.cli import main, trace, tracer, waiting
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.profiler.channel import segment, segment_writer
from gpulaunch.profiler.daemon import tracefile, window

TOY = Path(__file__).with_name("toy_traced.py")
AGENT = "import os, sys, time\nfd = os.open(sys.argv[1], os.O_RDONLY)\nprint('held', flush=True)\ntime.sleep(600)"
Job = Callable[..., Path]


@pytest.fixture
def job(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Start a run whose ranks behave as told; give its run directory. Waits are short, since toys are quick."""
    started: list[subprocess.Popen[bytes]] = []

    def start(argv: list[str], says: bytes) -> subprocess.Popen[bytes]:
        env = {**os.environ, "GPULAUNCH_RUNS": "ab", "PYTHONPATH": str(TOY.parent)}
        # The umask of people who share everything: what a rank writes is open to others, unless somebody closes it.
        process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, env=env, umask=0)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == says
        return process

    def begin(*hows: str) -> Path:
        run_dir = tmp_path / "gpulaunch-runs" / "toy"
        run_dir.mkdir(parents=True)
        (run_dir / "events.jsonl").touch()
        ranks: list[dict[str, int]] = []
        for rank, how in enumerate(hows):
            path = directory / f"rank-{rank}.bin"
            segment_writer.create(str(path), rank=rank, local_rank=rank, attempt=0)
            ranks.append({"rank": rank, "local_rank": rank, "pid": start([str(TOY), str(path), how], b"ok\n").pid})
        agent = start(["-c", AGENT, str(run_dir)], b"held\n")
        group = {"version": 1, "run_id": "ab", "attempt": 0, "ranks": ranks, "agent_pid": agent.pid}
        (run_dir / "group.json").write_text(json.dumps(group))
        wait_for_steps(directory, len(hows))
        return run_dir

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace, "directory_of", lambda run_id: str(directory))
    monkeypatch.setattr(window, "RANK_CHECKS_EVERY_S", 0.5)
    monkeypatch.setattr(window, "ASKS_EVERY_S", 0.5)
    monkeypatch.setattr(window, "KINETO_PREPARES_S", 0.1)
    monkeypatch.setattr(tracer, "STALLED_AFTER_NS", 1_000_000_000)
    monkeypatch.setattr(tracer, "SETTLE_TIMEOUT_NS", 5_000_000_000)
    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for_steps(directory: Path, num_ranks: int) -> None:
    until_s = time.monotonic() + 60
    for rank in range(num_ranks):
        while segment.read(str(directory / f"rank-{rank}.bin")).steps < 20:
            assert time.monotonic() < until_s, "the rank makes no steps"
            time.sleep(0.01)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_all_ranks_are_traced_in_one_window(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """As many of their steps of 5 ms that none of them can stand still for all of the window."""
    run_dir = job("good", "good")

    assert trace.run(["--steps", "60"]) == 0

    first, *rest = lines(capsys)
    assert re.fullmatch(r"rank 0, 1: a trace of .* starts in \d+ s \(steps take .* ms\)", first)
    (directory,) = [path for path in (run_dir / "traces").iterdir() if path.is_dir()]
    assert sorted(os.listdir(directory)) == ["rank-0.json", "rank-1.json", "trace.json"]
    assert len(json.loads((directory / "rank-0.json").read_text())["traceEvents"]) == 100
    shown = [line for line in rest if line.startswith("rank 1: ")]
    assert len(shown) == 1
    assert f"traces/{directory.name}/rank-1.json: " in shown[0]
    assert re.search(r", 100 events, steps \d+ to \d+$", shown[0])
    assert re.fullmatch(r"  step .* ms before, .* ms during, .* ms after", rest[1])
    assert re.fullmatch(r"  memory .* MB before, .* MB at most, .* MB after", rest[2])

    record = json.loads((directory / "trace.json").read_text())
    few = [f"only {each['num_steps']} of 60 steps" for each in record["ranks"] if each["num_steps"] < 60]
    assert [line.split()[1:6] for line in rest if "warning: only" in line] == [text.split() for text in few]
    event = json.loads((run_dir / "events.jsonl").read_text())
    assert (event["event"], event["ranks"]) == ("trace", record["ranks"])


def test_somebody_who_looks_on_is_told_what_is_waited_for(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To begin, in the window, for the trace, for a rank that is slower than before. In the end it is gone, and was
    never among the lines that are the answer."""
    job("slowed")
    said: list[str] = []

    class Told(waiting.Activity):
        def __call__(self, what: str, share: float | None = None, *, lasts_s: float | None = None) -> None:
            said.append(re.sub(r"\d+", "N", what).replace("N steps", "N step"))
            super().__call__(what, share, lasts_s=lasts_s)

    screen, stderr = pty.openpty()
    shown = ""
    with monkeypatch.context() as looked_on, open(stderr, "w") as terminal:
        looked_on.setattr(waiting, "Activity", Told)
        looked_on.setattr(tracer, "SETTLE_TIMEOUT_NS", 2_000_000_000)
        looked_on.setattr(sys, "stderr", terminal)
        assert trace.run(["--duration", "2s"]) == 0
    with contextlib.suppress(OSError):  # when all is read
        while True:
            shown += os.read(screen, 65536).decode()
    os.close(screen)

    assert list(dict.fromkeys(said)) == [
        "waiting for the start",
        "recording, N step",
        "writing, N of N traces are complete",
        "waiting until ranks are as fast as before, N s at most",
    ]
    assert re.search(r"\r(waiting|recording|writing)[^\r]*, \d+ s +\r", shown)
    assert shown.endswith(" \r")
    assert "\n" not in shown
    assert [line for line in lines(capsys) if "waiting" in line or "recording" in line] == []


def test_nothing_is_left_beside_the_pages(job: Job, directory: Path) -> None:
    job("good")

    assert trace.run(["--duration", "100ms"]) == 0
    assert [path.name for path in directory.iterdir() if not path.name.startswith("dynoconfigclient")] == ["rank-0.bin"]


def test_one_rank_into_another_directory(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that has no words in the language of orders: the ranks do not get to see it."""
    job("good", "good")
    out = tmp_path / "lr=0.1 #3" / "a.json.d"

    assert trace.run(["--rank", "1", "--duration", "100ms", "--out", str(out), "--what", "cpu"]) == 0
    assert sorted(os.listdir(out)) == ["rank-1.json", "trace.json"]

    with pytest.raises(UsageError, match="already contains a trace of rank 1"):
        trace.run(["--rank", "1", "--duration", "100ms", "--out", str(out), "--again"])


def test_what_an_older_trace_has_left_is_not_taken_for_this_one(job: Job, tmp_path: Path) -> None:
    """A whole trace of the same rank under the name that its process would give it, and one under a shorter name."""
    run_dir = job("good")
    pid = json.loads((run_dir / "group.json").read_text())["ranks"][0]["pid"]
    out = tmp_path / "traces"
    out.mkdir()
    stale = json.dumps({"traceEvents": [], "traceName": "of yesterday", "baseTimeNanoseconds": 0})
    names = {f"rank-0.part_{pid}.json", "rank-0.part_1.json", "rank-0.part_2.json.tmp"}
    for name in names:
        (out / name).write_text(stale)

    assert trace.run(["--duration", "100ms", "--out", str(out)]) == 0

    assert len(json.loads((out / "rank-0.json").read_text())["traceEvents"]) == 100
    assert set(os.listdir(out)) == {*names, "rank-0.json", "trace.json"}
    assert {(out / name).read_text() for name in names} == {stale}  # and they are nobody's to throw away


def test_a_rank_that_is_late_with_an_interrupted_trace_does_not_spoil_the_next(
    job: Job, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has its order from a trace that nobody waits for any more, and writes it when asked for another."""
    run_dir = job("tardy")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt, directory / "ordered")
        with pytest.raises(KeyboardInterrupt):
            trace.run(["--duration", "100ms"])

    assert trace.run(["--duration", "100ms"]) == 1

    assert lines(capsys)[-1].startswith("rank 0: no trace: torch ")
    assert [path.name for path in (run_dir / "traces").iterdir()] == ["last"]


def test_half_a_trace_is_not_left_for_the_next_one(job: Job, tmp_path: Path) -> None:
    job("halved")
    out = tmp_path / "traces"
    out.mkdir()

    assert trace.run(["--duration", "100ms", "--out", str(out)]) == 1
    assert os.listdir(out) == []


def test_nobody_else_can_read_a_trace_whatever_the_umask(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while it is written, in a directory that is open to all."""
    job("good")
    out = tmp_path / "traces"
    out.mkdir()
    out.chmod(0o777)
    before: list[tuple[int, int]] = []

    def look(path: str) -> tracefile.Contents | None:
        before.append((mode(Path(path).parent), mode(Path(path))))
        return tracefile.contents_of(path)

    monkeypatch.setattr(tracer, "contents_of", look)

    assert trace.run(["--duration", "100ms", "--out", str(out)]) == 0

    assert {file for _, file in before} == {0o666}  # as the rank has made it
    assert {directory for directory, _ in before} == {0o700}
    assert {name: mode(out / name) for name in os.listdir(out)} == {"rank-0.json": 0o600, "trace.json": 0o600}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.light  # on a crowded machine another may be the slowest
def test_the_slowest_is_chosen(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job("good", "late", "good")

    assert trace.run(["--rank", "slowest", "--duration", "100ms"]) == 0
    assert lines(capsys)[0].startswith("rank 1: ")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("refuses", "it does not like to"),
        ("silent", "its torch trace client did not fetch the request"),
        ("busy", "the program uses torch.profiler itself"),
        ("dies", "it has ended"),
        ("halved", "its trace is incomplete"),
    ],
)
def test_a_rank_without_a_trace_says_why_and_the_others_have_theirs(
    job: Job, capsys: pytest.CaptureFixture[str], how: str, why: str
) -> None:
    run_dir = job("good", how)

    assert trace.run(["--duration", "100ms"]) == 1

    told = [line for line in lines(capsys) if line.startswith("rank ")]
    assert f"rank 1: no trace: {why}" in told
    assert len(list(run_dir.glob("traces/*/rank-0.json"))) == 1


def test_a_rank_that_is_stopped_hears_of_nothing(job: Job, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = job("good")
    rank = json.loads((run_dir / "group.json").read_text())["ranks"][0]["pid"]
    os.kill(rank, signal.SIGSTOP)
    try:
        assert trace.run(["--duration", "100ms"]) == 1
    finally:
        os.kill(rank, signal.SIGCONT)

    assert (
        "rank 0: no trace: it has completed no step since the request, and requests are read at the end of a step"
        in lines(capsys)
    )
    assert not [path for path in (run_dir / "traces").iterdir() if path.is_dir()]  # nothing came of it


def test_a_rank_that_stays_slow_is_told(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = job("slowed")

    assert trace.run(["--duration", "100ms"]) == 0

    assert "  warning: rank 0 is still slower than before; a restart of the job helps" in lines(capsys)
    (record,) = run_dir.glob("traces/*/trace.json")
    (rank,) = json.loads(record.read_text())["ranks"]
    assert rank["back"] is False
    assert rank["after"]["step_s"] > 2 * rank["before"]["step_s"]


def test_a_rank_that_keeps_memory_is_told(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = job("good", "keeps")

    assert trace.run(["--duration", "100ms"]) == 0

    (warned,) = [line for line in lines(capsys) if "more than before" in line]
    assert re.fullmatch(r"  warning: rank 1 holds 1\d\d\.\d MB more than before; a restart of the job frees it", warned)
    (record,) = run_dir.glob("traces/*/trace.json")
    kept = [
        each["rss"]["after_bytes"] - each["rss"]["before_bytes"] for each in json.loads(record.read_text())["ranks"]
    ]
    assert kept[0] < 64 << 20 < 100 << 20 <= kept[1]


def test_a_trace_in_which_nothing_happened_is_told(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job("empty")

    assert trace.run(["--duration", "100ms", "--what", "memcpy"]) == 0
    assert "  warning: rank 0 performed none of the operations to record" in lines(capsys)


def test_what_the_gpu_copied_is_held_against_the_ledger(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """A toy copies 1000 bytes in each of its steps, before, in and after the window; its trace has 20 copies."""
    run_dir = job("copies")

    assert trace.run(["--duration", "100ms"]) == 0

    (record,) = run_dir.glob("traces/*/trace.json")
    (rank,) = json.loads(record.read_text())["ranks"]
    assert rank["copied"].keys() == {"h2d"}
    assert rank["copied"]["h2d"]["traced_bytes"] == 20_000
    assert abs(rank["copied"]["h2d"]["ledger_bytes"] - 1000 * rank["num_steps"]) <= 10_000  # the steps at the edges
    assert [line for line in lines(capsys) if line.startswith("  copies h2d: 0.0 MB in the trace, 0.0 MB observed")]


def test_who_interrupts_a_trace_leaves_nothing_behind(job: Job, directory: Path) -> None:
    """Ctrl-C while the ranks are waited for; a rank that has its order by then finds no place to write to."""
    run_dir = job("silent")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt, directory / "dynolog")
        with pytest.raises(KeyboardInterrupt):
            trace.run(["--duration", "100ms"])

    assert not (directory / "dynolog").exists()
    assert not os.path.lexists(directory / "traces")
    assert [path.name for path in (run_dir / "traces").iterdir()] == ["last"]


def interrupt(when: Path) -> None:
    """Press Ctrl-C when this file is there."""
    until_s = time.monotonic() + 60
    while not when.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_trace_goes_on_where_a_killed_one_left_its_files(job: Job, directory: Path) -> None:
    job("good")
    (directory / "dynolog").touch()
    (directory / "traces").symlink_to("nowhere")

    assert trace.run(["--duration", "100ms"]) == 0


def test_a_second_trace_has_to_wait_or_to_be_asked_for_twice(job: Job) -> None:
    run_dir = job("good")
    assert trace.run(["--duration", "100ms"]) == 0

    with pytest.raises(UsageError, match=r"the last trace of this run was .* ago, .* wait, or use --again"):
        trace.run(["--duration", "100ms"])
    assert trace.run(["--duration", "100ms", "--again"]) == 0
    os.utime(run_dir / "traces" / "last", (time.time() - 601, time.time() - 601))
    assert trace.run(["--duration", "100ms"]) == 0


def test_a_trace_that_did_not_come_about_does_not_count(job: Job) -> None:
    job("refuses")

    assert trace.run(["--duration", "100ms"]) == 1
    assert trace.run(["--duration", "100ms"]) == 1


def test_two_at_once_are_one_too_many(job: Job) -> None:
    traces = job("good") / "traces"
    with ThreadPoolExecutor(1) as apart:
        first = apart.submit(trace.run, ["--duration", "1s"])
        until_s = time.monotonic() + 60
        while not any(path.is_dir() for path in traces.glob("*")):
            assert time.monotonic() < until_s, "no trace is being made"
            time.sleep(0.01)
        with pytest.raises(UsageError, match="another trace of this run is being recorded"):
            trace.run(["--again"])
        assert first.result() == 0


def test_a_run_without_the_profiler_cannot_be_traced(job: Job, directory: Path) -> None:
    job("good")
    (directory / "rank-0.bin").unlink()

    with pytest.raises(UsageError, match="trace: the profiler is off in this run"):
        trace.run([])


def test_a_rank_that_has_not_armed_cannot_be_traced(job: Job, directory: Path) -> None:
    job("good")
    (directory / "rank-0.bin").unlink()
    segment_writer.create(str(directory / "rank-0.bin"), rank=0, local_rank=0, attempt=0)

    with pytest.raises(UsageError, match="rank 0 has not loaded torch"):
        trace.run([])


def test_the_pages_may_be_somewhere_else(job: Job, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPULAUNCH_SHM_DIR; and root, whose own pages would have another name."""
    run_dir = job("good")
    monkeypatch.setattr(trace, "directory_of", lambda run_id: "/nowhere")
    with pytest.raises(UsageError, match="the profiler is off"):
        trace.run(["--duration", "100ms"])
    group = json.loads((run_dir / "group.json").read_text())
    (run_dir / "group.json").write_text(json.dumps({**group, "channel_dir": str(directory)}))

    assert trace.run(["--duration", "100ms"]) == 0


def test_steps_need_a_step_to_go_by_and_fit_in_a_minute(job: Job, directory: Path) -> None:
    job("good")

    with pytest.raises(UsageError, match=r"trace: 100000 steps would take \d+ s, and the maximum is 60 s"):
        trace.run(["--steps", "100000"])


def test_no_run_and_no_such_rank(job: Job, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trace: no run is active"):
        trace.run([])
    job("good")
    with pytest.raises(UsageError, match="trace: rank 4 is not on this node; its ranks are 0"):
        trace.run(["--rank", "4"])


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--steps", "0"], "expected a number from 1, got '0'"),
        (["--duration", "0"], "expected 1ms to 60s, got '0'"),
        (["--duration", "2m"], "expected 1ms to 60s, got '2m'"),
        (["--duration", "x"], "expected a time such as"),
        (["--steps", "1", "--duration", "1s"], "--steps or --duration, not both"),
        (["--rank", "fastest"], "expected a rank from 0, `slowest` or `all`, got 'fastest'"),
        (["--what", "cpu,cdua"], "unknown kind cdua; did you mean cuda?"),
        (["--what", ""], "unknown kind ''"),
        (["--stepz", "3"], "unknown argument --stepz; did you mean --steps?"),
        (["5"], "there is no run directory 5, neither here nor in "),
        (["a", "--job-dir", "b"], "one run at a time, not 2: a b"),
    ],
)
def test_wrong_words_are_told_in_one_line(argv: list[str], complaint: str) -> None:
    with pytest.raises(UsageError) as told:
        trace.run(argv)
    assert str(told.value).startswith("trace: ")
    assert complaint in str(told.value)
    assert "\n" not in str(told.value)


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["trace", "--help"]) == 0

    told = capsys.readouterr().out
    for option in ("--steps", "--duration", "--rank", "--what", "--job-dir", "--out", "--again"):
        assert f"  {option} " in told
