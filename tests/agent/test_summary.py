"""What is told at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulaunch.launcher.agent import summary
from gpulaunch.profiler.channel import segment, segment_writer
from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.quantities import LoaderState


def totals(steps: int = 10, step_ns: int = 1_000_000_000, samples: int = 320) -> summary.RankTotals:
    one = summary.RankTotals(steps=steps, step_ns=step_ns, samples=samples, max_rss_bytes=300 << 20)
    one.phase_ns["data_wait"] = step_ns // 4
    one.phase_ns["other"] = step_ns - step_ns // 4
    return one


def text(ranks: dict[int, summary.RankTotals], *, restarts: int = 0, stopped_by: str = "") -> str:
    return "\n".join(summary.as_text(ranks, elapsed_s=8.5, restarts=restarts, run_dir="./run", stopped_by=stopped_by))


def test_rates_are_of_the_stepping_and_time_is_of_the_whole() -> None:
    assert text({0: totals(), 1: totals()}).splitlines()[0] == "10 steps; 640 samples/s while stepping; 8.5 s in all"


def test_steps_of_all_attempts_are_told_as_such() -> None:
    assert text({0: totals()}, restarts=2).startswith("10 steps in 3 attempts; ")


def test_shares_of_the_step_are_told_per_rank() -> None:
    row = text({3: totals()}).splitlines()[2]

    assert row.split() == ["3", "100.00", "ms", "25.0%", "0.0%", "0.0%", "0.0%", "75.0%"]


def test_steps_of_a_killed_rank_that_told_no_times_are_counted_and_not_averaged() -> None:
    killed = totals(steps=15)
    killed.untimed_steps = 5

    assert text({0: killed}).startswith("15 steps; ")
    assert text({0: killed}).splitlines()[2].split()[1] == "100.00"


def test_long_jobs_show_the_first_and_the_last_ranks() -> None:
    rows = text({rank: totals() for rank in range(64)}).splitlines()

    assert len(rows) == 1 + 1 + 8 + 1 + 8 + 1
    assert rows[10].strip() == "..."


def test_a_stopped_job_says_so_and_one_that_never_ran_claims_no_memory() -> None:
    told = text({}, stopped_by="SIGINT")

    assert told == "no steps were observed; 8.5 s in all\nstopped by SIGINT; 0 restarts; files in ./run"


def test_without_a_profile_no_step_could_be_seen() -> None:
    ranks = {0: summary.RankTotals(max_rss_bytes=300 << 20)}

    told = summary.as_text(ranks, elapsed_s=8.5, restarts=0, run_dir="./run", stopped_by="", profiled=False)

    assert told[0] == "steps were not observed (--no-profile); 8.5 s in all"
    assert "(shared pages included, workers not)" in told[1], "whether it had any is not known"


@pytest.mark.parametrize("configured", [0, 2])
def test_workers_are_named_where_there_are_any(tmp_path: Path, configured: int) -> None:
    path = str(tmp_path / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    writer = segment_writer.SegmentWriter(path)
    writer.words[LoaderState.workers_configured] = configured
    writer.close()
    one = summary.RankTotals()
    one.add(segment.read(path), 300 << 20)

    assert ("(shared pages included, workers not)" in text({0: one})) == (configured > 0)
    assert ("(shared pages included)" in text({0: one})) == (configured == 0)


def test_of_a_rank_without_a_probe_only_the_memory_is_known(tmp_path: Path) -> None:
    """Rank 0 has one, and made no step; rank 1 has a segment that no probe has ever written to, rank 2 has none."""
    ranks = {rank: summary.RankTotals() for rank in range(3)}
    paths = [str(tmp_path / f"rank-{rank}.bin") for rank in range(2)]
    for rank, path in enumerate(paths):
        segment_writer.create(path, rank=rank, local_rank=rank, attempt=0)
    segment_writer.SegmentWriter(paths[0]).close()
    for rank, path in enumerate(paths):
        ranks[rank].add(segment.read(path), 300 << 20)
    ranks[2].add(None, 300 << 20)

    told = summary.as_json(ranks, exit_code=0)

    seen, *unseen = told["ranks"].values()
    assert (seen["steps"], seen["timed_steps"], seen["step_seconds"]) == (0, 0, 0.0)
    assert unseen == [{**dict.fromkeys(seen), "max_rss_bytes": 300 << 20}] * 2
    assert told["samples_per_second"] is None


def test_a_job_that_stands_still_is_not_told_the_pace_that_it_had(tmp_path: Path) -> None:
    """Ten steps of 2 s, the last edge at 100 s: at 103 s that is a step under way, at 120 s it is none."""
    path = str(tmp_path / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    writer = segment_writer.SegmentWriter(path)
    for word, value in ((Word.STEPS, 10), (Word.SAMPLES, 320), (Word.STEP_NS_TOTAL, 20 * 10**9)):
        writer.words[word] = value
    writer.words[Word.LAST_EDGE] = 100 * 10**9 << 3
    writer.close()
    segments = {0: segment.read(path)}

    assert summary.progress(segments, 25.0, 103.0) == "25.0 s: step 10, 16 samples/s, data wait 0% of the step"
    assert summary.progress(segments, 42.0, 120.0) == "42.0 s: step 10; no rank has made progress for 20.0 s"


def went(steps: int = 1000, *, batches: int = 0, transfer_ms: float = 0.0, **shares: float) -> summary.RankTotals:
    """A rank whose steps of 100 ms went there, in shares; the rest is the model."""
    step_ns = steps * 100_000_000
    one = summary.RankTotals(steps=steps, step_ns=step_ns, batches=batches, transfer_ns=int(1e6 * transfer_ms * steps))
    for phase, share in {**shares, "forward": 1.0 - sum(shares.values())}.items():
        one.phase_ns[phase] = int(share * step_ns)
    return one


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (went(other=0.04, data_wait=0.01), "no findings: 95% of the steps is forward, backward and optimizer"),
        (went(steps=20, other=0.5), "no findings: 20 steps in 2 s are too few to judge"),
        (went(comm=0.08), "no findings: comm is 8% of the steps, ranks wait for each other or for the network"),
        (went(data_wait=0.09, batches=1000, transfer_ms=2.0), "no findings: data wait is 9% of the steps"),
        (
            went(data_wait=0.24, batches=30_000, transfer_ms=21.0),
            (
                "no findings: data wait is 24% of the steps, "
                "of which 21% is the transfer of batches, 0.7 ms each: use fewer, larger ones"
            ),
        ),
        (summary.RankTotals(), ""),
    ],
)
def test_without_findings_it_is_said_where_the_steps_went(one: summary.RankTotals, sentence: str) -> None:
    assert summary.why_nothing_was_found([one]) == sentence
    assert summary.why_nothing_was_found([one, one]) == sentence


def test_a_few_slow_steps_are_enough_to_judge() -> None:
    """A dozen of 10 s are a window of a minute."""
    slow, slower = went(steps=16, data_wait=0.08), went(steps=12, data_wait=0.08)
    for one in (slow, slower):
        one.step_ns *= 100
        one.phase_ns = {phase: 100 * ns for phase, ns in one.phase_ns.items()}

    assert summary.why_nothing_was_found([slow]) == "no findings: data wait is 8% of the steps"
    assert summary.why_nothing_was_found([slower]) == "no findings: 12 steps in 120 s are too few to judge"
