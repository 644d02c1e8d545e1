"""Fifty scrapers of a sidecar over 64 ranks, for a moment: everyone sees everything, and a scrape costs no page.

The benchmarks `scrape.py` and `load.py` measure the same for long; their parts do the work here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RANKS, SCRAPERS, HZ, SECONDS = 64, 50, 5, 3


@pytest.fixture(scope="module", name="benchmarks", autouse=True)
def _benchmarks() -> Iterator[None]:
    """Import them as they do each other: they are programs that lie beside each other, and no package."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@dataclass(frozen=True)
class Load:
    told: dict[str, Any]
    """What the scrapers tell of themselves."""
    pages: dict[int, bytes]
    made: dict[int, int]
    """Steps, by rank."""
    in_the_end: dict[int, float]
    """The same as everyone is told them."""
    last: bytes
    """The page that tells them."""
    sidecar_cpu_s: float


@pytest.fixture(scope="module", name="load")
def _load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    from _node import ask, node
    from _samples import counters, pages_in, steps

    kept = tmp_path_factory.mktemp("pages")
    with node(tmp_path_factory.mktemp("channel"), RANKS, hz=2.0) as on:
        argv = [sys.executable, str(BENCHMARKS / "_scrapers.py"), *map(str, on.address), str(SCRAPERS), str(HZ)]
        cpu_s = on.sidecar_cpu_s()
        scraping = subprocess.run(
            [*argv, str(kept)], input=f"{SECONDS}\n", stdout=subprocess.PIPE, text=True, timeout=60
        )
        cpu_s = on.sidecar_cpu_s() - cpu_s
        made = on.settle()
        until_s = time.monotonic() + 60
        while True:
            last = ask(on.address, "/metrics", Accept="application/openmetrics-text")[1]
            told = steps(counters(last))
            if told == made or time.monotonic() > until_s:
                break
            time.sleep(0.2)
    result = json.loads(scraping.stdout.splitlines()[-1])
    return Load(told=result, pages=pages_in(kept), made=made, in_the_end=told, last=last, sidecar_cpu_s=cpu_s)


def test_every_scrape_is_answered(load: Load) -> None:
    assert load.told["due"] == SCRAPERS * HZ * SECONDS
    assert load.told["failed"] == {}
    assert sum(map(len, load.told["sequences"])) == load.told["due"] - load.told["missed"]
    assert all(load.told["sequences"]), "everyone got something"


def test_nobody_loses_a_sample(load: Load) -> None:
    from _samples import judge

    everyone = judge(load.pages, load.told["sequences"], ranks=RANKS)
    print(load.told["taken_ms"], load.told["missed"], everyone)
    assert everyone["pages_cut_short"] == 0
    assert everyone["counters_fallen"] == []
    assert everyone["counters"] > 90 * RANKS
    # Of a machine that stands still no scraper sees every refresh; of what was shown, somebody does.
    somebody = judge(load.pages, [sorted(load.pages)], ranks=RANKS)
    assert (somebody["counters_fallen"], somebody["refreshes_not_seen"]) == ([], 0)
    assert load.in_the_end == load.made


def test_a_scrape_costs_a_fraction_of_writing_a_page(load: Load) -> None:
    """CPU time of the sidecar, its refreshes and pages and all, by the scrape; and what it says that a page takes."""
    from _samples import value

    written_s = value(load.last, "gpulaunch_sidecar_render_duration_seconds")
    scrape_s = load.sidecar_cpu_s / (load.told["due"] - load.told["missed"])
    print(f"{1000 * scrape_s:.2f} ms a scrape, {1000 * written_s:.0f} ms a page")
    assert scrape_s < written_s / 3


def test_loss_would_have_been_seen(load: Load) -> None:
    """A counter that falls, one that goes, a page that is cut short, a refresh that a scraper was not shown."""
    from _samples import judge

    page, last = load.pages[min(load.pages)], load.last
    step = next(line for line in page.splitlines() if line.startswith(b'gpulaunch_steps_total{rank="7"}'))
    fallen = last.replace(b"\n" + step.split()[0] + b" ", b"\n" + step.split()[0] + b" -")
    gone = b"".join(each for each in last.splitlines(True) if not each.startswith(step.split()[0]))

    for planted, cut in ((fallen, 0), (gone, 1)):
        told = judge({0: page, 1: planted}, [[0, 1]], ranks=RANKS)
        assert told["counters_fallen"] == [step.split()[0].decode()]
        assert told["pages_cut_short"] == cut
    assert judge({0: page, 1: page[:-6]}, [[0, 1]], ranks=RANKS)["pages_cut_short"] == 1
    later = re.sub(rb"(refreshes_total) \S+", rb"\1 1000.0", last)
    assert judge({0: page, 1: later}, [[0, 0, 1], [0]], ranks=RANKS)["refreshes_not_seen"] > 900
