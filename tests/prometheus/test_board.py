"""When pages are written: never for nobody, once for all who ask, ahead where it takes long; and what is served."""

from __future__ import annotations

import dataclasses
import gzip
import re
import threading
from collections.abc import Callable

import pytest

from gpulaunch.exporters.prometheus import render
from gpulaunch.exporters.prometheus.render import OPENMETRICS, REMEMBER_S, SLOW_S, TEXT, Board
from gpulaunch.profiler.record import NodeState

WAIT_S = 20.0
PROMETHEUS = "application/openmetrics-text"


class Sidecar:
    """A board on a clock of its own, whose pages take so long to write; a refresh a second."""

    def __init__(self, node: NodeState, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.cost_s = 0.0
        self.written = 0
        self.before_writing: Callable[[], object] = lambda: None
        self.board = Board(version="1", clock=lambda: self.now_s)
        self._node = node
        self.refreshes = 0
        put_state = render.put_state

        def put_slowly(*arguments) -> None:
            self.before_writing()
            self.written += 1
            self.now_s += self.cost_s
            put_state(*arguments)

        monkeypatch.setattr(render, "put_state", put_slowly)

    def refresh(self) -> None:
        self.now_s += 1.0
        self.refreshes += 1
        own = dataclasses.replace(self._node.sidecar, refreshes=self.refreshes)
        self.board.publish(dataclasses.replace(self._node, sidecar=own))

    def scrape(self, accept: str = PROMETHEUS, *, gzipped: bool = True) -> bytes:
        page = self.board.metrics(accept, gzipped=gzipped)[1]
        return gzip.decompress(page) if gzipped else page

    def told(self, name: str, page: bytes | None = None) -> float:
        (found,) = re.findall(rf"^{name} (\S+)$", (page or self.scrape()).decode(), re.MULTILINE)
        return float(found)

    def refresh_told(self) -> float:
        return self.told("gpulaunch_sidecar_refreshes_total")


@pytest.fixture(name="sidecar")
def _sidecar(node: NodeState, monkeypatch: pytest.MonkeyPatch) -> Sidecar:
    return Sidecar(node, monkeypatch)


def test_nothing_is_written_for_nobody(sidecar: Sidecar) -> None:
    sidecar.cost_s = 10 * SLOW_S
    for _ in range(100):
        sidecar.refresh()
    assert sidecar.written == 0


def test_a_page_that_is_quick_to_write_waits_for_somebody_to_ask(sidecar: Sidecar) -> None:
    sidecar.cost_s = 0.5 * SLOW_S
    for _ in range(50):
        sidecar.refresh()
        if sidecar.refreshes % 15 == 0:
            assert sidecar.refresh_told() == sidecar.refreshes, "the newest"
    assert sidecar.written == 3


def test_a_state_is_written_once_for_all_who_ask_whatever_they_like(sidecar: Sidecar) -> None:
    sidecar.refresh()
    pages = {(accept, gzipped): sidecar.scrape(accept, gzipped=gzipped) for accept in ("", PROMETHEUS)
             for gzipped in (False, True)}  # fmt: skip
    again = [sidecar.board.metrics(PROMETHEUS, gzipped=True)[1] for _ in range(50)]

    assert sidecar.written == 1
    assert pages["", True] == pages["", False] != pages[PROMETHEUS, False] == pages[PROMETHEUS, True]
    assert all(page is again[0] for page in again)
    assert sidecar.board.metrics("")[0] == TEXT
    assert sidecar.board.metrics(PROMETHEUS)[0] == OPENMETRICS


def test_a_page_that_takes_long_is_there_before_it_is_asked_for(sidecar: Sidecar) -> None:
    """But for the first; and so long as somebody asks, be it once a minute."""
    sidecar.cost_s = 10 * SLOW_S
    sidecar.refresh()
    first = sidecar.refresh_told()
    assert (first, sidecar.written) == (1, 1)

    for minute in range(1, 4):
        for _ in range(60):
            sidecar.refresh()
        written = sidecar.written
        assert sidecar.refresh_told() == 1 + 60 * minute, "the newest"
        assert sidecar.written == written == 1 + 60 * minute, "nobody had to wait for it"

    asked_s, written = sidecar.now_s, sidecar.written
    while sidecar.now_s < asked_s + 3 * REMEMBER_S:
        sidecar.refresh()
    assert written + 0.8 * REMEMBER_S < sidecar.written <= written + REMEMBER_S
    assert sidecar.refresh_told() == sidecar.refreshes


def test_while_a_page_is_being_written_the_one_before_it_is_served_at_once(sidecar: Sidecar) -> None:
    sidecar.cost_s = 10 * SLOW_S
    sidecar.refresh()
    sidecar.scrape()
    sidecar.refresh()
    begun, go_on = threading.Event(), threading.Event()
    sidecar.before_writing = lambda: (begun.set(), go_on.wait(WAIT_S))
    refreshing = threading.Thread(target=sidecar.refresh)
    refreshing.start()
    try:
        assert begun.wait(WAIT_S)
        before = sidecar.scrape()
        assert before.endswith(b"# EOF\n")
        assert sidecar.told("gpulaunch_sidecar_refreshes_total", before) == 2
    finally:
        go_on.set()
        refreshing.join()
    assert sidecar.refresh_told() == 3


def test_counters_do_not_go_back_for_whoever_asks_in_many_ways(sidecar: Sidecar) -> None:
    """Also where one format is first asked for when another has been for a while: both are of the same moment."""
    seen = 0.0
    for cost_s in (0.1 * SLOW_S, 10 * SLOW_S):
        sidecar.cost_s = cost_s
        for _ in range(3):
            sidecar.refresh()
            for accept in ("", PROMETHEUS, "", "", PROMETHEUS):
                for gzipped in (True, False):
                    scrapes = sidecar.told("gpulaunch_sidecar_scrapes_total", sidecar.scrape(accept, gzipped=gzipped))
                    assert scrapes >= seen
                    seen = scrapes
    assert seen > 40


def test_a_fault_in_writing_ahead_is_the_scraper_s_to_see_and_not_the_sidecar_s(sidecar: Sidecar) -> None:
    sidecar.cost_s = 10 * SLOW_S
    sidecar.refresh()
    sidecar.scrape()

    def fault() -> None:
        raise RuntimeError("a fault of ours")

    sidecar.before_writing = fault
    sidecar.refresh()
    with pytest.raises(RuntimeError):
        sidecar.scrape()
    sidecar.before_writing = lambda: None
    assert sidecar.refresh_told() == 2, "the newest state all the same"


def test_a_name_that_is_not_utf_8_costs_no_page(node: NodeState) -> None:
    """A run's name comes from the command line, whose bytes need be none: they arrive as half characters."""
    assert node.group is not None
    named = [
        dataclasses.replace(node, group=dataclasses.replace(node.group, name=name)) for name in ("caf\udce9", "caf?")
    ]
    pages: list[list[bytes]] = []
    for state in named:
        board = Board(version="1", clock=lambda: 0.0)
        board.publish(state)
        pages.append([board.metrics("")[1], board.metrics(PROMETHEUS)[1]])

    assert pages[0] == pages[1]
    assert all(b'"caf?"' in page for page in pages[0])


def test_before_the_first_refresh_there_is_an_empty_page_in_every_form() -> None:
    board = Board(version="1")
    assert gzip.decompress(board.metrics("", gzipped=True)[1]) == b""
    assert gzip.decompress(board.metrics(PROMETHEUS, gzipped=True)[1]) == b"# EOF\n"
