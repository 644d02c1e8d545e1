"""What is tried, given what the job as it is has shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpulaunch.launcher.tune.candidates import Seen, candidates, more_workers, why_no_workers
from gpulaunch.launcher.tune.search import Measured

SITE = "train.py:7 main"
LOADER = {
    "site": SITE,
    "split": "train",
    "num_workers": 0,
    "prefetch_factor": None,
    "pin_memory": False,
    "persistent_workers": False,
    "in_order": True,
    "kind": "map",
}
WITH_WORKERS = {**LOADER, "num_workers": 2, "prefetch_factor": 2}
STARVED = Seen(
    step_s=0.1, facts={"loaders": [LOADER], "torch_threads": 4}, findings=[], shares={"data_wait": 0.5}, cores=4
)
TOO_FEW: dict[str, Any] = {
    "rule": "dataloader-too-few-workers",
    "file": "train.py",
    "line": 7,
    "seconds_per_step": 0.04,
    "evidence": {"workers_advised": 3.0},
}


def names(seen: Seen) -> list[str]:
    return [change.name for change in candidates(seen)]


def workers(number: int) -> str:
    return f"num_workers={number}"


def test_a_loader_that_keeps_up_is_left_alone() -> None:
    assert names(replace(STARVED, shares={"data_wait": 0.01})) == []


def test_the_advised_number_of_workers_comes_first() -> None:
    seen = replace(STARVED, findings=[TOO_FEW])
    first = candidates(seen)[0]

    assert (first.name, first.predicted_s, first.because) == (workers(3), 0.04, "dataloader-too-few-workers")
    assert first.where == "train.py:7"
    assert names(seen) == [workers(3), workers(2), workers(8)]


def test_no_workers_are_tried_where_that_is_advised() -> None:
    facts = {"loaders": [WITH_WORKERS], "torch_threads": 4}
    too_many = {**TOO_FEW, "rule": "dataloader-too-many-workers", "evidence": {"workers_advised": 0.0}}

    assert names(replace(STARVED, facts=facts, findings=[too_many], epochs=2))[0] == workers(0)


def test_advice_for_another_line_is_not_for_this_one() -> None:
    assert names(replace(STARVED, findings=[{**TOO_FEW, "line": 9}])) == [workers(2), workers(8)]


def test_a_loader_of_an_evaluation_is_left_alone() -> None:
    facts = {"loaders": [{**LOADER, "split": "eval"}, {**LOADER, "split": None}], "torch_threads": 4}
    assert names(replace(STARVED, facts=facts)) == []


def test_an_iterable_dataset_gets_no_first_worker() -> None:
    """Each worker would hand out every sample."""
    assert names(replace(STARVED, facts={"loaders": [{**LOADER, "kind": "iterable"}], "torch_threads": 4})) == []


def test_more_and_fewer_workers_than_now_are_tried_within_what_the_cores_can_use() -> None:
    seen = replace(STARVED, facts={"loaders": [WITH_WORKERS], "torch_threads": 2}, cores=4, ranks=2)
    assert names(seen) == [workers(1), workers(4), "in_order=False", "prefetch_factor=4"]


def test_workers_persist_where_epochs_begin_unless_the_program_tells_the_dataset_the_epoch() -> None:
    assert names(replace(STARVED, epochs=2))[0] == f"{workers(2)}, persistent_workers=True"
    changing = replace(STARVED, facts={"loaders": [{**LOADER, "changes": True}], "torch_threads": 4}, epochs=2)
    assert names(changing)[0] == workers(2)


def test_what_processes_must_not_share_gets_no_first_worker() -> None:
    seen = replace(STARVED, facts={"loaders": [{**LOADER, "holds": "an open File"}], "torch_threads": 4})
    assert names(seen) == []
    assert why_no_workers(seen) == [
        "train.py:7: no workers tried: they would share an open File of the dataset; open it once per worker"
    ]
    assert why_no_workers(STARVED) == []


def test_no_more_workers_are_tried_than_have_used_up_what_they_prepared_when_the_measurement_begins() -> None:
    few = replace(STARVED, most_prepared=9)
    assert names(few) == [workers(2), workers(4)]
    assert names(replace(few, findings=[{**TOO_FEW, "evidence": {"workers_advised": 12.0}}]))[0] == workers(4)


def test_a_loader_that_a_finding_names_counts_whatever_it_is_used_for() -> None:
    """One line may make the loaders of training and of the evaluation."""
    both = {"loaders": [{**LOADER, "split": "eval"}, {**LOADER, "split": "eval", "batch_size": 9}], "torch_threads": 4}
    assert names(replace(STARVED, facts=both, findings=[TOO_FEW])) == [workers(3), workers(2), workers(8)]


def test_persistent_workers_are_tried_where_epochs_begin() -> None:
    seen = replace(STARVED, facts={"loaders": [WITH_WORKERS], "torch_threads": 4}, epochs=3)
    assert names(seen)[0] == "persistent_workers=True", "before other numbers of workers, which persist, too"
    assert "persistent_workers=True" not in names(replace(seen, epochs=0))


def test_batches_out_of_order_come_first_where_an_early_one_blocks_others() -> None:
    seen = replace(STARVED, facts={"loaders": [WITH_WORKERS], "torch_threads": 4})
    blocked = {
        "rule": "dataloader-head-of-line",
        "file": "train.py",
        "line": 7,
        "seconds_per_step": 0.02,
        "evidence": {},
    }

    assert "in_order=False" in names(seen)
    assert names(replace(seen, findings=[blocked]))[0] == "in_order=False"
    assert "in_order=False" not in names(replace(STARVED, facts={"loaders": [LOADER], "torch_threads": 4}))


def test_on_the_cpu_a_rank_gets_a_thread_for_each_of_its_cores() -> None:
    facts = {"loaders": [], "torch_threads": 1, "device": None}
    assert names(replace(STARVED, facts=facts, ranks=2)) == ["num_threads=2"]
    assert names(replace(STARVED, facts={**facts, "device": {"type": "cuda"}}, ranks=2)) == ["cudnn_benchmark=True"]


def test_pinning_is_for_copies_that_take_time() -> None:
    facts = {"loaders": [LOADER], "device": {"type": "cuda"}}
    shares = {"data_wait": 0.0, "h2d": 0.2}
    assert "pin_memory=True" in names(replace(STARVED, facts=facts, shares=shares))
    assert "pin_memory=True" not in names(replace(STARVED, facts=facts, shares={"data_wait": 0.0}))


def test_ddp_is_tried_with_more_than_one_rank() -> None:
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": False, "bucket_cap_bytes": 25 << 20}
    seen = replace(STARVED, facts={"loaders": [], "torch_threads": 2, "ddp": ddp}, ranks=2)

    assert names(seen) == ["gradient_as_bucket_view=True", "bucket_cap_mb=100"]
    assert names(replace(seen, ranks=1, cores=2)) == []


def test_garbage_is_frozen_where_its_collection_takes_time() -> None:
    seen = replace(STARVED, shares={"gc": 0.1})
    assert names(seen) == ["gc.freeze=True"]


def test_what_changes_results_is_tried_if_the_user_allows_it() -> None:
    facts = {"loaders": [], "device": {"type": "cuda"}, "precision": {"matmul": "highest"}}
    seen = replace(STARVED, facts=facts)

    assert "float32_matmul_precision=high" not in names(seen)
    assert "float32_matmul_precision=high" in names(replace(seen, allow_numerics=True))


def test_workers_that_gained_lead_to_more_while_training_waits() -> None:
    (change,) = [each for each in candidates(STARVED) if each.name == workers(2)]

    assert [each.name for each in more_workers(STARVED, change, Measured(step_s=0.08, waits=0.3))] == [workers(4)]
    assert list(more_workers(STARVED, change, Measured(step_s=0.08, waits=0.01))) == []
