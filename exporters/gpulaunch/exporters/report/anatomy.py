"""Section on step time: by rank, and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gpulaunch.exporters.report.document import Block, Chart, Column, Paragraph, Section, Series, Table
from gpulaunch.exporters.report.formatting import amount, moment, percent, seconds, words
from gpulaunch.exporters.report.rank_curves import RankCurves
from gpulaunch.exporters.report.time_axis import (
    chosen,
    clock_of,
    known_range,
    mean,
    over_time,
    slices,
    step_length,
    throughput,
)
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import RunView, Status
from gpulaunch.exporters.view.rank_model import Curve, RankView
from gpulaunch.profiler.channel.layout import PHASES

MOST_ROWS: Final = 128
"""Limit of a table by rank; larger jobs show the slowest ranks."""
_MOST_BARS: Final = 64


def section(view: RunView, curves: RankCurves) -> Section:
    """Return the section."""
    blocks: list[Block] = []
    stepping = [rank for rank in view.ranks if rank.steps]
    ranks = chosen(stepping, MOST_ROWS)
    if not ranks:
        said = "No step was observed." if view.ranks else "No rank has started yet."
        blocks.append(Paragraph(said))
    elif len(ranks) < len(stepping):
        blocks.append(Paragraph(f"{len(ranks)} of {len(stepping)} ranks are shown: the slowest and the fastest."))
    if any(rank.phase_seconds for rank in ranks):
        blocks += [*_shares_now(view, ranks), _shares(ranks)]
    if ranks:
        blocks += [_by_rank(ranks), _times(ranks), *_on_gpu(ranks), *_processor(ranks)]
    if view.ranks:
        blocks.append(_progress(view))
    over_time = _over_time(view, curves)
    return Section(id="steps", title="Step time", blocks=tuple(blocks), parts=tuple(over_time))


def _phases(ranks: list[RankView]) -> list[str]:
    """Return the phases that took any time."""
    return [phase for phase in PHASES if any(rank.phase_seconds.get(phase, 0.0) > 0 for rank in ranks)]


def _shares_now(view: RunView, ranks: list[RankView]) -> list[Chart]:
    """Return the chart of the last seconds of a run that goes on: without bars for a rank that makes no steps."""
    if view.status is not Status.RUNNING or not any(rank.phase_ratios_now for rank in ranks):
        return []
    title = f"Phases of a step by rank, last {seconds(view.recent_seconds)}"
    told = ", ".join(f"{words(phase)} {percent(ratio)}" for phase, ratio in view.phase_ratios_now.items() if ratio)
    shares = {rank.rank: rank.phase_ratios_now for rank in chosen(ranks, _MOST_BARS)}
    phases = [phase for phase in PHASES if any(ratios.get(phase) for ratios in shares.values())]
    return [_bars("phases-now", title, f"All ranks together: {told}.", phases, shares)]


def _shares(ranks: list[RankView]) -> Chart:
    phases = _phases(ranks)
    shown = chosen(ranks, _MOST_BARS)
    totals = {phase: sum(rank.phase_seconds.get(phase, 0.0) for rank in shown) for phase in phases}
    whole = sum(totals.values()) or 1.0
    largest = sorted(phases, key=lambda phase: -totals[phase])[:3]
    told = ", ".join(f"{words(phase)} {percent(totals[phase] / whole)}" for phase in largest)
    shares: dict[int, Mapping[str, float]] = {}
    for rank in shown:
        of = sum(rank.phase_seconds.values()) or 1.0
        shares[rank.rank] = {phase: rank.phase_seconds.get(phase, 0.0) / of for phase in phases}
    summary = f"All ranks together: {told}. The table below has every rank."
    return _bars("phases-by-rank", "Phases of a step by rank, whole run", summary, phases, shares)


def _bars(
    name: str, title: str, summary: str, phases: Sequence[str], shares: Mapping[int, Mapping[str, float]]
) -> Chart:
    """Return a chart with a bar for each rank; `shares`: the ratios of its phases by rank, empty: unknown."""
    return Chart(
        id=name,
        title=title,
        kind="bars",
        unit="%",
        summary=summary,
        labels=tuple(f"rank {rank}" for rank in shares),
        series=tuple(
            Series(
                name=words(phase),
                values=tuple(100 * ratios.get(phase, 0.0) if ratios else None for ratios in shares.values()),
                colour=PHASES.index(phase),
            )
            for phase in phases
        ),
    )


def _by_rank(ranks: list[RankView]) -> Table:
    phases = _phases(ranks)
    return Table(
        caption="Steps, mean step time and share of each phase, by rank",
        columns=(
            Column("Rank"),
            Column("Steps", number=True),
            Column("Step", number=True),
            *(Column(words(phase), number=True) for phase in phases),
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


def _times(ranks: list[RankView]) -> Table:
    phases = _phases(ranks)
    return Table(
        caption="Time in each phase by rank, whole run",
        columns=(Column("Rank"), *(Column(words(phase), number=True) for phase in phases)),
        rows=tuple((str(rank.rank), *(seconds(rank.phase_seconds.get(phase)) for phase in phases)) for rank in ranks),
    )


def _progress(view: RunView) -> Table:
    running = view.status is Status.RUNNING
    when = f"over the last {seconds(view.recent_seconds)}" if running else "over all steps"
    return Table(
        caption=f"Progress by rank; rate and step time {when}",
        columns=(
            Column("Rank"),
            *(Column(title, number=True) for title in ("Steps", "Steps/s", "Step", "Samples", "Last step")),
            Column("Step ends with"),
        ),
        rows=tuple(
            (
                str(rank.rank),
                count(rank.steps),
                amount(rank.steps_per_second_now),
                seconds(rank.step_seconds_now),
                count(rank.samples),
                moment(rank.last_step_s),
                words(rank.step_source or UNKNOWN) if rank.armed else "no probe",
            )
            for rank in chosen(view.ranks, MOST_ROWS)
        ),
    )


def _on_gpu(ranks: list[RankView]) -> list[Block]:
    phases = [phase for phase in PHASES if any(rank.gpu_phase_seconds.get(phase) for rank in ranks)]
    if not phases:
        return []
    return [
        Table(
            caption="Share of each phase on the GPU's clock, for the steps timed there",
            columns=(Column("Rank"), *(Column(words(phase), number=True) for phase in phases)),
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
            caption="CPU time, garbage collection, compilation and collectives by rank",
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


def _over_time(view: RunView, curves: RankCurves) -> list[Section]:
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
                title="Phases of a step over time, mean of all ranks",
                kind="stack",
                unit="ms",
                summary=_course("Step time:", length_ms, " ms", view.steps_per_second),
                times=clock.times,
                time_unit=clock.unit,
                series=tuple(
                    Series(
                        name=words(phase),
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
    if len(view.ranks) > 1:
        blocks += [
            *curves.chart(
                "step-by-rank",
                "Step time by rank",
                "ms",
                lambda rank: rank.step_mean_seconds,
                seconds,
                factor=1000.0,
            ),
            *curves.chart(
                "rate-by-rank",
                "Steps per second by rank",
                "steps/s",
                lambda rank: rank.steps_per_second,
                amount,
            ),
        ]
    rate, name = (
        (view.samples_per_second, "samples")
        if any(value for value in view.samples_per_second)
        else (view.steps_per_second, "steps")
    )
    if rate:
        told = _course(f"{name.capitalize()} per second:", rate, "")
        lines = [Series(name=name, values=rate, colour=0)]
        blocks += over_time(view, "throughput", f"{name.capitalize()} per second", f"{name}/s", told, lines)
    return [Section(id="over-time", title="Over time", blocks=tuple(blocks))] if blocks else []


def _slices(view: RunView) -> Table:
    phases = list(view.phase_ratios)
    return Table(
        caption="Mean step time, rate and share of each phase over time",
        columns=(
            Column("Since the start"),
            Column("Step", number=True),
            Column("Steps/s", number=True),
            Column("Samples/s", number=True),
            *(Column(words(phase), number=True) for phase in phases),
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
        return "Unknown."
    third = max(1, len(curve) // 3)
    first, last = mean(curve[:third], weights[:third]), mean(curve[-third:], weights[-third:])
    said = f"{what} {amount(mean(curve, weights))}{unit} on average, {amount(reach[0])} to {amount(reach[1])}"
    if first and last is not None and abs(last / first - 1) >= 0.1:
        said += f"; {amount(first)}{unit} in the first third of the run, {amount(last)}{unit} in the last"
    return said + "."


def _share(phase_seconds: Mapping[str, float], phase: str) -> str:
    whole = sum(phase_seconds.values())
    return percent(phase_seconds.get(phase, 0.0) / whole) if whole > 0 else UNKNOWN
