"""What is told of cores, threads and cards."""

from __future__ import annotations

from healthy_node import facts, gpu, rank, rules, window

from gpulaunch.profiler.analysis.advisor import advise


def test_more_ranks_than_cores_are_not_told_to_use_fewer_threads_than_one() -> None:
    """The ranks wait for cores, and each computes with one thread already."""
    waits = {"trainer_cpu_s": 100.0, "trainer_runqueue_s": 100.0, "facts": facts(torch_threads=1)}
    assert "omp-oversubscribed" not in rules(window(*(rank(rank=number, **waits) for number in range(64))))
    waits["facts"] = facts(torch_threads=4)
    assert "omp-oversubscribed" in rules(window(*(rank(rank=number, **waits) for number in range(64))))


def test_threads_that_only_exist_oversubscribe_nothing() -> None:
    assert rules(window(rank(facts=facts(torch_threads=64)))) == []
    assert rules(window(rank(facts=facts(torch_threads=64), trainer_cpu_s=1.0, trainer_runqueue_s=2.0))) == []


def test_where_the_kernel_counts_no_run_queue_full_cores_and_pressure_tell() -> None:
    """64 threads on 16 cores: three of four wait."""
    many = rank(facts=facts(torch_threads=64), trainer_cpu_s=150.0, trainer_runqueue_s=None)

    (found,) = advise(window(many, pressure_s={("cpu", "some"): 9.9}))

    assert (found.rule, found.evidence["waiting_ratio"]) == ("omp-oversubscribed", 0.75)
    assert rules(window(many)) == []


def test_a_power_cap_is_no_throttling() -> None:
    assert rules(window(gpus=(gpu(0, throttle_s={"power_cap": 10.0, "sync_boost": 10.0}), gpu(1)))) == []


def test_without_the_gpus_node_there_is_no_mismatch() -> None:
    assert rules(window(rank(cpu_nodes=frozenset({1})), gpus=(gpu(numa_node=None),))) == []
