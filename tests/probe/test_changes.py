"""What a trial of `gpulaunch tune` asks for, and that the program gets that and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.profiler.channel import segment_writer, workers
from gpulaunch.profiler.probe.asked import loader_arguments, parsed

PROGRAMS = Path(__file__).with_name("changing.py")
GIVEN = {
    "num_workers": 2,
    "prefetch_factor": 4,
    "persistent_workers": True,
    "pin_memory": False,
    "multiprocessing_context": "fork",
    "timeout": 9,
    "in_order": True,
}
WITHOUT = GIVEN | {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
    "timeout": 0,
}

# --- what is asked for --------------------------------------------------------------------------------------------


def test_everything_may_be_asked_for() -> None:
    whole = {
        "loaders": {
            "train.py:41": {
                "num_workers": 8,
                "persistent_workers": True,
                "prefetch_factor": 4,
                "pin_memory": True,
                "in_order": False,
                "multiprocessing_context": "forkserver",
            }
        },
        "ddp": {
            "find_unused_parameters": False,
            "static_graph": True,
            "bucket_cap_mb": 50,
            "gradient_as_bucket_view": True,
        },
        "torch": {"num_threads": 2, "cudnn_benchmark": True, "float32_matmul_precision": "high"},
        "gc_freeze": True,
    }
    asked = parsed(json.dumps(whole))

    assert asked.refused == {}
    assert {
        "loaders": asked.loaders,
        "ddp": asked.ddp,
        "torch": asked.torch,
        "gc_freeze": asked.gc_freeze,
    } == whole


@pytest.mark.parametrize("where", ["my train.py:41 main", "my train.py:41"])
def test_a_line_may_be_named_with_its_function_or_without(where: str) -> None:
    asked = parsed(json.dumps({"loaders": {where: {"num_workers": 8}}}))

    assert asked.at("my train.py:41 main") == (where, {"num_workers": 8})
    assert asked.at("my train.py:4 main") is None


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("{", {"GPULAUNCH_TUNE": "not JSON: Expecting property name enclosed in double quotes"}),
        ("[" * 4000, {"GPULAUNCH_TUNE": "not JSON: "}),
        (" " * 5000, {"GPULAUNCH_TUNE": "longer than 4096 characters"}),
        ("[]", {"GPULAUNCH_TUNE": "not an object"}),
        ('{"lader": {}, "gc_freeze": 1}', {"lader": "unknown", "gc_freeze": "not a bool"}),
        ('{"loaders": {"a.py:1": 8}, "ddp": []}', {"a.py:1": "not an object", "ddp": "not an object"}),
        ('{"loaders": {"a.py:1": {"workers": 8}}}', {"a.py:1 workers": "unknown"}),
        ('{"loaders": {"a.py:1": {"num_workers": "8"}}}', {"a.py:1 num_workers": "str, not int"}),
        ('{"ddp": {"static_graph": 1}}', {"ddp static_graph": "int, not bool"}),
        ('{"torch": {"num_threads": true, "deterministic": true}}', {"torch num_threads": "bool", "torch deter": ""}),
    ],
)
def test_what_is_unknown_is_refused(text: str, refused: dict[str, str]) -> None:
    asked = parsed(text)

    assert not any((asked.ddp, asked.torch, asked.gc_freeze, *asked.loaders.values()))
    assert len(asked.refused) == len(refused)
    for (name, why), (known, because) in zip(asked.refused.items(), refused.items(), strict=True):
        assert name.startswith(known)
        assert why.startswith(because)


def test_what_is_valid_beside_it_is_not() -> None:
    asked = parsed('{"torch": {"num_threads": 2, "more": 1}, "gc_freeze": true}')

    assert (asked.torch, asked.gc_freeze, asked.refused) == ({"num_threads": 2}, True, {"torch more": "unknown"})


NO_WORKERS = "the DataLoader has no workers"
STREAM = "an iterable dataset without workers would return each sample once per worker"


@pytest.mark.parametrize(
    ("asked", "given", "iterable", "new", "refused"),
    [
        ({"num_workers": 8}, GIVEN, False, {"num_workers": 8}, {}),
        ({"pin_memory": True}, WITHOUT, False, {"pin_memory": True}, {}),
        ({"num_workers": 8, "prefetch_factor": 4}, WITHOUT, False, {"num_workers": 8, "prefetch_factor": 4}, {}),
        ({"num_workers": 0}, GIVEN, False, {**WITHOUT, "pin_memory": ..., "in_order": ...}, {}),
        ({"num_workers": 0}, WITHOUT, False, {"num_workers": 0}, {}),
        ({"num_workers": 0, "prefetch_factor": 2}, WITHOUT, False, {"num_workers": 0}, {"prefetch_factor": NO_WORKERS}),
        ({"in_order": False}, WITHOUT, False, {}, {"in_order": NO_WORKERS}),
        ({"persistent_workers": False}, WITHOUT, False, {"persistent_workers": False}, {}),
        ({"num_workers": 2}, WITHOUT, True, {}, {"num_workers": STREAM}),
        (
            {"num_workers": 2, "persistent_workers": True},
            WITHOUT,
            True,
            {},
            {"num_workers": STREAM, "persistent_workers": NO_WORKERS},
        ),
        ({"num_workers": 4}, GIVEN, True, {"num_workers": 4}, {}),
        ({"in_order": False}, {"num_workers": 2}, False, {}, {"in_order": "not an argument in this torch"}),
        # The program's own mistake stays its own.
        ({"pin_memory": True}, WITHOUT | {"prefetch_factor": 2}, False, {"pin_memory": True}, {}),
    ],
)
def test_the_arguments_of_a_loader_fit_together(
    asked: dict[str, Any], given: dict[str, Any], iterable: bool, new: dict[str, Any], refused: dict[str, str]
) -> None:
    expected = {name: value for name, value in new.items() if value is not ...}

    assert loader_arguments(asked, given, iterable=iterable) == (expected, refused)


# --- real programs ------------------------------------------------------------------------------------------------

Run = Callable[..., tuple[dict[str, Any], dict[str, Any]]]


def site(words: str) -> str:
    """The line of the programs that has these words behind it."""
    lines = PROGRAMS.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {words}")]
    return f"{str(PROGRAMS).removeprefix(os.getcwd() + os.sep)}:{number}"


def outside_a_run() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=outside_a_run(),
    )
    yield process
    process.communicate(timeout=60)


@pytest.fixture
def run(nursery: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Run a program of `changing` to its end, changed if `tune` is given; what it tells, and its facts."""

    def run_program(program: str, tune: object = None) -> tuple[dict[str, Any], dict[str, Any]]:
        segment_writer.create(str(tmp_path / "rank-3.bin"), rank=3, local_rank=1, attempt=0)
        workers.create(str(tmp_path / "workers-3.bin"))
        extra = f"GPULAUNCH_TUNE={json.dumps(tune, separators=(',', ':'))}" if tune is not None else ""
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(f"{program}\t{tmp_path}\t{extra}\n")
        nursery.stdin.flush()
        code = nursery.stdout.readline().strip()
        assert code == "0", (tmp_path / "out").read_text()
        return json.loads((tmp_path / "told.json").read_text()), json.loads((tmp_path / "facts-3.json").read_text())

    return run_program


