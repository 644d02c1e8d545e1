"""Scrapers of one endpoint, so many in one light process, each at its own address and its own moment.

    python _scrapers.py HOST PORT SCRAPERS HZ DIRECTORY

Each line on stdin is a number of seconds: they scrape for so long, as Prometheus asks, and a line of JSON is printed.
A scraper begins when it is due; what is due while its scrape before that is still under way waits, and is missed when
the next one is due as well. Of the pages that they got each is kept once, as DIRECTORY/page-<number>; `sequences` says
which each of them got, in order.
"""

from __future__ import annotations

import heapq
import json
import random
import resource
import selectors
import socket
import sys
import time
from collections import Counter
from pathlib import Path

from _node import AS_PROMETHEUS, spread

DEADLINE_S = 10.0
"""Prometheus waits so long for a scrape."""


class _Scraper:
    def __init__(self, number: int, due_s: float, period_s: float, ticks: int) -> None:
        self.source = (f"127.0.{1 + number // 250}.{1 + number % 250}", 0)
        self.due_s = due_s
        self.period_s = period_s
        self.ticks = ticks
        self.sock: socket.socket | None = None
        self.began_s = 0.0
        self.parts: list[bytes] = []
        self.pages: list[int] = []

    def __lt__(self, other: _Scraper) -> bool:
        return self.due_s < other.due_s


class Scrapers:
    """All of them."""

    def __init__(self, address: tuple[str, int], count: int, hz: float, directory: Path) -> None:
        lines = ["GET /metrics HTTP/1.1", "Host: localhost", *(f"{k}: {v}" for k, v in AS_PROMETHEUS.items()), "", ""]
        self._request = "\r\n".join(lines).encode()
        self._address = address
        self._count = count
        self._hz = hz
        self._directory = directory
        self._selector = selectors.DefaultSelector()
        self._known: dict[bytes, int] = {}
        self._newest: tuple[bytes, int] = (b"", -1)

    def run(self, seconds: float) -> dict[str, object]:
        """Scrape for so long, and tell."""
        began_s, period_s = time.monotonic(), 1 / self._hz
        cpu_s = _cpu_s()
        chance = random.Random(1)
        ticks = round(seconds * self._hz)
        scrapers = [
            _Scraper(number, began_s + chance.uniform(0, period_s), period_s, ticks) for number in range(self._count)
        ]
        self._taken_ms: list[float] = []
        self._failed: Counter[str] = Counter()
        self._missed: list[tuple[float, float]] = []
        self._waiting = list(scrapers)
        heapq.heapify(self._waiting)
        self._under_way: set[_Scraper] = set()
        while self._waiting or self._under_way:
            now_s = time.monotonic()
            while self._waiting and self._waiting[0].due_s <= now_s:
                self._begin(heapq.heappop(self._waiting))
            for late in [each for each in self._under_way if now_s - each.began_s > DEADLINE_S]:
                self._end(late, "timeout")
            wait_s = max(0.0, self._waiting[0].due_s - time.monotonic()) if self._waiting else DEADLINE_S / 10
            for key, events in self._selector.select(wait_s):
                self._advance(key.data, events)
        return {
            "due": self._count * ticks,
            "missed": len(self._missed),
            "missed_between": self._missed,
            "failed": dict(self._failed),
            "taken_ms": spread(self._taken_ms),
            "cores": round((_cpu_s() - cpu_s) / (time.monotonic() - began_s), 3),
            "sequences": [scraper.pages for scraper in scrapers],
        }

    def _begin(self, scraper: _Scraper) -> None:
        scraper.began_s = time.monotonic()
        scraper.parts = []
        scraper.sock = sock = socket.socket()
        sock.setblocking(False)
        self._under_way.add(scraper)
        self._selector.register(sock, selectors.EVENT_WRITE, scraper)
        try:
            sock.bind(scraper.source)
            sock.connect_ex(self._address)
        except OSError as error:
            self._end(scraper, type(error).__name__)

    def _advance(self, scraper: _Scraper, events: int) -> None:
        sock = scraper.sock
        assert sock is not None, "only who scrapes is waited for"
        try:
            if events & selectors.EVENT_WRITE:
                sock.sendall(self._request)
                self._selector.modify(sock, selectors.EVENT_READ, scraper)
                return
            part = sock.recv(1 << 20)
        except OSError as error:
            self._end(scraper, type(error).__name__)
            return
        if part:
            scraper.parts.append(part)
        else:
            self._end(scraper, "")

    def _end(self, scraper: _Scraper, fault: str) -> None:
        now_s = time.monotonic()
        assert scraper.sock is not None, "only who scrapes can end that"
        self._selector.unregister(scraper.sock)
        scraper.sock.close()
        scraper.sock = None
        self._under_way.discard(scraper)
        fault = fault or self._take(scraper)
        if fault:
            self._failed[fault] += 1
        else:
            self._taken_ms.append((now_s - scraper.began_s) * 1e3)
        scraper.due_s += scraper.period_s
        scraper.ticks -= 1
        began_s = scraper.began_s
        while scraper.ticks > 1 and scraper.due_s + scraper.period_s <= now_s:
            scraper.due_s += scraper.period_s
            scraper.ticks -= 1
            self._missed.append((began_s, now_s))
        if scraper.ticks > 0:
            heapq.heappush(self._waiting, scraper)

    def _take(self, scraper: _Scraper) -> str:
        """Note which page it was; give what is wrong with it, or nothing."""
        head, _, body = b"".join(scraper.parts).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            return head[:12].decode("ascii", "replace") or "no answer"
        if f"\r\nContent-Length: {len(body)}\r\n".encode() not in head:
            return "cut short"
        if body != self._newest[0]:
            number = self._known.get(body)
            if number is None:
                number = self._known[body] = len(self._known)
                (self._directory / f"page-{number}").write_bytes(body)
            self._newest = body, number
        scraper.pages.append(self._newest[1])
        return ""


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(host: str, port: str, count: str, hz: str, directory: str) -> None:
    scrapers = Scrapers((host, int(port)), int(count), float(hz), Path(directory))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(scrapers.run(float(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
