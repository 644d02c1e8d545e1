"""Every rule finds its fault, alone, and is silent when it is repaired; and on a node that is well, all are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from healthy_node import rank, window
from rule_cases import CASES, Case

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.finding import ESTIMATED
from gpulaunch.profiler.analysis.rule_examples import EXAMPLES
from gpulaunch.profiler.analysis.rules import RULES, markdown

IDS = (
    *("dataloader-too-few-workers", "dataloader-too-many-workers", "dataloader-slow-storage"),
    *("dataloader-slow-transform", "dataloader-head-of-line", "unpinned-copies", "blocking-copies", "sync-every-step"),
    *("tensor-built-on-cpu", "dataparallel", "fp32-on-tensor-cores", "host-memory-growth", "gpu-memory-growth"),
    *("gpu-memory-fragmented", "shm-nearly-full", "straggler", "checkpoint-stall", "logging-stall", "hot-line"),
    *("frequent-validation", "dataloader-workers-restarted", "float64-parameters", "small-collectives"),
    *("reduced-in-accumulation", "unused-parameters-searched", "dataloader-pinned-workers", "dataloader-lock"),
    *("padded-batches", "gradients-unused", "targets-ignored", "embedding-gradient-dense", "backward-repeated"),
    *("dataloader-lists", "dataloader-one-rank", "fsdp-small-units", "gradients-cleared"),
    *("gil-contention", "dataloader-samples-dropped", "redundant-all-reduce"),
    *("small-operations-loop", "omp-oversubscribed", "gc-pauses", "recompiles", "throttled", "numa-mismatch"),
)
PAGE = Path(__file__).parents[2] / "docs" / "findings.md"


def test_the_ids_of_the_rules_do_not_change() -> None:
    """People write them into alerts and scripts; a new one is added here, none is renamed."""
    assert sorted(rule.id for rule in RULES) == sorted(IDS)


def test_nothing_is_found_on_a_node_that_is_well() -> None:
    four = tuple(rank(number) for number in range(4))

    assert advise(window()) == advise(window(*four)) == ()


@pytest.mark.parametrize("rule", IDS)
def test_the_example_of_the_page_prints_what_the_rule_says(rule: str) -> None:
    found = {each.advice for each in advise(CASES[rule].fault) if each.rule == rule}

    assert EXAMPLES[rule].prints in found
    assert len(EXAMPLES[rule].program.splitlines()) <= 7
    assert EXAMPLES[rule].cure not in EXAMPLES[rule].program


@pytest.mark.parametrize("rule", IDS)
def test_the_fault_is_found_and_nothing_else(rule: str) -> None:
    case = CASES[rule]

    (found,) = advise(case.fault)

    assert found.rule == rule
    assert (found.file, found.line, found.subject) == (case.file, case.line, case.subject)
    if case.saves_ms is None:
        assert found.seconds_per_step == found.seconds_per_hour == 0.0
    else:
        step_s = next(each for each in case.fault.ranks if each.rank in found.ranks).step_s
        assert 1e3 * found.seconds_per_step == pytest.approx(case.saves_ms, rel=0.01)
        assert found.seconds_per_hour == pytest.approx(3600 * found.seconds_per_step / step_s)
    assert 0.0 < found.confidence < 1.0
    assert found.advice.endswith(".")
    assert found.evidence
    json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.parametrize("rule", IDS)
@pytest.mark.parametrize("gpus", [True, False], ids=["gpus", "no-gpus"])
def test_a_trace_is_advised_where_the_loss_is_a_bound(rule: str, gpus: bool) -> None:
    """Without the GPU's own account copies and waits are bounds, too."""
    fault = CASES[rule].fault
    found = advise(fault if gpus else replace(fault, gpus=()))

    assert found or not gpus
    for each in found:
        is_bound = each.confidence == ESTIMATED and each.seconds_per_step > 0
        assert each.advice.endswith("gpulaunch trace --steps 5 --rank 0.") == is_bound
        assert each.advice.count("gpulaunch trace") == is_bound


@pytest.mark.parametrize("rule", IDS)
def test_the_repaired_node_is_silent(rule: str) -> None:
    assert advise(CASES[rule].repaired) == ()


@pytest.mark.parametrize("rule", IDS)
def test_nothing_is_found_where_no_rank_made_enough_steps(rule: str) -> None:
    assert advise(replace(CASES[rule].fault, ranks=())) == ()


@pytest.mark.parametrize("rule", [rule.id for rule in RULES if "rank" not in CASES[rule.id].subject])
def test_the_same_fault_on_all_ranks_is_one_finding(rule: str) -> None:
    fault = CASES[rule].fault
    first = fault.ranks[0]
    alike = replace(
        fault, ranks=(first, *(replace(first, rank=number) for number in (1, 2))), cores=(fault.cores or 0) * 3
    )

    assert [(found.rule, found.ranks) for found in advise(alike) if found.rule == rule] == [(rule, (0, 1, 2))]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_rule_fails_on_ranks_that_have_said_nothing(case: Case) -> None:
    """No facts, no loader, no samples, no host: what the sidecar has before the first of them arrives."""
    silent = tuple(replace(each, facts={}, loader=None, gpu=None, memory=(), sites=()) for each in case.fault.ranks)

    advise(replace(case.fault, ranks=silent, host=None, cores=None, pressure_s={}, gpus=()))


def test_the_page_of_the_rules_is_as_the_rules_are() -> None:
    assert PAGE.read_text() == markdown(), "python -m gpulaunch.profiler.analysis.rules > docs/findings.md"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_has_its_page(rule) -> None:
    page = markdown()

    assert f"\n## {rule.id}\n" in page
    assert all(words in page for words in (rule.problem, rule.evidence, rule.costs, rule.fix))


def test_padding_that_the_program_cuts_off_is_not_told() -> None:
    """The longest sequence that an embedding has looked up; 0: none has."""
    (padded,) = CASES["padded-batches"].fault.ranks

    for tokens, told in ((512, True), (0, True), (144, False)):
        cut = replace(padded, facts={**padded.facts, "graph": {"tokens": tokens}})
        assert ("padded-batches" in {each.rule for each in advise(window(cut))}) is told
