"""Totals go on although what is counted comes and goes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals


def test_a_total_keeps_what_a_source_that_is_gone_had_reached() -> None:
    ledger = MonotonicTotals()
    assert ledger.total("cpu", {"worker 1": (5, 1), "worker 2": (7, 2)}, width=2) == (12, 3)
    assert ledger.total("cpu", {"worker 2": (8, 2)}, width=2) == (13, 3)
    assert ledger.total("cpu", {}, width=2) == (13, 3)
    assert ledger.total("cpu", {"worker 3": (1, 1)}, width=2) == (14, 4)


def test_an_account_without_sources_is_zero_in_its_width() -> None:
    assert MonotonicTotals().total("cpu", {}, width=3) == (0, 0, 0)


def test_a_source_that_steps_back_does_not_take_the_total_with_it() -> None:
    ledger = MonotonicTotals()
    ledger.total("cpu", {"a": (10,)}, width=1)

    assert ledger.total("cpu", {"a": (9,)}, width=1) == (10,)


def test_accounts_do_not_mix() -> None:
    ledger = MonotonicTotals()
    ledger.total("0/page", {"attempt 0": (10,)}, width=1)

    assert ledger.total("1/page", {"attempt 0": (1,)}, width=1) == (1,)


# A history: per moment, how much each living source has grown. A source that has ended comes back under a new name.
histories = st.lists(st.dictionaries(st.integers(0, 4), st.integers(0, 100), max_size=5), min_size=1, max_size=20)


@given(histories, st.integers(0, 19))
def test_totals_never_fall_and_are_what_all_sources_reached(history: list[dict[int, int]], killed_at: int) -> None:
    """...although the ledger is saved and taken over by a new one in the middle."""
    ledger = MonotonicTotals()
    lives: dict[int, int] = {}
    reached: dict[str, int] = {}
    before = 0
    for moment, growth in enumerate(history):
        for ended in [source for source in lives if source not in growth]:
            del lives[ended]
        sources: dict[str, tuple[int]] = {}
        for source, grown in growth.items():
            name = f"{source}:{lives.setdefault(source, moment)}"
            reached[name] = reached.get(name, 0) + grown
            sources[name] = (reached[name],)
        if moment == killed_at:
            ledger = reloaded(ledger)
        (total,) = ledger.total("key", sources, width=1)
        assert total == sum(reached.values())
        assert total >= before
        before = total


def reloaded(ledger: MonotonicTotals) -> MonotonicTotals:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.json"
        ledger.save(path)
        successor = MonotonicTotals()
        assert successor.load(path)
        assert [entry.name for entry in path.parent.iterdir()] == ["ledger.json"]
        return successor


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"version": 2, "accounts": {}}',
        '{"version": 1}',
        '{"version": 1, "accounts": {"a": 1}}',
        '{"version": 1, "accounts": {"a": [[1], {"x": ["1"]}]}}',
        '{"version": 1, "accounts": {"a": [[1], {"x": [1.5]}]}}',
        '{"version": 1, "accounts": {"a": [[true], {}]}}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_damaged_ledger_is_as_good_as_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_bytes(text.encode("latin-1"))
    ledger = MonotonicTotals()

    assert not ledger.load(path)
    assert ledger.total("a", {"x": (1,)}, width=1) == (1,)


def test_a_missing_ledger_is_no_trouble(tmp_path: Path) -> None:
    assert not MonotonicTotals().load(tmp_path / "none")


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_no_document_can_upset_the_loader(document: object) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.json"
        path.write_text(json.dumps({"version": 1, "accounts": document}))
        MonotonicTotals().load(path)
