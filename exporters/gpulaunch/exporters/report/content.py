"""Assembles the report of a run from its sections; the losses come first."""

from __future__ import annotations

from gpulaunch.exporters.report import anatomy, attempts, losses, machine, memory, traffic
from gpulaunch.exporters.report.document import Document, Facts, Items, Paragraph, Section
from gpulaunch.exporters.report.formatting import amount, moment, percent, seconds
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import RunView, Status


def report_of(view: RunView) -> Document:
    """Return the report of a run. Pure."""
    sections = (
        losses.section(view),
        anatomy.section(view),
        memory.section(view),
        traffic.copies(view),
        traffic.loader(view),
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
        sections=tuple(section for section in sections if section is not None),
        made=f"Made by gpulaunch report at {moment(view.made_s)}. A dash: not known.",
    )


def standing(view: RunView) -> str:
    """Return the outcome of the run in a sentence."""
    length = f" after {seconds(view.elapsed_seconds)}" if view.elapsed_seconds is not None else ""
    how = {
        Status.RUNNING: f"Running{length.replace('after', 'for')}",
        Status.FINISHED: f"Finished{length}",
        Status.FAILED: f"Failed{length}" + (f", exit code {view.exit_code}" if view.exit_code is not None else ""),
        Status.STOPPED: f"Stopped{length}" + (f" by {view.stopped_by}" if view.stopped_by else ""),
        Status.LOST: "Lost: its launcher is gone and has not said how it ended",
        Status.UNKNOWN: "It is not known how it ended",
    }[view.status]
    none = "; no steps yet" if view.status is Status.RUNNING and view.steps == 0 else "; no step was seen"
    steps = f"; {count(view.steps)} step{'' if view.steps == 1 else 's'}" if view.steps else none
    ranks = f" on {count(view.world_size)} rank{'' if view.world_size == 1 else 's'}" if view.world_size else ""
    restarts = sum(view.restarts.values())
    again = f"; {restarts} restart{'' if restarts == 1 else 's'}" if restarts else ""
    most = "at most " if view.goodput_at_most else ""
    known = f"{most}{percent(view.goodput_ratio)}" if view.goodput_ratio is not None else "not known"
    goodput = f"; goodput {known}" if view.goodput_seconds else ""
    stall = view.stall
    why = view.error
    if stall is not None:
        why = f"No progress for {seconds(view.made_s - stall.since_s)}: {stall.what}"
    error = f". {why}" if why else ""
    return f"{how}{steps}{ranks}{again}{goodput}{error}" + ("" if error.endswith(".") else ".")


def _run(view: RunView) -> Section:
    running = view.status is Status.RUNNING
    of_what = f"in the last {seconds(view.recent_seconds)}" if running else "over all steps"
    pairs = (
        ("command", " ".join(view.command)),
        ("run directory", view.run_dir),
        ("run id", view.run_id),
        ("began", moment(view.began_s)),
        ("ended", moment(view.ended_s)),
        ("exit code", UNKNOWN if view.exit_code is None else str(view.exit_code)),
        ("ranks", count(view.world_size)),
        ("nodes", count(view.num_nodes)),
        ("attempts", count(sum(not attempt.earlier for attempt in view.attempts))),
        ("steps", count(view.steps)),
        ("newest checkpoint known of, at step", count(view.checkpoint_step)),
        (f"{of_what}: step", seconds(view.step_seconds_now)),
        (f"{of_what}: samples/s", amount(view.samples_per_second_now)),
    )
    return Section(
        id="run", title="The run", blocks=(Facts("The run", tuple((name, value or UNKNOWN) for name, value in pairs)),)
    )


def _notes(view: RunView) -> Section:
    if not view.notes:
        return Section(id="notes", title="Notes", blocks=(Paragraph("Nothing is missing or damaged."),))
    return Section(id="notes", title="Notes: what is missing or damaged", blocks=(Items(view.notes),))
