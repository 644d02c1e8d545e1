"""Between two attempts: whether there is another, on which GPUs, and from which checkpoint it resumes.

Collects the input for the packages that decide (policy, checkpoint, gpus), calls them, and reports to the user.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.checkpoint.find import Checkpoint, Search
from gpulaunch.launcher.checkpoint.finder import Finder, SearchRequest
from gpulaunch.launcher.checkpoint.resume import resume_args
from gpulaunch.launcher.gpus import health, memory
from gpulaunch.launcher.job.host_info import Gpu
from gpulaunch.launcher.loop.files import shown
from gpulaunch.launcher.rendezvous.plan import Offer
from gpulaunch.profiler.channel.segment import SegmentSnapshot

_OFFERS = 4
"""How many checkpoints a node of a multi-node job offers: the newest may not yet be visible on another node."""
_OFFERS_BESIDE_OTHERS = 16
"""With --replicate, where the program's own are left out."""
_SEARCHES = 3
"""How often unresponsive storage is searched before a restart is given up; it never restarts from scratch."""
_VERIFY_S = 86_400.0
_MEMORY_BOUND_S = 30.0
"""How long to wait for dead ranks' GPU memory to be freed before the next attempt is started anyway."""
_BASELINE_BOUND_S = 5.0
_LAST_LOOK_S, _LAST_READ_S = 5.0, 3.0
"""Short at the end: a job manager has its own limit. Earlier verification results are reused."""
_WALL_SLACK_S = 1.0
"""File times may be one clock tick older than the moment at which the file was made."""
_ELSEWHERE = "; if it resumes from another directory by itself, specify that directory with --checkpoint-dir"


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What the ranks of an attempt are given about the checkpoint to resume from."""

    path: str | None = None
    """None: none is known; "": none is wanted."""
    args: tuple[str, ...] = ()
    named: bool = False
    """The user has named it: no other will do."""


_MOST = 2**31 - 1
"""What a message can carry."""


def _offer(key: str, one: Checkpoint) -> Offer:
    return Offer(key=key, generation=min(one.generation, _MOST), step=min(one.step or 0, _MOST))


class Recovery:
    """What a run has learned from its attempts."""

    def __init__(self, context: RunContext, *, gpus: tuple[Gpu, ...], say: Callable[[str], None]) -> None:
        """`gpus`: the GPUs that the ranks may see, in their order."""
        spec = context.spec
        self._context = context
        self._loop = context.loop
        self._spec = spec
        self._gpus = gpus
        self._say = say
        self._finder = Finder(context.loop)
        self._verifier = Finder(context.loop)
        self._memory = memory.MemoryWait(context.loop)
        self._baseline: Mapping[str, int] = {}
        self._dead_pids: set[int] = set()
        self._offered: dict[str, Checkpoint] = {}
        self._named: Checkpoint | None = None  # of --resume PATH
        self._complained: set[tuple[str, str]] = set()
        self._damaged: dict[str, float] = {}
        """Path -> save time of a checkpoint that was resumed from unverified and then turned out to be damaged."""
        self._searches = 0
        self._began_s = 0.0
        self._run_began_wall_s = time.time() - _WALL_SLACK_S
        self._steps: int | None = None
        self._own_resumed_step: int | None = None
        self.resumed: Checkpoint | None = None
        """What the present attempt resumes from."""
        self.visible_devices: tuple[str, ...] = ()
        """Which GPUs the next attempt sees, in order; () for those it would see anyway."""

    @property
    def pids(self) -> frozenset[int]:
        """The running helpers."""
        return frozenset(pid for pid in (self._finder.pid, self._verifier.pid, self._memory.pid) if pid is not None)

    @property
    def resumed_step(self) -> int | None:
        """The step that the current attempt started with, if known."""
        if self._own_resumed_step is not None:
            return self._own_resumed_step
        return self.resumed.step if self.resumed is not None else None

    # -- what happened

    def began(self) -> None:
        """The ranks of an attempt are being started."""
        self._began_s = self._loop.now()
        self._steps = self._own_resumed_step = None
        self._dead_pids.clear()

    def rank_ended(self, pid: int, segment: SegmentSnapshot | None) -> None:
        """A rank has ended; `segment` shows how far it got."""
        self._dead_pids.add(pid)
        if segment is None:
            return
        if segment.steps_made:
            self._steps = max(self._steps or 0, segment.steps_made)
        if segment.checkpoint.resumed_step:
            self._own_resumed_step = max(self._own_resumed_step or 0, segment.checkpoint.resumed_step)

    @property
    def last_step(self) -> int | None:
        """The last step of the present attempt, counted from the beginning of the training."""
        return None if self._steps is None else self._steps + (self.resumed_step or 0)

    @property
    def uptime_s(self) -> float:
        """For how long the ranks of the present attempt have run."""
        return self._loop.now() - self._began_s

    # -- what comes next

    def prepare(self, attempt: int, ready: Callable[[tuple[Offer, ...]], None], refused: Callable[[str], None]) -> None:
        """Check that the GPUs are free, search for checkpoints, and pass the best ones to `ready`.

        `refused`: called with the reason if the one that the user named cannot be used.
        """
        waits = {"checkpoints", "cards"}
        offers: list[Offer] = []

        def done(what: str) -> None:
            waits.discard(what)
            if not waits:
                ready(tuple(offers))

        def found(search: Search) -> None:
            named = self._spec.resume not in ("auto", "never")
            if named and attempt == 0 and not search.found:
                why = search.error or next((one.why for one in search.skipped), "it is not complete")
                refused(f"--resume {self._spec.resume}: {why}; specify another checkpoint, auto or never")
                return
            usable = self._usable(search, attempt)
            if self._spec.replicates:
                usable = self._without_foreign(usable)
            self._searches += 1
            is_unknown = bool(search.error) and not usable and not (attempt == 0 and self._has_no_directory())
            if is_unknown and (attempt == 0 or self._searches >= _SEARCHES):
                refused(f"{search.error}; to start from scratch: --resume never")
                return
            self._tell_of(search)
            if is_unknown:
                self._say("searching again: a checkpoint may exist")
                self._look_for_checkpoints(attempt, found)
                return
            self._offered = {f"{one.identity}:{one.key}" if one.identity else one.key: one for one in usable}
            offers.extend(_offer(key, one) for key, one in self._offered.items())
            done("checkpoints")

        self._searches = 0
        self._look_for_checkpoints(attempt, found)
        if attempt == 0:
            self._memory.measure(self._gpus, _BASELINE_BOUND_S, lambda used: done(self._set_baseline(used)))
        else:
            self._memory.start(
                self._gpus, self._dead_pids, self._baseline, _MEMORY_BOUND_S, lambda why: done(self._cards_free(why))
            )

    def choose(self, key: str, *, node_rank: int = 0, nnodes: int = 1) -> Resume:
        """All nodes have agreed on this checkpoint among those offered ("" for none)."""
        if self._spec.resume == "never":
            return Resume(path="")
        self.resumed = self._offered.get(key)
        if self.resumed is None and key and self._spec.replicates:
            self._say(f"resuming from a checkpoint that another node has: {key.partition(':')[2]}")
            return Resume(path="", named=self._named is not None)
        if self.resumed is None:
            if self._offered:
                newest = next(iter(self._offered.values()))
                self._say(
                    f"starting from scratch: no checkpoint is the same on every node; the newest on this node is "
                    f"{newest.key} ({newest.identity}); is the checkpoint directory shared?"
                )
            elif self._began_s:
                where = ", ".join(map(shown, self._context.checkpoint_dirs))
                elsewhere = "" if self._spec.checkpoint_dirs or self._spec.resume_arg else _ELSEWHERE
                self._say(f"no complete checkpoint in {where}: the program starts without one{elsewhere}")
            return Resume()
        one, template = self.resumed, self._spec.resume_arg
        at = "" if one.step is None else f" (step {one.step})"
        self._say(f"resuming from {shown(one.path)}{at}")
        self._context.rundir.event("resuming", path=one.path, step=one.step, verified=one.verified)
        if not one.verified and not self._spec.replicates:  # its ranks read all of it
            self._verify(one, (node_rank, nnodes))
        try:
            args = resume_args(template, one.path) if template else []
        except ValueError as err:
            self._say(f"the checkpoint is not passed to the program: {err}")
            args = []
        return Resume(path=one.path, args=tuple(args), named=one is self._named)

    def find_final(self, done: Callable[[Checkpoint | None], None], *, ok: bool) -> None:
        """At the end: pass the checkpoint that the job could be resumed from to `done`; after a successful end (`ok`)
        the newest in the named directories, for the summary."""

        def found(search: Search) -> None:
            if not ok:
                self._tell_of(search)
            done(next(iter(search.found), None))

        if self._spec.resume == "never" or (ok and not self._spec.checkpoint_dirs):
            done(None)
        else:
            ask = replace(self._ask(limit=1, path=""), content_s=_LAST_READ_S, timeout_s=_LAST_LOOK_S)
            self._finder.start(ask, found)

    def cancel(self) -> None:
        """Drop pending requests: their answer is no longer needed."""
        self._finder.cancel()
        self._verifier.cancel()
        self._memory.cancel()

    def _verify(self, one: Checkpoint, share: tuple[int, int]) -> None:
        """Read everything the ranks resume from, in the background: there was no time before, or, on several nodes, the
        choice was not known. Each node reads its share of the files."""
        if self._spec.nnodes == 1:
            self._say(
                f"{shown(one.path)} is complete by its names, sizes and manifest; there was no time to read all of it "
                f"(--resume-search-timeout {self._spec.resume_search_s:g}), it is read in the background"
            )

        def verified(search: Search) -> None:
            for found in search.skipped:
                self._damaged[one.path] = one.saved_s
                self._say(
                    f"WARNING: {shown(one.path)}, from which this attempt resumed, is damaged: {found.why}; the next "
                    "attempt skips it. Results computed from it cannot be trusted: stop the job, and specify an older "
                    "checkpoint (--resume PATH)"
                )
                self._context.rundir.event("checkpoint_damaged", path=one.path, format=one.format, why=found.why)

        ask = replace(self._ask(limit=1, path=one.path), content_s=_VERIFY_S, identify=False)
        ask = replace(ask, share=share, is_behind=True)
        self._verifier.start(ask, verified)

    def _look_for_checkpoints(self, attempt: int, found: Callable[[Search], None]) -> None:
        resume = self._spec.resume
        if resume == "never":
            found(Search(found=(), skipped=(), error=""))
            return
        path = resume if resume != "auto" and attempt == 0 else ""
        limit = 1 if self._spec.nnodes == 1 else _OFFERS_BESIDE_OTHERS if self._spec.replicates else _OFFERS
        self._finder.start(self._ask(limit=limit, path=path), found)

    def _ask(self, *, limit: int, path: str) -> SearchRequest:
        return SearchRequest(
            where=self._context.checkpoint_dirs,
            named=path or None,
            pattern=self._spec.checkpoint_pattern,
            limit=limit,
            memory=os.path.join(self._context.rundir.path, "verified.json"),
            # Several nodes first agree on one, then read only that one.
            content_s=self._spec.resume_search_s if self._spec.nnodes == 1 else 0,
            identify=self._spec.nnodes > 1,
            damaged=tuple(self._damaged.items()),
            since_s=None if self._spec.resume == "auto" or path else self._run_began_wall_s,
        )

    def _has_no_directory(self) -> bool:
        """Whether nothing can be found because the default directory does not exist yet. A specified one may be a mount
        that appears late."""
        if self._spec.checkpoint_dirs:
            return False
        try:
            os.stat(self._context.checkpoint_dirs[0])
        except OSError as err:
            return isinstance(err, FileNotFoundError)
        return False

    def _usable(self, search: Search, attempt: int) -> tuple[Checkpoint, ...]:
        """After `--resume PATH`: what this run has saved since, or PATH again if nothing."""
        if self._spec.resume != "auto" and attempt == 0:
            self._named = next(iter(search.found), None)
        if search.error and not search.found and self.resumed is not None and self.resumed.path not in self._damaged:
            return (self.resumed,)  # it existed a moment ago: better than starting over
        return search.found or ((self._named,) if self._named is not None else ())

    def _without_foreign(self, usable: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
        """Those that can be copied between nodes: of gpulaunch.checkpoint."""
        own = tuple(one for one in usable if one.format == "gpulaunch")
        if usable and not own and (usable[0].path, "") not in self._complained:
            self._complained.add((usable[0].path, ""))
            self._say(f"{shown(usable[0].path)} is not used: --replicate copies only those of gpulaunch.checkpoint")
        return own

    def _tell_of(self, search: Search) -> None:
        if search.error:
            self._say(f"looking for checkpoints: {search.error}")
        for one in search.skipped:
            if (one.path, one.why) not in self._complained:
                self._complained.add((one.path, one.why))
                self._say(f"checkpoint {shown(one.path)} is skipped: {one.why}")
                self._context.rundir.event("checkpoint_skipped", path=one.path, format=one.format, why=one.why)

    def _set_baseline(self, used: dict[str, int]) -> str:
        self._baseline = used
        return "cards"

    def _cards_free(self, complaint: str) -> str:
        """The wait for the GPUs is over; check whether a rank has to move to another one."""
        if complaint:
            self._say(complaint)
        if self._gpus and self._context.segments is not None:
            found = health.read(self._context.segments.directory)
            placement = health.assign_cards(self._gpus, self._spec.nproc, found, busy=memory.busy(self._baseline))
            for sentence in map(health.sentence, placement.moves):
                if (sentence, "") not in self._complained:
                    self._complained.add((sentence, ""))
                    self._say(sentence)
            self.visible_devices = placement.visible
        return "cards"
