"""Report section on step time: by rank, and over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpulaunch.exporters.report.document import Block, Chart, Column, Paragraph, Section, Series, Table
from gpulaunch.exporters.report.formatting import amount, percent, seconds
from gpulaunch.exporters.report.time_axis import chosen, clock_of, known_range, mean, slices, step_length, throughput
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import Curve, RankView, RunView
from gpulaunch.profiler.channel.layout import PHASES

MOST_ROWS: Final = 128
"""Limit of a table by rank; larger jobs show the slowest ranks."""
_MOST_BARS: Final = 64
_MOST_LINES: Final = 8


def section(view: RunView) -> Section:
    """Return the section."""
    ranks = chosen([rank for rank in view.ranks if rank.steps], MOST_ROWS)
    if not ranks:
        text = "No rank made a step that was seen."
        return Section(id="anatomy", title="Where the time of a step went", blocks=(Paragraph(text),))
    blocks: list[Block] = []
    if len(ranks) < len(view.ranks):
        blocks.append(Paragraph(f"Of {len(view.ranks)} ranks, {len(ranks)} are shown: the slowest, and the fastest."))
    if any(rank.phase_seconds for rank in ranks):
        blocks.append(_shares(ranks))
    blocks += [_by_rank(ranks), *_on_gpu(ranks), *_processor(ranks)]
    return Section(
        id="anatomy", title="Where the time of a step went", blocks=tuple(blocks), parts=tuple(_over_time(view))
    )


def _phases(ranks: list[RankView]) -> list[str]:
    """Return the phases that took any time."""
    return [phase for phase in PHASES if any(rank.phase_seconds.get(phase, 0.0) > 0 for rank in ranks)]


def _shares(ranks: list[RankView]) -> Chart:
    phases = _phases(ranks)
    shown = chosen(ranks, _MOST_BARS)
    wholes = [sum(rank.phase_seconds.values()) or 1.0 for rank in shown]
    totals = {phase: sum(rank.phase_seconds.get(phase, 0.0) for rank in shown) for phase in phases}
    whole = sum(totals.values()) or 1.0
    largest = sorted(phases, key=lambda phase: -totals[phase])[:3]
    told = ", ".join(f"{phase.replace('_', ' ')} {percent(totals[phase] / whole)}" for phase in largest)
    return Chart(
        id="phases-by-rank",
        title="Shares of a step by rank",
        kind="bars",
        unit="%",
        summary=f"Of all ranks' steps: {told}. The table below has every rank.",
        labels=tuple(f"rank {rank.rank}" for rank in shown),
        series=tuple(
            Series(
                name=phase.replace("_", " "),
                values=tuple(
                    100 * rank.phase_seconds.get(phase, 0.0) / of for rank, of in zip(shown, wholes, strict=True)
                ),
                colour=PHASES.index(phase),
            )
            for phase in phases
        ),
    )


def _by_rank(ranks: list[RankView]) -> Table:
    phases = _phases(ranks)
    return Table(
        caption="Steps of each rank, mean length, and share of each part",
        columns=(
            Column("Rank"),
            Column("Steps", number=True),
            Column("Step", number=True),
            *(Column(phase.replace("_", " "), number=True) for phase in phases),
        ),
        rows=tuple(
            (
                str(rank.rank),
                count(rank.steps),
                seconds(step_length(rank)),
                *(_share(rank.phase_seconds, phase) for phase in phases),
            )
            for rank in ranks
        ),
    )


def _on_gpu(ranks: list[RankView]) -> list[Block]:
    phases = [phase for phase in PHASES if any(rank.gpu_phase_seconds.get(phase) for rank in ranks)]
    if not phases:
        return []
    return [
        Table(
            caption="On the GPU's clock: share of each part, of the steps that were timed there",
            columns=(Column("Rank"), *(Column(phase.replace("_", " "), number=True) for phase in phases)),
            rows=tuple(
                (str(rank.rank), *(_share(rank.gpu_phase_seconds, phase) for phase in phases)) for rank in ranks
            ),
        )
    ]


def _processor(ranks: list[RankView]) -> list[Block]:
    if not any(rank.cpu_seconds or rank.pauses for rank in ranks):
        return []
    return [
        Table(
            caption="Processor time, and what stopped a rank besides its parts (collectives: those that it called)",
            columns=tuple(
                Column(title, number=number)
                for title, number in (
                    ("Rank", False),
                    ("CPU, trainer", True),
                    ("CPU, workers", True),
                    ("Garbage collections", True),
                    ("GC time", True),
                    ("Compilations", True),
                    ("Compile time", True),
                    ("Collectives", True),
                    ("Time in them", True),
                )
            ),
            rows=tuple(
                (
                    str(rank.rank),
                    seconds(rank.cpu_seconds.get("trainer")),
                    seconds(rank.cpu_seconds.get("workers")),
                    *(
                        (UNKNOWN,) * 6
                        if rank.pauses is None
                        else (
                            count(rank.pauses.gc_collections),
                            seconds(rank.pauses.gc_seconds),
                            count(rank.pauses.compiles),
                            seconds(rank.pauses.compile_seconds),
                            count(rank.pauses.comm_calls),
                            seconds(rank.pauses.comm_blocked_seconds),
                        )
                    ),
                )
                for rank in ranks
            ),
        )
    ]


def _over_time(view: RunView) -> list[Section]:
    """Return the subsections on steps over time."""
    if not view.times_s or not view.step_mean_seconds:
        return []
    clock = clock_of(view)
    blocks: list[Block] = []
    length_ms = tuple(None if value is None else 1000 * value for value in view.step_mean_seconds)
    if view.phase_ratios:
        blocks.append(
            Chart(
                id="phases-over-time",
                title="Parts of a step over time, mean of the ranks",
                kind="stack",
                unit="ms",
                summary=_course("A step takes", length_ms, " ms", view.steps_per_second),
                times=clock.times,
                time_unit=clock.unit,
                series=tuple(
                    Series(
                        name=phase.replace("_", " "),
                        values=tuple(
                            None if share is None or length is None else share * length
                            for share, length in zip(curve, length_ms, strict=True)
                        ),
                        colour=PHASES.index(phase) if phase in PHASES else 11,
                    )
                    for phase, curve in view.phase_ratios.items()
                ),
                table=_slices(view),
            )
        )
    with_curves = [rank for rank in view.ranks if rank.step_mean_seconds]
    if len(with_curves) > 1:
        shown = chosen(with_curves, _MOST_LINES)
        blocks.append(
            Chart(
                id="step-by-rank",
                title="Length of a step by rank over time",
                kind="lines",
                unit="ms",
                summary=f"{len(shown)} of {len(with_curves)} ranks: the slowest and the fastest. "
                "The table of ranks above has the mean of each."
                if len(shown) < len(with_curves)
                else "The table of ranks above has the mean of each.",
                times=clock.times,
                time_unit=clock.unit,
                series=tuple(
                    Series(
                        name=f"rank {rank.rank}",
                        values=tuple(None if value is None else 1000 * value for value in rank.step_mean_seconds),
                        colour=index,
                    )
                    for index, rank in enumerate(shown)
                ),
            )
        )
    rate, name = (
        (view.samples_per_second, "samples")
        if any(value for value in view.samples_per_second)
        else (view.steps_per_second, "steps")
    )
    if rate:
        blocks.append(
            Chart(
                id="throughput",
                title=f"{name.capitalize()} a second over time",
                kind="lines",
                unit=f"{name}/s",
                summary=_course(f"{name.capitalize()} a second:", rate, ""),
                times=clock.times,
                time_unit=clock.unit,
                series=(Series(name=name, values=rate, colour=0),),
            )
        )
    return [Section(id="over-time", title="Over time", blocks=tuple(blocks))] if blocks else []


def _slices(view: RunView) -> Table:
    phases = list(view.phase_ratios)
    return Table(
        caption="The run in stretches: mean length of a step, rate, and share of each part",
        columns=(
            Column("Since the beginning"),
            Column("Step", number=True),
            Column("Steps/s", number=True),
            Column("Samples/s", number=True),
            *(Column(phase.replace("_", " "), number=True) for phase in phases),
        ),
        rows=tuple(
            (
                name,
                seconds(mean(view.step_mean_seconds[part], view.steps_per_second[part])),
                amount(throughput(view.steps_per_second[part])),
                amount(throughput(view.samples_per_second[part])),
                *(percent(mean(view.phase_ratios[phase][part])) for phase in phases),
            )
            for name, part in slices(view)
        ),
    )


def _course(what: str, curve: Curve, unit: str, weights: Curve = ()) -> str:
    """Describe a curve in a sentence."""
    reach = known_range(curve)
    if reach is None:
        return "Nothing is known."
    third = max(1, len(curve) // 3)
    first, last = mean(curve[:third], weights[:third]), mean(curve[-third:], weights[-third:])
    said = f"{what} {amount(mean(curve, weights))}{unit} on average, {amount(reach[0])} to {amount(reach[1])}"
    if first and last is not None and abs(last / first - 1) >= 0.1:
        said += f"; {amount(first)}{unit} in the first third of the time, {amount(last)}{unit} in the last"
    return said + "."


def _share(phase_seconds: Mapping[str, float], phase: str) -> str:
    whole = sum(phase_seconds.values())
    return percent(phase_seconds.get(phase, 0.0) / whole) if whole > 0 else UNKNOWN
