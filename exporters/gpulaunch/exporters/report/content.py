"""Assembles what is shown of a run from its sections; the losses come first."""

from __future__ import annotations

from gpulaunch.exporters.report import anatomy, attempts, losses, machine, memory, traffic
from gpulaunch.exporters.report.document import Document, Facts, Items, Paragraph, Section
from gpulaunch.exporters.report.formatting import amount, moment, percent, seconds
from gpulaunch.exporters.report.rank_curves import RankCurves
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import RunView, Status


def report_of(view: RunView, *, every_rank: bool = False) -> Document:
    """Return what is shown of a run. Pure.

    Args:
        view: the run.
        every_rank: charts have the curves of every rank, for a reader who can ask for one of many.
    """
    curves = RankCurves(view, every_rank=every_rank)
    sections = (
        losses.section(view),
        anatomy.section(view, curves),
        memory.section(view, curves),
        traffic.copies(view, curves),
        traffic.loader(view, curves),
        machine.gpus(view),
        attempts.failures(view),
        attempts.goodput(view),
        machine.cost(view),
        _run(view),
        _notes(view),
    )
    return Document(
        title=view.name or view.run_id or "run",
        status=view.status.value,
        lead=(standing(view), *losses.headline(view)),
        alarm=bool(view.error) or view.stall is not None,
        figures=_figures(view),
        sections=sections,
        made=f"As of {moment(view.made_s)}. A dash means unknown.",
    )


def _figures(view: RunView) -> tuple[tuple[str, str], ...]:
    """Return what is looked at first; `now` values are of the last seconds, or of all steps of a run that is over."""
    goodput = percent(view.goodput_ratio)
    return (
        ("Steps", count(view.steps)),
        ("Steps/s", amount(view.steps_per_second_now)),
        ("Step", seconds(view.step_seconds_now)),
        ("Samples/s", amount(view.samples_per_second_now)),
        ("Waiting for data", percent(view.phase_ratios_now.get("data_wait"))),
        ("Goodput", f"at most {goodput}" if view.goodput_at_most else goodput),
        ("Ranks", count(view.world_size or len(view.ranks) or None)),
        ("Attempt", UNKNOWN if view.attempt is None else str(view.attempt)),
        ("Restarts", count(sum(view.restarts.values()))),
        ("Active findings", count(sum(finding.active for finding in view.findings))),
        ("Newest checkpoint, step", count(view.checkpoint_step)),
        ("Running for" if view.status is Status.RUNNING else "Took", seconds(view.elapsed_seconds)),
    )


def standing(view: RunView) -> str:
    """Return the outcome of the run in a sentence."""
    length = f" after {seconds(view.elapsed_seconds)}" if view.elapsed_seconds is not None else ""
    how = {
        Status.RUNNING: f"Running{length.replace('after', 'for')}",
        Status.FINISHED: f"Finished{length}",
        Status.FAILED: f"Failed{length}" + (f", exit code {view.exit_code}" if view.exit_code is not None else ""),
        Status.STOPPED: f"Stopped{length}" + (f" by {view.stopped_by}" if view.stopped_by else ""),
        Status.LOST: "Lost: the launcher is gone and did not record how the run ended",
        Status.UNKNOWN: "It is unknown how the run ended",
    }[view.status]
    none = "; no steps yet" if view.status is Status.RUNNING and view.steps == 0 else "; no step was observed"
    steps = f"; {count(view.steps)} step{'' if view.steps == 1 else 's'}" if view.steps else none
    ranks = f" on {count(view.world_size)} rank{'' if view.world_size == 1 else 's'}" if view.world_size else ""
    restarts = sum(view.restarts.values())
    again = f"; {restarts} restart{'' if restarts == 1 else 's'}" if restarts else ""
    most = "at most " if view.goodput_at_most else ""
    known = f"{most}{percent(view.goodput_ratio)}" if view.goodput_ratio is not None else "unknown"
    goodput = f"; goodput {known}" if view.goodput_seconds else ""
    stall = view.stall
    why = view.error
    if stall is not None:
        why = f"No progress for {seconds(view.made_s - stall.since_s)}: {stall.what}"
    error = f". {why}" if why else ""
    return f"{how}{steps}{ranks}{again}{goodput}{error}" + ("" if error.endswith(".") else ".")


def _run(view: RunView) -> Section:
    running = view.status is Status.RUNNING
    of_what = f"over the last {seconds(view.recent_seconds)}" if running else "over all steps"
    pairs = (
        ("command", " ".join(view.command)),
        ("run directory", view.run_dir),
        ("run id", view.run_id),
        ("phase", view.phase),
        ("started", moment(view.began_s)),
        ("ended", moment(view.ended_s)),
        ("exit code", UNKNOWN if view.exit_code is None else str(view.exit_code)),
        ("ranks", count(view.world_size)),
        ("nodes", count(view.num_nodes)),
        ("attempts", count(sum(not attempt.earlier for attempt in view.attempts))),
        ("steps", count(view.steps)),
        ("step of the newest known checkpoint", count(view.checkpoint_step)),
        (f"step time {of_what}", seconds(view.step_seconds_now)),
        (f"samples/s {of_what}", amount(view.samples_per_second_now)),
    )
    return Section(
        id="run",
        title="Run details",
        blocks=(Facts("Run details", tuple((name, value or UNKNOWN) for name, value in pairs)),),
    )


def _notes(view: RunView) -> Section:
    if not view.notes:
        return Section(id="notes", title="Notes", blocks=(Paragraph("No data is missing or damaged."),))
    return Section(id="notes", title="Notes: missing or damaged data", blocks=(Items(view.notes),))