@pytest.mark.torch
def test_without_the_variable_nothing_is_changed(run: Run) -> None:
    told, facts = run("loaders")

    assert "changes" not in facts
    assert [told[how]["num_workers"] for how in ("by keyword", "by position", "in a subclass", "of a stream")] == [
        *(1, 1, 1),
        0,
    ]
    assert told["errors"][2] == ""


@pytest.mark.torch
def test_a_loader_is_changed_where_it_is_constructed(run: Run) -> None:
    keyword, position, subclass, stream, child = map(
        site, ("by keyword", "by position", "in a subclass", "of a stream", "by keyword, in a child")
    )
    failing, misspelt = site("refused by torch"), site("misspelt")
    unchanged, _ = run("loaders")
    told, facts = run(
        "loaders",
        {
            "loaders": {
                keyword: {"num_workers": 0, "pin_memory": False},
                position: {"num_workers": 3, "persistent_workers": True, "multiprocessing_context": "forkserver"},
                subclass: {"num_workers": 2, "in_order": False},
                stream: {"num_workers": 2},
                child: {"num_workers": 4},
                failing: {"num_workers": -1},
                misspelt: {"num_workers": 2},
                "elsewhere.py:1": {"num_workers": 2},
            }
        },
    )

    assert told["by keyword"] == unchanged["by keyword"] | {"num_workers": 0, "prefetch_factor": None, "timeout": 0}
    assert told["by position"] == unchanged["by position"] | {
        "num_workers": 3,
        "persistent_workers": True,
        "multiprocessing_context": "forkserver",
    }
    assert told["in a subclass"] == unchanged["in a subclass"] | {"num_workers": 2, "in_order": False}
    assert (told["of a stream"], told["samples of the stream"]) == (unchanged["of a stream"], 96)
    assert told["errors"][:2] == unchanged["errors"][:2], "the program's own mistakes"
    assert "num_workers option should be non-negative" in told["errors"][2], "that is what came of the trial"
    assert told["in a child"] == 1

    assert facts["changes"]["applied"] == {
        f"{keyword} num_workers": [1, 0],
        f"{keyword} prefetch_factor": [4, None],
        f"{keyword} timeout": [9, 0],
        f"{keyword} pin_memory": [False, False],
        f"{position} num_workers": [1, 3],
        f"{position} persistent_workers": [False, True],
        f"{position} multiprocessing_context": [None, "forkserver"],
        f"{subclass} num_workers": [1, 2],
        f"{subclass} in_order": [True, False],
    }
    refused = facts["changes"]["refused"]
    assert refused.keys() == {f"{stream} num_workers", f"{failing} num_workers"}
    assert refused[f"{stream} num_workers"] == STREAM
    assert "the constructor raised ValueError" in refused[f"{failing} num_workers"]

    sites = {loader["site"].rpartition(" ")[0]: loader for loader in facts["loaders"]}
    assert [sites[where]["num_workers"] for where in (keyword, position, subclass, stream)] == [0, 3, 2, 0]
    assert (sites[keyword]["split"], sites[position]["start_method"]) == ("train", "forkserver")


