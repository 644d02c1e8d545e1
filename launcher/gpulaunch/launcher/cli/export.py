"""`gpulaunch export`: all measurements of a run over time, as a file for other programs."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gpulaunch.launcher.cli.answer import answer, discard_unwritten
from gpulaunch.launcher.cli.verb_parser import VerbParser, time_s, wants_help
from gpulaunch.launcher.cli.waiting import PATIENCE_S, Activity, show_activity
from gpulaunch.launcher.failure.redact import inert
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.loop.files import shown
from gpulaunch.launcher.runs.find import find_run, here
from gpulaunch.launcher.runs.processes import RunError

if TYPE_CHECKING:
    from gpulaunch.exporters.files.rows import Row

_HELP = """\
usage: gpulaunch export [RUN] --out FILE [--format jsonl|parquet] [--every TIME]

Writes all measurements of an active or finished run to FILE, which is replaced if it exists: every metric over time,
events, findings, first causes of failures. RUN is a run directory, or the name of one below ./gpulaunch-runs (default:
the newest there).

  --format jsonl        one JSON object per line (default); FILE may be `-` for stdout
  --format parquet      a table for pandas, Polars, DuckDB; needs pip install 'gpulaunch[parquet]'
  --every TIME          minimum interval of samples, such as 60s (default: as stored: 1 s for the last 10 minutes,
                        10 s for 2 hours, 1 minute for 2 days, 10 minutes for older data)

Exit code 0 if data was written, 1 if there was none, 2 for a usage error.
"""
T = TypeVar("T")


def run(argv: Sequence[str]) -> int:
    """Export the run that the arguments name, and return the exit code."""
    if wants_help(argv):
        answer(_HELP)
        return 0
    options = _parse(argv)
    try:
        run_dir = find_run(options.run[0] if options.run else None, here())
    except RunError as err:
        raise UsageError(f"export: {err}") from None

    from gpulaunch.exporters.files.parquet import PyarrowMissingError
    from gpulaunch.exporters.files.rows import rows_of

    notes: list[str] = []
    extent = Extent(Path(run_dir), every_s=options.every)
    to_stdout = options.out == "-"
    try:
        # Rows that scroll on a terminal are progress enough.
        seen_s = threading.TIMEOUT_MAX if to_stdout and sys.stdout.isatty() else PATIENCE_S
        with show_activity("reading the run", patience_s=seen_s) as doing:
            rows = counted(rows_of(Path(run_dir), step_s=options.every, notes=notes), doing, share_of=extent.share_of)
            count = _to_stdout(rows) if to_stdout else _to_file(rows, options.out, options.format)
    except PyarrowMissingError as err:
        raise UsageError(
            f"export: --format parquet needs pyarrow ({err}): pip install 'gpulaunch[parquet]'; or use --format jsonl"
        ) from None
    except OSError as err:
        raise UsageError(f"export: cannot write {options.out}: {err.strerror}; specify a file with --out") from None
    for note in notes:
        print(inert(f"gpulaunch export: {note}"), file=sys.stderr)
    if options.out != "-":
        answer(f"{count:,} rows in {shown(options.out)}\n" if count else f"nothing to export in {shown(run_dir)}\n")
    return 0 if count else 1


class Extent:
    """The position of a row among all rows of its run: approximate, since they are not counted in advance."""

    def __init__(self, run_dir: Path, *, every_s: float) -> None:
        self._run_dir = run_dir
        self._every_s = every_s
        self._spans: dict[int, tuple[float, float]] | None = None

    def share_of(self, row: Row) -> float | None:
        """The share of all rows written up to this one; None: it is of a kind that few rows are of."""
        if row.kind != "sample":
            return None
        if self._spans is None:  # most exports have too few rows to need it
            self._spans = self._read()
        if row.node not in self._spans:
            return None
        begin_s, end_s = self._spans[row.node]
        older = 1.0 - _num_looks(end_s - row.at_s, self._every_s) / _num_looks(end_s - begin_s, self._every_s)
        return (list(self._spans).index(row.node) + older) / len(self._spans)

    def _read(self) -> dict[int, tuple[float, float]]:
        """The beginning and end of each node's data, in the order of the rows."""
        from gpulaunch.exporters.store.locations import files_of
        from gpulaunch.exporters.store.reading import TelemetryReader, UnreadableError

        spans: dict[int, tuple[float, float]] = {}
        for node, path in files_of(self._run_dir):
            with contextlib.suppress(UnreadableError), TelemetryReader(path) as reader:
                span = reader.span()
                if span is not None and span[0] < span[1]:
                    spans[node] = span
        return spans


def _num_looks(age_s: float, every_s: float) -> float:
    """About how many samples of one quantity are no older than `age_s`: newer ones are finer."""
    from gpulaunch.exporters.store.limits import LEVELS

    fitting_s = max(level.length_s for level in LEVELS if level.length_s <= max(every_s, 1.0))
    number = begin_s = 0.0
    for level in LEVELS:
        end_s = age_s if level.age_s is None else min(age_s, level.age_s)
        number += max(0.0, end_s - begin_s) / max(level.length_s, fitting_s, 1.0)
        begin_s = max(begin_s, end_s)
    return number


def counted(
    rows: Iterable[T], doing: Activity, *, share_of: Callable[[T], float | None] = lambda _: None
) -> Iterator[T]:
    """Yield the rows, and let `doing` show how many there were, and their share."""
    for number, row in enumerate(rows, 1):
        yield row
        if not number % 1000:
            doing(f"{number:,} rows", share_of(row))


def _to_file(rows: Iterator[Row], out: str, kind: str) -> int:
    """Write them atomically; without a row nothing is written. Raises OSError."""
    from gpulaunch.exporters.files.jsonl import write_jsonl
    from gpulaunch.exporters.files.parquet import write_parquet
    from gpulaunch.profiler.files import replacing

    if os.path.exists(out) and not os.path.isfile(out):  # /dev/null must not be replaced
        raise OSError(errno.EINVAL, "it exists and is not a file")
    first = next(rows, None)
    if first is None:
        return 0
    rows = itertools.chain([first], rows)
    with replacing(out, suffix=f".{os.getpid()}.part") as file:
        if kind == "parquet":
            return write_parquet(rows, file)
        with io.TextIOWrapper(file, encoding="utf-8") as text:
            return write_jsonl(rows, text)


def _to_stdout(rows: Iterable[Row]) -> int:
    from gpulaunch.exporters.files.jsonl import write_jsonl

    try:
        count = write_jsonl(rows, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        discard_unwritten()
        return 1
    except OSError:
        discard_unwritten()
        raise
    return count


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    parser = VerbParser("export")
    parser.add_argument("run", nargs="*")
    parser.add_argument("--out", required=True)
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--every", type=time_s, default=0.0)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = words()
    given = parser.read(argv)
    parser.one_run(given.run)
    if given.out == "-" and given.format == "parquet":
        raise UsageError("export: --format parquet needs a file: specify it with --out")
    return given
