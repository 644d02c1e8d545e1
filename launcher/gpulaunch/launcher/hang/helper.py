"""The helper process for one suspicion: samples every rank, samples again, judges, and writes the evidence.

The helper runs from the first suspicion until the ranks move again or are acted on; its earlier samples are the
evidence for "has not moved for 20 s". It reads one request per line and answers each with one line, both JSON:

    first    {"limits": {...}, "whole": true, "path": "/.../hang.json"}
    request  {"standings": [...], "dirs": {"0": "/.../rank-0", ...}, "store_pid": 4711, "tell_from_s": 60.0,
              "others_idle_s": null}
    answer   {"verdict": {...}} or {"error": "why not"}
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from gpulaunch.launcher.hang import proc, server, sockets, stacks
from gpulaunch.launcher.hang.activity import following
from gpulaunch.launcher.hang.frames import is_programs, waits_in
from gpulaunch.launcher.hang.judge import judge
from gpulaunch.launcher.hang.values import (
    ACTED,
    TOLD,
    Limits,
    RankProgress,
    Sample,
    Verdict,
    progress_from,
    to_json,
)
from gpulaunch.launcher.loop.files import write_json
from gpulaunch.profiler.channel.layout import Region
from gpulaunch.profiler.stack import Frame

VERSION = 2
_REMEMBERED = 256
"""Samples per rank: more than the longest run that any rule asks for."""
_WORKER_LOOP = "_worker_loop"
_FETCH = "/torch/utils/data/_utils/fetch.py"
_MAX_WORKERS = 8


class Session:
    """The samples of one suspicion."""

    def __init__(self, limits: Limits, *, whole: bool, path: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self._limits = limits
        self._whole = whole
        self._path = path
        self._sleep = sleep
        self._samples: dict[int, deque[Sample]] = {}
        self._idle_since_s = math.inf
        self._stacks: dict[int, stacks.Stacks] = {}
        self._recorded: dict[int, server.FlightRecord] = {}

    def look(
        self,
        standings: Sequence[RankProgress],
        dirs: Mapping[int, str],
        *,
        tell_from_s: float,
        others_idle_s: float | None,
        store_pid: int | None = None,
    ) -> Verdict:
        """Take two samples of every rank and judge all that is known.

        Writes down the verdicts that act, and those to report: a stall that has lasted for `tell_from_s`.
        `others_idle_s`: how long no rank of another node has worked; infinite if there is none; None: one works.
        """
        began_s = time.monotonic()
        for rank in self._samples.keys() - {standing.rank for standing in standings}:
            del self._samples[rank]
        for standing in standings:
            kept = self._samples.setdefault(standing.rank, deque(maxlen=_REMEMBERED))
            while kept and kept[0].at_s < began_s - standing.quiet_s:  # it has moved since: those are outdated
                kept.popleft()
        self._sample(standings, dirs)
        self._sleep(self._limits.sample_s)
        # A signal disturbs the rank, so at most one per look.
        self._sample([one for one in standings if self._stacks[one.rank].source != "faulthandler"], dirs)
        self._recorded = self._ask_recorders(standings)
        recorders = server.compare_records(self._recorded, self._samples)
        closed = self._is_closed(standings, store_pid)
        own_idle_s = max(0.0, began_s - self._idle_since_s)
        verdict = judge(
            standings,
            self._samples,
            self._limits,
            whole=self._whole,
            idle_s=None if others_idle_s is None else min(own_idle_s, others_idle_s),
            closed=closed,
            recorders=recorders,
        )
        self._idle_since_s = math.inf if verdict.works else min(self._idle_since_s, began_s)
        verdict = replace(verdict, notes=(*self._sources(standings), *self._summary()))
        if verdict.acts or (verdict.tells and verdict.quiet_s >= tell_from_s):
            verdict = replace(verdict, path=self._path)
            self._write(to_json(verdict), standings)
        return verdict

    def _sample(self, standings: Sequence[RankProgress], dirs: Mapping[int, str]) -> None:
        socket_bytes = sockets.bytes_by_socket()
        readings = {standing.rank: proc.read(standing.pid, socket_bytes) for standing in standings}
        targets = [
            stacks.Target(
                rank=one.rank,
                pid=one.pid,
                rank_dir=dirs.get(one.rank, ""),
                stopped=readings[one.rank].state == "T",
                may_signal=one.quiet_s >= self._limits.floor_s,
            )
            for one in standings
            if readings[one.rank].state not in ("", "Z", "X")
        ]
        taken = stacks.take(targets)
        for standing in standings:
            self._stacks[standing.rank] = taken.get(standing.rank, stacks.Stacks())
            kept = self._samples[standing.rank]
            sample = self._joined(standing, readings[standing.rank])
            kept.append(following(kept[-1] if kept else None, sample, standing, self._limits))

    def _joined(self, standing: RankProgress, reading: proc.Reading) -> Sample:
        taken = self._stacks[standing.rank]
        assistants = [thread for thread in taken.threads if thread.frames != taken.main]
        idle = (thread for thread in taken.threads if thread.owns_gil and thread.idle)
        holder = next((thread for thread in idle if proc.waits_within(standing.pid, thread.os_id)), None)
        worker_pid, worker_frames = 0, tuple[Frame, ...]()
        if standing.region is Region.LOADER and standing.quiet_s >= self._limits.floor_s:
            worker_pid, worker_frames = busy_worker(reading.workers)
        return Sample(
            at_s=time.monotonic(),
            state=reading.state,
            frames=taken.main,
            main_ticks=reading.main_ticks,
            own_ticks=reading.own_ticks,
            tree_ticks=reading.tree_ticks,
            main_delay_s=reading.main_delay_s,
            running=reading.running,
            wanted_s=reading.wanted_s,
            io_bytes=reading.io_bytes,
            gil_thread=holder.os_id if holder else 0,
            gil_frames=holder.frames if holder else (),
            worker_pid=worker_pid,
            worker_frames=worker_frames,
            gpu=reading.gpu,
            traced=reading.traced,
            assisted=any(map(is_programs, (frame for thread in assistants for frame in thread.frames))),
        )

    def _is_closed(self, standings: Sequence[RankProgress], store_pid: int | None) -> bool:
        """Whether no rank is connected to a process outside of the job; checked only if all wait for each other."""
        if not all(waits_in(self._samples[one.rank][-1].frames) for one in standings):
            return False
        pids = [one.pid for one in standings]
        return sockets.among_themselves(pids if store_pid is None else [*pids, store_pid])

    def _ask_recorders(self, standings: Sequence[RankProgress]) -> dict[int, server.FlightRecord]:
        answers = stacks.at_once(lambda standing: server.read_flight_record(standing.pid), standings)
        return {one.rank: answer for one, answer in zip(standings, answers, strict=True) if answer is not None}

    def _sources(self, standings: Sequence[RankProgress]) -> list[str]:
        """Say where the stacks came from, and why no better source was available."""
        sources: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for standing in standings:
            taken = self._stacks[standing.rank]
            sources.setdefault((taken.source, taken.refused), []).append(standing.rank)
        notes: list[str] = []
        for (source, refused), ranks in sources.items():
            who = "all ranks" if len(ranks) == len(standings) else f"ranks {','.join(map(str, ranks))}"
            why = f" ({'; '.join(refused)})" if refused else ""
            notes.append(f"stacks of {who}: {source or 'none'}{why}")
        return notes

    def _summary(self) -> list[str]:
        said = server.summary(self._recorded)
        return [said] if said else []

    def _write(self, verdict: Mapping[str, Any], standings: Sequence[RankProgress]) -> None:
        """Write all evidence atomically; the verdict is valid without it."""
        ranks: list[dict[str, Any]] = []
        all_waits = stacks.at_once(lambda standing: server.waits_of(standing.pid), standings)
        for standing, waits in zip(standings, all_waits, strict=True):
            taken = self._stacks[standing.rank]
            recorded = self._recorded.get(standing.rank)
            ranks.append(
                {
                    **to_json(standing),
                    "region": standing.region.name.lower(),
                    "source": taken.source,
                    "refused": taken.refused,
                    "threads": [
                        {**vars(thread), "frames": [vars(frame) for frame in thread.frames]} for thread in taken.threads
                    ],
                    "samples": [_numbers(sample) for sample in self._samples[standing.rank]],
                    "collectives": None if recorded is None else {**vars(recorded)},
                    "wait_counters": waits,
                }
            )
        limits = to_json(self._limits)
        document = {
            "version": VERSION,
            "state": ACTED if verdict["acts"] else TOLD,
            "found_wall_s": time.time(),
            **verdict,
            "limits": limits,
            "ranks": ranks,
        }
        with contextlib.suppress(OSError):
            write_json(self._path, document)


def busy_worker(pids: Sequence[int]) -> tuple[int, tuple[Frame, ...]]:
    """Return the first loader worker that is in the middle of a fetch, and its stack inside of that."""
    taken = stacks.take_workers(sorted(pids)[:_MAX_WORKERS])
    for pid, one in sorted(taken.items()):
        names = [frame.name for frame in one.main]
        # A forked worker's stack still has the frames of the program that forked it at its bottom.
        inner = one.main[: names.index(_WORKER_LOOP)] if _WORKER_LOOP in names else ()
        if any(frame.file.endswith(_FETCH) for frame in inner):
            return pid, inner
    return 0, ()


def _numbers(sample: Sample) -> dict[str, Any]:
    """A sample without its stacks, of which those of the last one are given in full, and without its descendants."""
    return {name: value for name, value in vars(sample).items() if not name.endswith(("frames", "wanted_s"))}


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until there are no more."""
    first = json.loads(requests.readline() or "null")
    if not isinstance(first, dict):
        return
    session = Session(Limits(**first["limits"]), whole=first["whole"], path=first["path"])
    for line in requests:
        try:
            request = json.loads(line)
            standings = [progress_from(one) for one in request["standings"]]
            dirs = {int(rank): path for rank, path in request["dirs"].items()}
            verdict = session.look(
                standings,
                dirs,
                tell_from_s=request["tell_from_s"],
                others_idle_s=request["others_idle_s"],
                store_pid=request.get("store_pid"),
            )
            answer: dict[str, Any] = {"verdict": to_json(verdict)}
        except Exception as error:  # the agent counts it and judges by the clock alone
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
