"""What is told at the end of a run."""

from __future__ import annotations

from gpulaunch.launcher.agent import summary


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

    assert told == "stopped by SIGINT; 0 restarts; files in ./run"
