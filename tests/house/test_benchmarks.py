"""What the benchmarks of the profiler's price make of their figures: no run, only what is done with one."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "overhead.md"
RESULT = ROOT / "benchmarks" / "results" / "overhead.json"


@pytest.fixture(name="load")
def _load(monkeypatch: pytest.MonkeyPatch):
    """Import a benchmark as its neighbours do: they are programs that lie beside each other, and no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return __import__(name)

    yield load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


def test_five_pairs_say_nothing_of_the_median_at_95_percent_and_six_do(load) -> None:
    interval = load("_pairs").interval

    assert interval([1.0] * 5) is None
    assert interval([3, 1, 2, 6, 5, 4]) == (1, 6)
    assert interval(range(10)) == (1, 8)


def test_the_interval_has_the_median_in_it_as_often_as_it_says(load) -> None:
    interval, chance = load("_pairs").interval, random.Random(4)

    inside = 0
    for _ in range(2000):
        low, high = interval([chance.expovariate(1) for _ in range(18)])
        inside += low <= 0.6931 <= high  # the median of that distribution: ln 2

    assert inside >= 0.95 * 2000


def test_twice_the_deviation_takes_four_times_the_pairs(load) -> None:
    pairs_for = load("_pairs").pairs_for

    assert pairs_for(0.002, 0.02) == pytest.approx(4 * pairs_for(0.002, 0.01), rel=0.01)
    assert pairs_for(0.002, 0.0) == 6


def test_each_half_of_a_cell_has_each_way_once_and_what_drifts_favours_none(load) -> None:
    pairs = load("_pairs")

    there, back = pairs.halves(pairs.there_and_back("a", "b", "c"))

    assert (there, back) == (["a", "b", "c"], ["c", "b", "a"])


def test_a_slope_is_growth_and_a_sawtooth_is_not(load) -> None:
    grown = load("growth").grown

    assert grown(list(range(100))) == pytest.approx(45)
    assert grown([look % 4 for look in range(100)]) == 0
    assert grown([-1000, -400, *[7] * 98]) == 0  # warming up
    assert grown([*[7] * 80, 9000, *[7] * 19]) == 0  # one odd look


def test_a_rank_grows_if_it_does_by_more_than_one_that_is_not_observed(load) -> None:
    grows = load("growth").grows
    seen = {"without": {"blocks": 1, "heap_bytes": 16}, "apart": {"blocks": 4, "heap_bytes": 96}}

    assert not grows({**seen, "with": {"blocks": 3, "heap_bytes": 112}})
    assert grows({**seen, "with": {"blocks": 48, "heap_bytes": 0}})
    assert grows({**seen, "with": {"blocks": 0, "heap_bytes": 4096}})


