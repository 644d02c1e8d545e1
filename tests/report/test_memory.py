"""The section on memory, and what a comparison has of it: whoever says "at most" has looked at more than means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kept_run import MIB
from reported import a_run

from gpulaunch.exporters.report import memory
from gpulaunch.exporters.report.compare import compare
from gpulaunch.exporters.report.document import Block, Chart, Table
from gpulaunch.exporters.report.rank_curves import RankCurves
from gpulaunch.exporters.view.model import RunView


def with_most(view: RunView, **most_mib: int) -> RunView:
    """A run whose ranks had so much at a moment that no mean has."""
    most = {name: size * MIB for name, size in most_mib.items()}
    return replace(view, ranks=tuple(replace(rank, most_bytes=most) for rank in view.ranks))


def blocks_of(view: RunView) -> tuple[Block, ...]:
    return memory.section(view, RankCurves(view)).blocks


def test_at_most_is_the_most_at_any_moment(tmp_path: Path) -> None:
    view = with_most(a_run(tmp_path / "run"), trainer=2000, allocated=90)

    charts = {block.id: block.summary for block in blocks_of(view) if isinstance(block, Chart)}

    assert charts["host-memory"].startswith(
        "Rank 0: 300 MiB at the start, 300 MiB at the end, 1.95 GiB at most. Rank 1:"
    )
    assert charts["gpu-memory"].startswith("Rank 0: 1 MiB at the start, 1 MiB at the end, 90 MiB at most. Rank 1:")


def test_where_only_means_are_known_nothing_is_said_to_be_the_most(tmp_path: Path) -> None:
    view = with_most(a_run(tmp_path / "run"))

    charts = [block.summary for block in blocks_of(view) if isinstance(block, Chart)]

    assert charts[0].startswith("Rank 0: 300 MiB at the start, 300 MiB at the end. Rank 1:")


def test_the_peaks_of_a_gpu_are_those_of_all_attempts(tmp_path: Path) -> None:
    """torch's allocator tells only those of the newest."""
    view = with_most(a_run(tmp_path / "run"), allocated=90, reserved=120)

    (on_gpu,) = [block for block in blocks_of(view) if isinstance(block, Table) and "allocator" in block.caption]

    assert on_gpu.rows[0][1:5] == ("1 MiB", "2 MiB", "90 MiB", "120 MiB")


def test_a_comparison_has_the_most_of_a_rank(tmp_path: Path) -> None:
    view = a_run(tmp_path / "run")
    found = compare(view, with_most(view, trainer=2000, workers=700, allocated=90))

    of_b = {change.name: change.b for change in found.changes if "memory" in change.name}

    assert of_b == {
        "trainer memory, most of a rank": 2000 * MIB,
        "worker memory, most of a rank": 700 * MIB,
        "GPU memory, peak of a rank": 90 * MIB,
    }
