"""Writes and reads rows as a Parquet file, for pandas, Polars, DuckDB. Needs pyarrow: the extra `gpulaunch[parquet]`.

The columns are the fields of `rows.Row`; `labels` and `data` are JSON. The file's metadata has
`gpulaunch_export_version`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from importlib import import_module
from itertools import islice
from typing import Any, BinaryIO, Final

from gpulaunch.exporters.files.jsonl import VERSION
from gpulaunch.exporters.files.rows import Row

_GROUP_ROWS: Final = 100_000
_NAMES: Final = tuple(each.name for each in fields(Row))
_AS_JSON: Final = frozenset(("labels", "data"))
_REPEATED: Final = ["kind", "run_id", "name", "gpu", "labels"]
"""Columns with few distinct values."""


class PyarrowMissingError(Exception):
    """pyarrow is not installed, or does not work here."""


def write_parquet(rows: Iterable[Row], out: BinaryIO) -> int:
    """Write rows; return their number.

    Raises:
        PyarrowMissingError: see there.
        OSError: the file cannot be written.
    """
    arrow, parquet = _pyarrow()
    schema = arrow.schema(
        [
            ("kind", arrow.string()),
            ("at_s", arrow.float64()),
            ("node", arrow.int32()),
            ("name", arrow.string()),
            ("begin_s", arrow.float64()),
            ("run_id", arrow.string()),
            ("attempt", arrow.int32()),
            ("rank", arrow.int32()),
            ("gpu", arrow.string()),
            ("labels", arrow.string()),
            ("value", arrow.float64()),
            ("low", arrow.float64()),
            ("high", arrow.float64()),
            ("data", arrow.string()),
        ],
        metadata={"gpulaunch_export_version": str(VERSION)},
    )
    count = 0
    with parquet.ParquetWriter(out, schema, compression="zstd", use_dictionary=_REPEATED) as writer:
        source = iter(rows)
        while batch := list(islice(source, _GROUP_ROWS)):
            columns = {name: [_cell(name, getattr(row, name)) for row in batch] for name in _NAMES}
            writer.write_table(arrow.table(columns, schema=schema))
            count += len(batch)
    return count


def read_parquet(file: BinaryIO) -> Iterator[Row]:
    """Yield the rows of such a file.

    Raises:
        PyarrowMissingError: see there.
        ValueError: it is not such a file, or of another version.
    """
    _, parquet = _pyarrow()
    opened = parquet.ParquetFile(file)
    version = (opened.schema_arrow.metadata or {}).get(b"gpulaunch_export_version")
    if version != str(VERSION).encode():
        raise ValueError(f"an export of version {version!r}, this gpulaunch knows {VERSION}")
    for batch in opened.iter_batches():
        for told in batch.to_pylist():
            yield Row(**{name: json.loads(cell or "{}") if name in _AS_JSON else cell for name, cell in told.items()})


def _cell(name: str, value: Any) -> Any:
    if name in _AS_JSON:
        return json.dumps(value) if value else None
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise PyarrowMissingError(str(error)) from None
