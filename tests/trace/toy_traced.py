"""A rank without torch that is traced: makes steps of 5 ms, asks as torch's client does, and writes what it is told to.

`python toy_traced.py <page> <how>`, where how is one of

    good      does all that
    refuses   says that it cannot be traced
    silent    never asks
    busy      is being profiled by its own program
    dies      takes its order and dies
    halved    writes the first half of its trace
    tardy     writes the trace of its first order when it gets the second, and that one never
    empty     writes a trace in which nothing happened
    slowed    takes twenty times as long for a step from then on: no noise hides it
    keeps     holds 128 MiB more from then on
    late      is the one that the others wait for
    copies    copies 1000 bytes to the GPU in each step, and its trace has 20 such copies
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from kineto_client import BUSY, FREE, Client

from gpulaunch.profiler.channel import tracing
from gpulaunch.profiler.channel.layout import COPIES, PHASES, StepSource, Word
from gpulaunch.profiler.channel.quantities import COPY_WORDS
from gpulaunch.profiler.channel.segment_writer import SegmentWriter

COPIED_BYTES = Word.COPY_FIRST + COPIES.index(("h2d", "pinned")) * COPY_WORDS + 1


def step(writer: SegmentWriter, took_ns: int, *, late: bool) -> None:
    """A step that ends now: half of it is backward, or, where the rank is late, data wait."""
    before = writer.words[Word.STEPS : Word.PROBE_NS_TOTAL + 1]
    parts = dict.fromkeys(PHASES, 0)
    parts["forward"] = took_ns // 2
    parts["data_wait" if late else "backward"] = took_ns - took_ns // 2
    totals = [total + part for total, part in zip(before[4:17], (took_ns, *parts.values()), strict=True)]
    at_ns = time.monotonic_ns()
    counts = (before[0] + 1, before[1] + 1, 0, 0)
    record = (at_ns - took_ns, took_ns, *tuple(parts.values())[:-1], 0)
    writer.end_step((*counts, *totals, at_ns, StepSource.OPTIMIZER, 0), 2, 1, record)


def write(told: dict[str, str], how: str) -> None:
    """The trace, in two pieces as a large one is written."""
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 2.0, "pid": 1, "tid": 1, "args": {}}
    if how == "copies":
        event |= {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 1000}}
    events = [event] * {"empty": 0, "copies": 20}.get(how, 100)
    text = json.dumps({"traceEvents": events, "traceName": "toy", "baseTimeNanoseconds": 0})
    path = told["ACTIVITIES_LOG_FILE"].replace(".json", f"_{os.getpid()}.json")
    if not os.path.isdir(os.path.dirname(path)):  # nobody waits for it any more: torch says nothing then
        return
    with open(path, "w") as file:
        file.write(text[: len(text) // 2])
        file.flush()
        time.sleep(0.15)
        if how != "halved":
            file.write(text[len(text) // 2 :])


def main(page: Path, how: str) -> None:
    writer = SegmentWriter(str(page))
    directory = page.parent
    client = Client(directory)
    told: dict[str, str] = {}
    first: dict[str, str] = {}
    step_s = 0.005
    asked_s = written_s = 0.0
    kept: list[bytes] = []
    print("ok", flush=True)
    while True:
        began_ns = time.monotonic_ns()
        time.sleep(step_s)
        step(writer, time.monotonic_ns() - began_ns, late=how == "late")
        if how == "copies":
            writer.words[COPIED_BYTES] += 1000
        wanted = os.path.exists(tracing.socket_path(str(directory)))
        if how == "refuses" and wanted:
            tracing.refuse(str(directory), int(page.stem.partition("-")[2]), "it does not\nlike to")
        elif how != "silent" and wanted and not told and time.monotonic() > asked_s + 0.05:
            asked_s = time.monotonic()
            try:
                client.ask(BUSY if how == "busy" else FREE)
            except OSError:  # it has just been taken away
                continue
        answer = client.answer()
        if answer is not None and answer[1]:
            told = dict(line.split("=") for line in answer[1].decode().splitlines())
            if how == "dies":
                sys.exit(7)
            if how == "tardy":
                if first:
                    write(first, how)
                    how = "silent"
                first, told = told, {}
                (directory / "ordered").touch()
                continue
            written_s = (int(told["PROFILE_START_TIME"]) + int(told["ACTIVITIES_DURATION_MSECS"])) / 1000
        if written_s and time.time() > written_s:
            written_s = 0.0
            write(told, how)
            told = {}
            if how == "slowed":
                step_s *= 20
            if how == "keeps":
                kept.append(b"x" * (128 << 20))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
