"""What benchmarks/insight.py prints of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _measure import markdown

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    """One line for each program."""

    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    head = ["program", "expected", "first finding", "", "line", "ms a step, cured", "predicted", "saved", "ratio"]
    lines = [[*head, "after the cure", "others"]]
    for row in rows:
        first = " ".join(filter(None, (row["first"], row["first_place"])))
        line = {None: "", True: "right", False: "wrong"}[row["line_right"]]
        pace = ", ".join(filter(None, (ms(row["sick_ms"]), ms(row["cured_ms"]))))
        figures = [ms(row["predicted_ms"]), ms(row["measured_ms"]), f"{row['ratio']:.2f}" if row["ratio"] else ""]
        lines.append([row["program"], row["expected"] or "nothing", first, row["verdict"], line, pace, *figures])
        lines[-1] += [" ".join(row["after_the_cure"]), f"{row['others']:.0%}"]
    return markdown(lines)


def summary(of: Mapping[str, Any]) -> str:
    error = "" if of["median_error"] is None else f"; median error {of['median_error']:.0%}"
    return (
        f"sick: right first {of['right_first']} of {of['sick']}, present {of['present']}, missed {of['missed']}"
        f" (another cause was named in {of['misled']}); right line {of['lines_right']} of {of['lines']}\n"
        f"healthy: false {of['false']} of {of['healthy']}; found in cured ones: {of['found_after_the_cure']}\n"
        f"predictions: {of['predictions']}; within 20 %: {of['within_20_percent']},"
        f" within 30 %: {of['within_30_percent']}{error}; savings that were measured twice: {of['measured_twice']},"
        f" repeated within 20 %: {of['repeated_within_20_percent']}"
        + (f"\nfailed: {of['failed']}" if of["failed"] else "")
    )


def tune_table(rows: Sequence[Row]) -> str:
    lines = [["program", "tune recommends", "its gain", "the cure's gain"]]
    for row in rows:
        if (said := row.get("tune")) is None:
            continue
        cure = f"{row['sick_ms'] / row['cured_ms'] - 1:+.0%}" if row["sick_ms"] and row["cured_ms"] else ""
        gain = f"{said['gain']:+.0%}" if "gain" in said else "failed"
        lines.append([row["program"], said.get("best") or "nothing", gain, cure])
    return markdown(lines)
