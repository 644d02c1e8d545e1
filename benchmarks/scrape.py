"""How long a scrape takes: a real sidecar over the pages of simulated ranks, asked for /metrics again and again.

    python benchmarks/scrape.py [--ranks 8 256] [--seconds 30] [--page]

The ranks are pages in shared memory that this program writes on, ten steps a second each; everything from there on is
what a job has. Every second there is one scrape after the sidecar's refresh, which finds the metrics to be written
anew (`first`), and ten more of the same state (`cached`), as a second scraper or a short scrape interval has them. With
`--page` somebody looks at the page meanwhile: `/api/run.json` is asked for once a second too. Printed: median, 99th
percentile and longest of each kind, in milliseconds from the connection to the last byte, bytes of a scrape, and what
the sidecar used. Exit 1 if a cached scrape is over the bound (p99: 20 ms up to 8 ranks, 50 ms for more).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from gpulaunch.profiler.channel import layout, page
from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.page import PageWriter

_CACHED = 10
_MS = 1_000_000
_BOUNDS_MS = {8: 20.0, 256: 50.0}
_PARTS = (1, 0, 2, 3, 0, 1, 0, 0, 0, 0, 0, 3)
"""Of a step of 10 ms, by phase."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--page", action="store_true", help="look at the page meanwhile")
    args = parser.parse_args()
    results = [_measure(ranks, args.seconds, looked_at=args.page) for ranks in args.ranks]
    print(json.dumps(results, indent=2))
    return 0 if all(result["within_bound"] for result in results) else 1


def _measure(ranks: int, seconds: int, *, looked_at: bool) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory, _node(Path(directory), ranks) as (address, sidecar):
        first, cached, views, size = [], [], [], 0
        process = psutil.Process(sidecar.pid)
        cpu_s = sum(process.cpu_times()[:2])
        began_s = time.monotonic()
        for second in range(seconds):
            # A little later each time: at every moment of the sidecar's second.
            time.sleep(max(0.0, began_s + second * 1.03 - time.monotonic()))
            taken_ms, size = _ask(address, "/metrics")
            first.append(taken_ms)
            looking = threading.Thread(target=lambda: views.append(_ask(address, "/api/run.json")[0]))
            if looked_at:
                looking.start()
            cached += [_ask(address, "/metrics")[0] for _ in range(_CACHED)]
            if looked_at:
                looking.join()
        bound_ms = _BOUNDS_MS[min((limit for limit in _BOUNDS_MS if ranks <= limit), default=max(_BOUNDS_MS))]
        told = _spread(cached)
        return {
            "ranks": ranks,
            "page_open": looked_at,
            "scrape_bytes": size,
            "cached_ms": told,
            "first_ms": _spread(first),
            **({"run_json_ms": _spread(views)} if looked_at else {}),
            "sidecar_cores": round((sum(process.cpu_times()[:2]) - cpu_s) / (time.monotonic() - began_s), 3),
            "sidecar_rss_bytes": process.memory_info().rss,
            "bound_ms": bound_ms,
            "within_bound": told["p99"] <= bound_ms,
        }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"median": len(ordered) // 2, "p99": min(len(ordered) - 1, int(0.99 * len(ordered))), "max": -1}
    return {"scrapes": len(ordered), **{name: round(ordered[index], 2) for name, index in at.items()}}


def _ask(address: tuple[str, int], path: str) -> tuple[float, int]:
    """Milliseconds, and bytes of the body."""
    began_s = time.perf_counter()
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\n\r\n".encode())
        parts: list[bytes] = []
        while part := client.recv(1 << 16):
            parts.append(part)
    taken_ms = (time.perf_counter() - began_s) * 1e3
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        sys.exit(f"{path}: {head.splitlines()[0].decode()}")
    return taken_ms, len(body)


@contextlib.contextmanager
def _node(directory: Path, ranks: int) -> Iterator[tuple[tuple[str, int], subprocess.Popen[bytes]]]:
    """A sidecar over ranks that make steps."""
    writers: list[PageWriter] = []
    for rank in range(ranks):
        path = str(directory / f"rank-{rank}.bin")
        page.create(path, rank=rank, local_rank=rank, attempt=0)
        writers.append(PageWriter(path))
    places = [{"rank": rank, "local_rank": rank, "pid": os.getpid()} for rank in range(ranks)]
    run_dir = directory / "run"
    run_dir.mkdir()
    group = {"version": 1, "run_id": "0123456789abcdef", "name": "simulated", "attempt": 0, "ranks": places}
    group |= {"world_size": ranks, "node_rank": 0, "run_dir": str(run_dir)}
    (directory / "group.json").write_text(json.dumps(group))
    over = threading.Event()

    def train() -> None:
        while not over.wait(0.1):
            for writer in writers:
                _step(writer)

    trainer = threading.Thread(target=train)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        argv = [sys.executable, "-P", "-m", "gpulaunch.launcher.cli.sidecar", "--channel-dir", str(directory)]
        argv += ["--listen-fd", str(listener.fileno()), "--parent-pid", str(os.getpid())]
        with subprocess.Popen(argv, pass_fds=[listener.fileno()]) as sidecar:
            trainer.start()
            try:
                address = listener.getsockname()[:2]
                _ask(address, "/metrics")  # it has begun
                yield address, sidecar
            finally:
                over.set()
                trainer.join()
                sidecar.terminate()
    for writer in writers:
        writer.close()


def _step(writer: PageWriter) -> None:
    steps, microsteps, skipped, samples, *_ = before = writer.words[Word.STEPS : Word.PROBE_NS_TOTAL + 1]
    times = [total + part * _MS for total, part in zip(before[4:17], (10, *_PARTS), strict=True)]
    at_ns = time.monotonic_ns()
    counters = (steps + 1, microsteps + 1, skipped, samples + 32, *times, at_ns, layout.StepSource.OPTIMIZER)
    event = (at_ns - 10 * _MS, 10 * _MS, *(part * _MS for part in _PARTS[:-1]), 32)
    writer.end_step((*counters, before[-1] + 5000), 3, 1, event)


if __name__ == "__main__":
    raise SystemExit(main())
