"""How long a scrape takes, and what an endpoint costs: a real sidecar over simulated ranks, asked for /metrics.

    python benchmarks/scrape.py [--ranks 8 256] [--seconds 60] [--json FILE]

The ranks make ten steps a second each; everything from their pages on is what a job has. For each number of ranks, in
this order: what the sidecar uses while nobody scrapes; how long the first scrape of all takes; what it uses when it is
scraped every 15 seconds; ten scrapes a second at every moment of the sidecar's own second, as Prometheus asks
(OpenMetrics, packed), and then as plain text; and as Prometheus asks while somebody looks at the page (`/api/page.json`
once a second). Printed: median, 99th percentile and longest of each, in milliseconds from the connection to the last
byte; exit 1 if a 99th percentile is over the bound (20 ms up to 8 ranks, 50 ms for more). `counts_to_a_million_ms` is a
yardstick to compare machines by.

Where it may, it has each core watched (`_witness.py`): `ms` are the scrapes during which none stood still because the
host of a virtual machine gave it to others, `all_ms` are all of them. A machine that is busy with other things is no
place for this, or only as `chrt -f 1 python benchmarks/scrape.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _node import AS_PROMETHEUS, Node, ask, machine, node, spread
from _witness import witnesses

_HZ = 10
_BOUNDS_MS = {8: 20.0, 256: 50.0}
_AS_TEXT = {"Accept": "text/plain"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--seconds", type=int, default=60, help="of each part")
    parser.add_argument("--json", type=Path, help="put the result into this file, under `scrape`")
    args = parser.parse_args()
    nodes = [_measure(ranks, args.seconds) for ranks in args.ranks]
    result = {"machine": machine(), "nodes": nodes}
    print(json.dumps(result, indent=1))
    if args.json:
        put(args.json, "scrape", result)
    return 0 if all(each["within_bound"] for each in nodes) else 1


def put(path: Path, part: str, result: object) -> None:
    """Replace one part of a file of results."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, part: result}, indent=1) + "\n")


def _measure(ranks: int, seconds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, node(Path(directory), ranks) as on:
        time.sleep(5)  # what is done once has been done
        told: dict[str, Any] = {"ranks": ranks}
        told["cores_unscraped"] = _cores(on, lambda: time.sleep(seconds))
        told["first_ms"] = round(ask(on.address, "/metrics", **AS_PROMETHEUS)[0], 2)
        told["cores_every_15_s"] = _cores(on, lambda: _every_15_s(on, seconds))
        for way, headers in (("prometheus", AS_PROMETHEUS), ("text", _AS_TEXT)):
            told[way] = _scrapes(on, seconds, headers)
        told["prometheus_page_open"] = _scrapes(on, seconds, AS_PROMETHEUS, looked_at=True)
        told["sidecar_rss_bytes"] = on.sidecar.memory_info().rss
    bound_ms = _BOUNDS_MS[min((limit for limit in _BOUNDS_MS if ranks <= limit), default=max(_BOUNDS_MS))]
    worst_ms = max(told[way]["ms"]["p99"] for way in ("prometheus", "text"))
    return {**told, "bound_ms": bound_ms, "within_bound": worst_ms <= bound_ms}


def _cores(on: Node, what: Any) -> float:
    """What the sidecar uses meanwhile."""
    cpu_s, began_s = on.sidecar_cpu_s(), time.monotonic()
    what()
    return round((on.sidecar_cpu_s() - cpu_s) / (time.monotonic() - began_s), 4)


def _every_15_s(on: Node, seconds: int) -> None:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        ask(on.address, "/metrics", **AS_PROMETHEUS)
        time.sleep(min(15.0, left_s))


def _scrapes(on: Node, seconds: int, headers: dict[str, str], *, looked_at: bool = False) -> dict[str, Any]:
    over = threading.Event()

    def look() -> None:
        while not over.wait(1.0):
            ask(on.address, "/api/page.json", **{"Accept-Encoding": "gzip"})

    looking = threading.Thread(target=look)
    if looked_at:
        looking.start()
    scrapes: list[tuple[float, float, float]] = []
    size = 0

    def scrape() -> None:
        nonlocal size
        began_s = time.monotonic()
        for number in range(seconds * _HZ):
            # A little later each time: at every moment of the sidecar's second.
            time.sleep(max(0.0, began_s + number * 1.003 / _HZ - time.monotonic()))
            at_s = time.monotonic()
            took_ms, body = ask(on.address, "/metrics", **headers)
            scrapes.append((at_s, time.monotonic(), took_ms))
            size = len(body)

    with witnesses() as stalls:
        cores = _cores(on, scrape)
    over.set()
    if looked_at:
        looking.join()
    told = {"all_ms": spread([took_ms for *_, took_ms in scrapes]), "bytes": size, "sidecar_cores": cores}
    if stalls.seen is None:
        return {"ms": told["all_ms"], **told}
    return {
        "ms": spread([took_ms for began_s, ended_s, took_ms in scrapes if not stalls.during(began_s, ended_s)]),
        **told,
        "cores_stood_still_s": stalls.stood_still_s,
    }


if __name__ == "__main__":
    raise SystemExit(main())