def test_a_record_of_two_steps_does_not_fit(load, tmp_path) -> None:
    torn = load("torn")
    from gpulaunch.profiler.channel import ring, segment, segment_writer

    path = str(tmp_path / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    writer = segment_writer.SegmentWriter(path)
    factors, total = torn.FACTORS, torn.FACTORS_SUM
    phases = tuple(2 * factor for factor in factors)
    for step in (1, 2):
        writer.end_step(
            (step, step, 0, 7 * step, total * step, *(f * step for f in factors), step, 1, step), 0, 1,
            (step, total * step, *(f * step for f in factors[:-1]), 7),
        )  # fmt: skip
    with segment.SegmentReader(path) as reader:
        assert [torn.fits(event) for event in ring.recent_from(reader)] == [True, True]
        assert torn.snapshot_fits(reader.read())
        assert torn.careless_fits(reader, 1)
    words = writer.words
    words[torn.RING_BYTE // 8 + torn.RING_RECORD_BYTES // 8 + 5] = phases[2] + 1  # of the second record, between marks
    words[load("torn").Word.STEP_NS_TOTAL] += 1
    with segment.SegmentReader(path) as reader:
        assert [torn.fits(event) for event in ring.recent_from(reader)] == [True, False]
        assert not torn.snapshot_fits(reader.read())
        assert not torn.careless_fits(reader, 1)
    writer.close()


def test_a_page_keeps_its_words_and_gets_the_figures_between_its_marks(load) -> None:
    module = load("overhead_page")
    page = f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n"

    once = module.fill(page, "new")

    assert once == module.fill(once, "new")
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "new" in once
    assert "old" not in once
    with pytest.raises(ValueError, match="lacks"):
        module.fill("no marks", "new")


def test_the_page_says_what_the_result_says_and_nothing_where_there_is_none(load) -> None:
    module = load("overhead_page")
    page = PAGE.read_text()

    if RESULT.exists():
        assert page == module.fill(page, module.table(json.loads(RESULT.read_text())))
    else:
        assert page.partition(module.BEGIN)[2].partition(module.END)[0].strip() == ""


def result(ratios: list[float]) -> dict[str, object]:
    """As much of a result as is judged."""
    import _pairs
    from overhead_runs import PROFILED, SETTLED

    return {
        "ways": {way.name: {"20": {"ratio": _pairs.middle(ratios)}} for way in (PROFILED, SETTLED)},
        "sidecar_of_8_ranks": {"cores": 0.005, "seconds": 60.0, "largest_rss_bytes": 30_000_000},
        "ring": {"torn": 0, "torn_snapshots": 0, "records": 10_000_000, "careless_torn": 5},
        "growth": {
            "steps": 100_000,
            **{name: {"blocks": 0, "heap_bytes": 0, "rss_bytes": 0} for name in ("with", "without", "apart")},
        },
    }


@pytest.mark.parametrize(
    ("ratios", "met", "told"),
    [
        ([0.998 + n * 1e-5 for n in range(18)], True, True),
        ([0.990 + n * 1e-5 for n in range(18)], False, True),
        ([0.98 + n * 2e-3 for n in range(18)], True, False),  # the median is, but it might as well not be
        ([0.999, 0.999, 0.999], True, False),
    ],
)
def test_a_target_is_met_missed_or_cannot_be_told(load, ratios: list[float], met: bool, told: bool) -> None:
    judged = load("overhead_page").targets(result(ratios))

    throughput = [of for of in judged if of["what"].startswith("throughput")]
    assert [(of["met"], of["told"]) for of in throughput] == [(met, told)] * 2, "once settled, and from the beginning"
    assert all(of["met"] and of["told"] for of in judged if of["what"].startswith(("sidecar", "torn", "growth")))


def test_a_test_of_tearing_that_could_not_tear_has_told_nothing(load) -> None:
    module = load("overhead_page")
    seen = result([0.999] * 18)
    seen["ring"]["careless_torn"] = 0  # type: ignore[index]
    seen["targets"] = module.targets(seen)

    # The probe's own figure is measured apart, and may be missed as well.
    (missed,) = [each for each in module.misses(seen) if each.startswith("torn records")]

    assert "inconclusive" in missed


def test_a_pair_that_the_host_disturbed_is_left_out_and_counted(load) -> None:
    """Whichever of its two runs it was, and whatever it showed."""

    def run(steps_per_s: float, stolen_cores: float) -> dict[str, float]:
        return {
            **dict.fromkeys(("median_step_us", "cpu_us_per_step", "busy_cores", "pss_mib"), 1.0),
            "steps_per_s": steps_per_s,
            "stolen_cores": stolen_cores,
        }

    pairs = [(run(50, 0), run(50, 0.01)), (run(20, 1.2), run(50, 0)), (run(50, 0), run(20, 0.9))]
    rows = [{"way": "profiler", "step_ms": 20, "with": one, "without": other} for one, other in pairs]
    module = load("overhead")

    of = module.summed_up(rows)["profiler"]["20"]
    assert (of["ratio"]["pairs"], of["ratio"]["median"], of["left_out"]) == (1, 1.0, 2)
    assert module.summed_up(rows[1:]) == {"profiler": {}}

    nothing_left = {**result([]), "ways": {"profiler": {}}}
    throughput = [of for of in load("overhead_page").targets(nothing_left) if of["what"].startswith("throughput")]
    assert [(of["met"], of["told"]) for of in throughput] == [(False, False)] * 2


def test_what_was_measured_is_kept_and_gone_on_with(load, tmp_path, monkeypatch) -> None:
    """On a machine of others' an hour is seldom quiet: what is missing is measured another time."""
    module, out = load("overhead"), tmp_path / "out.json"
    done: list[str] = []

    def measured(what: str) -> dict[str, str]:
        done.append(what)
        return {"is": what}

    class Broken:
        """A pair, and then one that comes to nothing."""

        def __init__(self, *_: object) -> None:
            self.settings: dict[str, object] = {}
            self.broken_off = ["2 ms: the job has not told its steps"]

        def rows(self, _: object):
            yield {"way": "profiler", "pair": len(done)}

    for name in ("sidecar", "torn", "growth"):
        monkeypatch.setattr(module, name, lambda _, name=name: measured(name))
    monkeypatch.setattr(module, "Measuring", Broken)
    options = module.argparse.Namespace(
        out=out, go_on=True, scale=1.0, reads=1, steps=1, minutes=1, rounds=1, ranks=1, traceml=None
    )

    first = module.measured(options)
    assert json.loads(out.read_text()) == first
    second = module.measured(options)

    assert done == ["sidecar", "torn", "growth"]
    assert len(second["rows"]) == 2
    assert second["broken_off"] == 2 * Broken().broken_off
    assert second["minutes"] > first["minutes"]
    options.ranks = 2
    with pytest.raises(SystemExit, match="its ranks is 1, here 2"):
        module.measured(options)


def test_only_what_is_missing_is_measured(load, monkeypatch) -> None:
    """Two pairs of a round that were left alone are there, and of another way one was not."""
    module, runs = load("overhead"), load("overhead_runs")
    ran: list[str] = []

    def one_run(way, *_: object) -> dict[str, float]:
        ran.append(way.name)
        return {"stolen_cores": 0.0}

    def row(way: str, stolen_cores: float) -> dict[str, object]:
        return {"step_ms": 20, "way": way, "with": {"stolen_cores": stolen_cores}, "without": {"stolen_cores": 0.0}}

    for name, value in (("one_run", one_run), ("until_calm", lambda _: None), ("pause_s", lambda *_: 0.01)):
        monkeypatch.setattr(module, name, value)
    there = [row("profiler", 0.0), row("profiler", 0.0), row(runs.PY_SPY.name, 0.0), row(runs.PY_SPY.name, 0.4)]
    options = module.argparse.Namespace(ranks=1, rounds=1, scale=1.0)
    measuring = module.Measuring(options, module.time.monotonic() + 1e6, {"rows": there})
    cells = [module.Cell(step_ms=20, runs=(way, runs.PLAIN, runs.PLAIN, way)) for way in (runs.PROFILED, runs.PY_SPY)]

    found = [each["way"] for each in measuring.rows(cells) if each["way"] != "control"]

    assert found == [runs.PY_SPY.name] * 2
    assert runs.PROFILED.name not in ran
