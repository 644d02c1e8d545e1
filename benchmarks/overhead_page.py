"""The figures of benchmarks/overhead.py as text: targets, a table, and the page that it is put into."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _host import STOLEN_CORES
from _measure import markdown
from _pairs import pairs_for
from growth import grows
from growth import told as growth_told
from overhead_runs import PROFILED, SETTLED, SETTLED_S
from torn import told as torn_told

__all__ = ["BEGIN", "END", "fill", "misses", "table", "targets"]

Row = dict[str, Any]

RATIO_AT_20_MS = 0.995
RESOLUTION = 0.002
"""Half of the widest interval that tells a ratio from the target."""
PROBE_US = 20.0
SIDECAR_CORES = 0.01
SIDECAR_BYTES = 60_000_000
READS = 10_000_000
STEPS = 100_000
_NOT_TOLD: Row = {"ratio": {"pairs": 0, "median": None, "interval": None, "deviation": None}}
PROBE_RESULT = Path(__file__).parent / "results" / "probe.json"

BEGIN = "<!-- from here on written by benchmarks/overhead.py -->"
END = "<!-- to here -->"


def targets(result: Row) -> list[Row]:
    """What was meant, and what it is; `told` is false where the measurement cannot tell."""
    sidecar, ring, growth = result["sidecar_of_8_ranks"], result["ring"], result["growth"]
    found: list[Row] = []

    def target(what: str, meant: str, is_: str, met: bool, told: bool = True) -> None:
        found.append({"what": what, "meant": meant, "is": is_, "met": met, "told": told})

    if PROBE_RESULT.exists():
        case = json.loads(PROBE_RESULT.read_text())["cases"][0]
        target(
            "probe, per step in the rank (benchmarks/probe.py)",
            f"at most {PROBE_US:.0f} us",
            f"{case['cost_us_per_step']:.1f} us of a step of {case['step_us_without']:.0f} us",
            case["cost_us_per_step"] <= PROBE_US,
        )
    for way, when in ((SETTLED, f", after {SETTLED_S:.0f} s"), (PROFILED, ", in its first seconds")):
        ratio = result["ways"].get(way.name, {}).get("20", _NOT_TOLD)["ratio"]
        low, high = ratio["interval"] or (0.0, 2.0)
        target(
            f"throughput at 20 ms steps{when}, with : without, median of {ratio['pairs']} pairs",
            f"at least {RATIO_AT_20_MS}",
            ratio_of(ratio) if ratio["pairs"] else "no pair of runs that the host did not disturb",
            (ratio["median"] or 0.0) >= RATIO_AT_20_MS,
            high - low <= 2 * RESOLUTION or low >= RATIO_AT_20_MS or high < RATIO_AT_20_MS,
        )
    target(
        "sidecar of 8 ranks, CPU",
        f"at most {SIDECAR_CORES:.0%} of a core",
        f"{sidecar['cores']:.2%} over {sidecar['seconds']:.0f} s",
        sidecar["cores"] <= SIDECAR_CORES,
    )
    target(
        "sidecar of 8 ranks, largest resident memory",
        f"at most {SIDECAR_BYTES / 1e6:.0f} MB",
        f"{sidecar['largest_rss_bytes'] / 1e6:.1f} MB",
        sidecar["largest_rss_bytes"] <= SIDECAR_BYTES,
    )
    target(
        f"torn records in {READS:,} reads",
        "0",
        f"{ring['torn'] + ring['torn_snapshots']} in {ring['records']:,}",
        not ring["torn"] and not ring["torn_snapshots"],
        ring["records"] >= READS and ring["careless_torn"] > 0,
    )
    target(
        f"growth of the rank over {STEPS:,} steps",
        "0 bytes",
        f"{growth['with']['heap_bytes']:+,.0f} bytes, {growth['with']['blocks']:+.0f} blocks over {growth['steps']:,}",
        not grows(growth),
        growth["steps"] >= STEPS,
    )
    return found


def misses(result: Row) -> list[str]:
    """Which targets are missed, or not told."""
    return [
        f"{of['what']}: {of['is']}, meant is {of['meant']}{'' if of['told'] else ' (this run cannot tell)'}"
        for of in result["targets"]
        if not (of["met"] and of["told"])
    ]


def table(result: Row) -> str:
    """Everything that one run has shown."""
    settings, machine = result["settings"], result["machine"]
    steps = [step for step in ("2", "20", "200") if any(step in of for of in result["ways"].values())]
    return "\n".join(
        [
            (
                f"{settings['ranks']} ranks with a dataloader worker each on {machine['cores']} cores, no GPU, Python"
                f" {machine['python']}, torch {machine['torch']}; {result['minutes']:.0f} minutes in all."
            ),
            "In brackets: where the median lies with 95 % confidence; then the number of pairs.",
            "",
            markdown(
                [
                    ("target", "meant", "measured", ""),
                    *((of["what"], of["meant"], of["is"], verdict(of)) for of in result["targets"]),
                ]
            ),
            "",
            markdown([("throughput with : without", *(f"{step} ms steps" for step in steps)), *ratios(result, steps)]),
            "",
            markdown([("median step longer by", *(f"{step} ms steps" for step in steps)), *longer(result, steps)]),
            "",
            markdown([*beside(result)]),
            "",
            *notes(result, steps),
        ]
    )


def verdict(of: Row) -> str:
    return ("met" if of["met"] else "missed") if of["told"] else "cannot be told from this run"


def ratios(result: Row, steps: Sequence[str]) -> list[Sequence[str]]:
    return [
        (name, *(ratio_of(of[step]["ratio"], count=True) if step in of else "" for step in steps))
        for name, of in result["ways"].items()
    ]


def longer(result: Row, steps: Sequence[str]) -> list[Sequence[str]]:
    return [
        (name, *(us_of(of[step]["median_step_us"]) if step in of else "" for step in steps))
        for name, of in result["ways"].items()
    ]


def beside(result: Row) -> list[Sequence[str]]:
    """What else a way of observing takes, at 20 ms steps."""
    rows: list[Sequence[str]] = [
        ("at 20 ms steps, with less without", "CPU of the rank per step", "whole machine", "memory of the job")
    ]
    for name, of in result["ways"].items():
        if at := of.get("20"):
            rows.append(
                (
                    name,
                    f"{at['cpu_us_per_step']['median']:+.0f} us",
                    f"{at['busy_cores']['median']:+.3f} cores",
                    f"{at['pss_mib']['median']:+.1f} MiB",
                )
            )
    return rows


def notes(result: Row, steps: Sequence[str]) -> list[str]:
    profiler = result["ways"].get(PROFILED.name, {})
    busy = ", ".join(f"{profiler[step]['busy_cores_without']:.2f} at {step} ms" for step in steps if step in profiler)
    compared = [at for of in result["ways"].values() for at in of.values()]
    stolen = max((at["stolen_cores"] for at in compared), default=0.0)
    left_out = sum(at["left_out"] for at in compared)
    own = ", ".join(
        f"{result['own_us_per_step'][step]:.1f} us at {step} ms" for step in steps if step in result["own_us_per_step"]
    )
    found = [
        (
            f"- Cores in use without any of it: {busy} steps, of {result['machine']['cores']}."
            f" The host took at most {stolen:.3f} cores away; {left_out} pairs in which it took more than"
            f" {STOLEN_CORES:g} are left out."
        ),
        f"- What the probe measures inside itself: {own} steps.",
        *unobserved_told(result["rows"]),
        f"- {live_told(result['growth']['live'])}",
        f"- {upper(torn_told(result['ring']))}.",
        f"- {upper(growth_told(result['growth']))}.",
    ]
    found += [f"- Broken off, and left out: {each.splitlines()[0]}." for each in result.get("broken_off", [])]
    settled = result["ways"].get(SETTLED.name, {})
    if deviation := settled.get("20", _NOT_TOLD)["ratio"]["deviation"]:
        found.append(
            f"- Single pairs at 20 ms, after {SETTLED_S:.0f} s, deviate by {deviation:.2%}; an interval of"
            f" +-{RESOLUTION:.1%} takes about {pairs_for(RESOLUTION, deviation)} of them."
        )
    return found


def unobserved_told(rows: Sequence[Row]) -> list[str]:
    """How many steps were not observed in the ranks where the budget had time to act."""
    ratios = [row["with"]["unobserved_ratio"] for row in rows if row["way"] == SETTLED.name]
    return [f"- Steps not observed by the end of these runs: {statistics.fmean(ratios):.0%}."] if ratios else []


def upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def live_told(of: Row) -> str:
    return f"The rank of the growth test measured {of['own_us']:.1f} us inside itself, of {of['step_us']:.0f} us."


def ratio_of(of: Row, *, count: bool = False) -> str:
    return f"{of['median']:.4f}{range_of(of, '{:.4f}')}" + (f", {of['pairs']}" if count else "")


def us_of(of: Row) -> str:
    return f"{of['median']:+.0f} us{range_of(of, '{:+.0f}')}"


def range_of(of: Row, form: str) -> str:
    return f" ({form.format(of['interval'][0])} .. {form.format(of['interval'][1])})" if of["interval"] else ""


def fill(page: str, text: str) -> str:
    """The page with the text between its marks, and nothing else changed.

    Raises:
        ValueError: the page has no such marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks a line {BEGIN!r} and a line {END!r} after it")
    return f"{before}{begin}\n\n## Figures\n\n{text}\n\n{end}{after}"