@pytest.mark.torch
def test_a_loader_that_a_package_rebuilds_is_changed_like_the_programs_own(run: Run) -> None:
    own, noted = site("its own"), site("noted")
    before, _ = run("rebuilt")
    told, facts = run("rebuilt", {"loaders": {own: {"num_workers": 2}, noted: {"num_workers": 3}}})

    assert [loader["num_workers"] for loader in before["rebuilt"]] == [0, 1]
    assert [loader["num_workers"] for loader in told["rebuilt"]] == [2, 3]
    assert facts["changes"] == {
        "applied": {f"{own} num_workers": [0, 2], f"{noted} num_workers": [1, 3]},
        "refused": {},
    }
    assert [loader["num_workers"] for loader in facts["loaders"] if loader["site"].startswith(f"{own} ")] == [2, 2]


@pytest.mark.torch
def test_ddp_gets_the_arguments_that_are_asked_for(run: Run) -> None:
    asked = {
        "find_unused_parameters": False,
        "static_graph": True,
        "bucket_cap_mb": 50,
        "gradient_as_bucket_view": True,
    }
    before, untouched = run("parallel")
    told, facts = run("parallel", {"ddp": asked})

    assert {name: before[name] for name in asked} == {
        "find_unused_parameters": True,
        "static_graph": False,
        "bucket_cap_mb": 25,
        "gradient_as_bucket_view": False,
    }
    assert {name: told[name] for name in asked} == asked
    assert facts["changes"] == {
        "applied": {
            "ddp find_unused_parameters": [True, False],
            "ddp static_graph": [False, True],
            "ddp bucket_cap_mb": [None, 50],
            "ddp gradient_as_bucket_view": [False, True],
        },
        "refused": {},
    }
    assert "changes" not in untouched


@pytest.mark.torch
def test_torch_is_set_once_and_the_program_does_not_change_its_threads_later(run: Run) -> None:
    asked = {"num_threads": 2, "cudnn_benchmark": True, "float32_matmul_precision": "high"}
    told, facts = run("settings", {"torch": asked})
    unset, refusing = run("settings", {"torch": {"num_threads": 0, "float32_matmul_precision": "exact"}})

    assert (told["before"], told["after"], told["child"]) == ([2, True, "high"], 2, 3)
    assert facts["changes"] == {
        "applied": {
            "torch num_threads": [1, 2],
            "torch cudnn_benchmark": [False, True],
            "torch float32_matmul_precision": ["highest", "high"],
        },
        "refused": {},
    }
    assert facts["torch_threads"] == 2
    assert (unset["after"], unset["child"]) == (3, 3)
    assert unset["before"] == [1, False, "highest"]
    assert refusing["changes"]["applied"] == {}
    assert refusing["changes"]["refused"].keys() == {"torch num_threads", "torch float32_matmul_precision"}


@pytest.mark.torch
def test_the_collector_is_frozen_once_when_the_first_step_has_ended(run: Run) -> None:
    before, _ = run("freezes")
    told, facts = run("freezes", {"gc_freeze": True})

    assert before["frozen"] == [0, 0, 0, 0]
    first, second, *rest = told["frozen"]
    assert first == 0
    assert second > 1000
    assert rest == pytest.approx([second] * 2, rel=0.01), "some of it is freed by itself"
    assert facts["changes"]["applied"] == {"gc_freeze": [False, True]}


@pytest.mark.torch
def test_an_unreadable_change_is_refused_and_nothing_else(run: Run) -> None:
    told, facts = run("freezes", ["gc_freeze"])

    assert told["frozen"] == [0, 0, 0, 0]
    assert facts["changes"] == {"applied": {}, "refused": {"GPULAUNCH_TUNE": "not an object"}}


@pytest.mark.torch
def test_a_spawned_rank_is_changed_and_the_programs_that_it_starts_are_not(tmp_path: Path) -> None:
    segment_writer.create(str(tmp_path / "rank-3.bin"), rank=3, local_rank=1, attempt=0)
    workers.create(str(tmp_path / "workers-3.bin"))
    tune = {"loaders": {site("of a script"): {"num_workers": 2}}, "torch": {"num_threads": 3}}
    rank = {"RANK": "3", "GPULAUNCH_CHANNEL_DIR": str(tmp_path), "GPULAUNCH_TUNE": json.dumps(tune)}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS), "started", "again"],
        env=outside_a_run() | rank | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[2, 3], [0, 1]]
