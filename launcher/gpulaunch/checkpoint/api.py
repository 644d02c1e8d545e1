"""`Checkpoint`: the interface for the training loop, its work at each step boundary, and the order of a restore."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic_ns, sleep
from typing import Any, TypeVar

import torch
from torch import nn

from gpulaunch.checkpoint import loading, random_state, replicas
from gpulaunch.checkpoint.copies import Copies, snapshot
from gpulaunch.checkpoint.messages import (
    ENDED_BY_SIGTERM,
    REQUEUE,
    CheckpointError,
    DirectoryInUse,
    Preempted,
    say,
    why,
)
from gpulaunch.checkpoint.nodes import Nodes
from gpulaunch.checkpoint.notice import Notice
from gpulaunch.checkpoint.ownership import InUseError
from gpulaunch.checkpoint.position import Feed, Position, Replay, check_loader
from gpulaunch.checkpoint.ranks import Ranks
from gpulaunch.checkpoint.saver import TAKEN_OVER, UNREACHABLE, Saver, Snapshot
from gpulaunch.checkpoint.state import Subject
from gpulaunch.checkpoint.store import Keep, StaleError, Store
from gpulaunch.checkpoint.votes import Votes
from gpulaunch.profiler.probe import progress

Batch = TypeVar("Batch")

LAST_WAIT_S = 5.0
"""How long a program that exits early waits for a save in progress; its peers may be gone."""
LAST_SAVE_AGAIN_S = (1.0, 5.0)
"""How long after a failure the save at the end of the loop is retried."""
LONG_WAIT_S = 1.0
"""A wait for storage of this length is reported to the user."""


class Checkpoint:
    """Saves the state of a training program every `every` steps, and restores the program to it.

    Every rank creates one with the same arguments, and calls the same methods at the same steps.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Any = None,
        every: int | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        dir: str | os.PathLike[str] | None = None,  # noqa: A002 (what it is called everywhere)
        extra: Mapping[str, Any] | None = None,
        per_rank: Mapping[str, Any] | None = None,
        weights_only: bool = True,
    ) -> None:
        """Does nothing yet: `resume` begins.

        Args:
            model: as it is trained: wrapped in DDP or by `fully_shard`, compiled or not.
            optimizer: one, or several; after `fully_shard`, created as torch requires.
            scheduler: of the learning rate; one, or several.
            every: save interval in steps. None: only on preemption, on request, and at the end.
            keep: number of newest checkpoints to keep; None: all.
            keep_every: checkpoints of a step that is a multiple of this are kept permanently.
            dir: where to save. Default: $GPULAUNCH_CHECKPOINT_DIR, which gpulaunch sets; else checkpoints/<program>.
            extra: further objects with state_dict and load_state_dict that are the same on every rank (GradScaler, an
                average of the weights), by name.
            per_rank: such objects, or torch generators, of which each rank has its own, by name. They are not restored
                on a different number of ranks.
            weights_only: reject a checkpoint that holds anything but tensors, plain values and numpy's, since loading
                it may run code; as in torch.load. What this run has saved itself is always loaded.
        """
        for name, value, least in (("every", every, 1), ("keep", keep, 1), ("keep_every", keep_every, 1)):
            if value is not None and value < least:
                raise CheckpointError(f"Checkpoint({name}={value}): it must be at least {least}, or None")
        shared = {f"scheduler {i}": each for i, each in enumerate(_several(scheduler))} | dict(extra or {})
        for name, thing in (shared | dict(per_rank or {})).items():
            if not isinstance(thing, torch.Generator) and not hasattr(thing, "load_state_dict"):
                raise CheckpointError(f"{name!r} has no state_dict and load_state_dict, so it cannot be saved")
        self._subject = Subject(
            model=model, optimizers=tuple(_several(optimizer)), shared=shared, own=dict(per_rank or {})
        )
        self._every = every
        self._keep = Keep(newest=keep, every=keep_every)
        directory = os.fspath(dir) if dir is not None else default_directory(os.environ)
        if "://" in directory:
            raise CheckpointError(f"cannot save to {directory}: gpulaunch.checkpoint writes directories; pass dir=...")
        self._store = Store(directory)
        self._weights_only = weights_only
        self._copies = Copies()
        self._notice = Notice(os.environ)
        # Set by `resume`, since they need the process group.
        self._ranks: Ranks | None = None
        self._votes: Votes | None = None
        self._saver: Saver | None = None
        self._leads = False

        self._step = 0
        self._position = Position()
        self._feed: Feed | None = None
        self._in_loop = False
        self._rng: random_state.States | None = None  # to set where the saved run was; None: nothing to set
        self._told_to_save_less = self._told_to_step = False

    @property
    def directory(self) -> str:
        """Where checkpoints are saved."""
        return self._store.directory

    @property
    def steps_done(self) -> int:
        """Steps completed, including those of earlier runs."""
        return self._step

    def resume(self) -> int | None:
        """Load the newest checkpoint, if any, and return its step. Every rank calls it, before the loop.

        Raises:
            CheckpointError: the checkpoint is not of this program, or cannot be read.
            DirectoryInUse: another live run saves in this directory.
        """
        if self._ranks is not None:
            raise CheckpointError("resume() was called twice; call it once, before the training loop")
        ranks = self._ranks = Ranks()
        self._votes = Votes(self._notice, ranks.vote if ranks.size > 1 else None)
        nodes = Nodes(ranks, os.environ, self.directory)
        self._leads = nodes.leads
        saver = self._saver = Saver(self._store, ranks, nodes, self._keep)
        self._notice.listen()
        progress.listens()
        path, refused = nodes.from_leader(self._claim_and_choose(saver) if nodes.leads else ("", ""))
        if nodes.several:
            refused = nodes.first_problem(refused)
            refused = refused or nodes.first_problem(self._count_alike(saver, ranks, nodes))
        if refused:
            if ranks.first:
                say(refused)
            raise DirectoryInUse(refused)
        atexit.register(saver.wait, LAST_WAIT_S)
        if nodes.replicates:
            path = replicas.whole_everywhere(path, self._store, ranks, nodes, self._keep, os.environ)
        if not path:
            return None
        loaded = loading.load(path, self._subject, ranks, weights_only=self._weights_only, run=self._store.owner.run)
        self._step = loaded.step
        self._position = Position(**loaded.own["position"])
        self._rng = loaded.own["rng"]
        saver.spare = os.path.realpath(path)
        saver.saved = self._mark()
        if loaded.world_size != ranks.size:
            random_state.reseed(loaded.step, ranks.rank, ranks.size)
            self._rng = random_state.capture()
        progress.resumed(loaded.step)
        if ranks.first:
            say(f"resumed from step {loaded.step} ({path})")
        return loaded.step

    def epochs(self, count: int) -> Generator[int]:
        """Yield the epochs from the present one up to `count`. At the end the state is saved once more."""
        self._need_resume("epochs()")
        with self._listening():
            while self._position.epoch < count:
                if self._position.rng is None:
                    self._restore_rng()
                before = self._step
                yield self._position.epoch
                self._check_stepped(before)
                feed, self._feed, self._in_loop = self._feed, None, False
                self._position = feed.next_epoch() if feed else Position(epoch=self._position.epoch + 1)
            self.finish()

    def batches(self, loader: Iterable[Batch], sampler: Any = None, *, replay: Replay = "index") -> Generator[Batch]:
        """Yield one epoch's batches, from the present position on.

        Calls `set_epoch` of the loader's samplers, as DistributedSampler requires.

        Args:
            loader: a DataLoader, or anything that can be iterated again with the same result.
            sampler: the sampler that determines the order, if it is not the loader's own attribute.
            replay: how batches that were already trained on are skipped. "index": without loading them. "load":
                they are loaded and discarded, for augmentations that draw random numbers in workers.
        """
        ranks = self._need_resume("batches()")
        check_loader(loader)
        if self._feed is not None:
            raise CheckpointError("batches() was called twice within an epoch; iterate over epochs() around it")
        again = self._position.rng is not None
        self._feed = Feed(loader, sampler, self._position, ranks.size)
        self._feed.open(replay)
        if again:
            self._restore_rng()
        self._in_loop = True
        yield from self._feed

    def steps(self, count: int) -> Generator[int]:
        """Yield the steps from the next one up to `count`, counted from 1, for programs without a loader or epochs."""
        self._need_resume("steps()")
        self._in_loop = True
        self._restore_rng()
        with self._listening():
            while self._step < count:
                before = self._step
                yield before + 1
                if self._step == before:
                    raise CheckpointError("call step() at the end of each iteration of the loop over steps()")
            self.finish()

    def step(self, *, save: bool = False) -> None:
        """Call after each training step: after `optimizer.step()`, last in the loop. Saves if it is time.

        Args:
            save: save now. The same on every rank.

        Raises:
            Preempted: the job was asked to end, and the state is saved.
        """
        saver, votes = self._saver, self._votes
        if saver is None or votes is None:
            raise CheckpointError("step() was called before resume(); call resume() once, before the training loop")
        if not self._in_loop:
            raise CheckpointError("step() was called outside of the loop over batches() or steps()")
        self._step += 1
        end, asked = votes.at_boundary()
        if end:
            self._save(saver, wait=True)
            raise self._preempted(saver)
        if save or asked or (self._every is not None and self._step % self._every == 0):
            self._save(saver)

    def finish(self) -> None:
        """Save the present state of the loop, and return when that is done. Only for a loop that was left early, by
        `break`: `epochs` and `steps` do it at their end. All ranks call it.

        Raises:
            CheckpointError: the save failed, and so did its retry: the end of the training is lost.
        """
        saver, votes = self._saver, self._votes
        if saver is None or votes is None:
            raise CheckpointError("finish() was called before resume()")
        self._in_loop = False
        votes.close()
        if not self._step:
            return
        for pause_s in (0.0, *LAST_SAVE_AGAIN_S):
            sleep(pause_s)
            self._save(saver, wait=True)
            if saver.saved == self._mark():
                return
            if saver.stale or saver.problem == UNREACHABLE:
                break
        raise CheckpointError(f"the last step, {self._step}, was not saved in {self.directory}: {saver.problem}")

    def wait(self) -> None:
        """Return when no save is in progress: each is then complete, or has failed."""
        if self._saver is not None:
            self._saver.wait()

    # -- internal steps

    def _check_stepped(self, before: int) -> None:
        """Warn once if an epoch had batches but no step: then nothing is saved, which would go unnoticed."""
        if self._feed is None or self._step > before or self._told_to_step:
            return
        self._told_to_step = True
        if self._need_resume("epochs()").first:
            say("an epoch ended without a call to step(), so nothing is saved; call it after optimizer.step()")

    @contextmanager
    def _listening(self) -> Generator[None]:
        """Defer a SIGTERM to the next step boundary while there is one to wait for; not elsewhere."""
        self._notice.listen()
        try:
            yield
        finally:
            self._notice.unlisten()

    def _need_resume(self, what: str) -> Ranks:
        if self._ranks is None:
            raise CheckpointError(f"{what} was called before resume(); call resume() once, before the training loop")
        return self._ranks

    def _claim_and_choose(self, saver: Saver) -> tuple[str, str]:
        """On a leader: take over the directory, then look for checkpoints, since no other run can add any now: (the
        checkpoint to load, "" or why the directory is unavailable)."""
        refused = self._claim(saver)
        return "" if refused else loading.choose(os.environ, self._store), refused

    def _claim(self, saver: Saver) -> str:
        """Take over the directory; "" or why it is unavailable."""
        try:
            self._store.claim()
        except (InUseError, StaleError) as err:
            return str(err) if isinstance(err, InUseError) else f"{self.directory} was {TAKEN_OVER} {err}"
        except OSError as err:
            saver.failed(self._step, why(err, self.directory))
        return ""

    def _count_alike(self, saver: Saver, ranks: Ranks, nodes: Nodes) -> str:
        """Let the directories of all nodes have the same generation, so that the newest checkpoint is the newest
        everywhere; "" or why one is unavailable."""
        claimed = self._store.generation
        self._store.least_generation = max(ranks.gather(claimed or 0))
        is_behind = nodes.leads and claimed is not None and claimed < self._store.least_generation
        return self._claim(saver) if is_behind else ""

    def _restore_rng(self) -> None:
        """Restore the random number generators to the saved run's, once."""
        if self._rng is not None:
            random_state.restore(self._rng)
            self._rng = None

    def _mark(self) -> tuple[int, bool]:
        """The values that distinguish the states of one run."""
        return self._step, self._position.rng is None and self._feed is None

    def _save(self, saver: Saver, *, wait: bool = False) -> None:
        """Copy the state and save it in the background; with `wait`, return when that is done."""
        began_ns = monotonic_ns()
        progress.checkpoint_began()
        try:
            # A due save waits for the previous one instead of being skipped: whether that is done differs from rank to
            # rank, and agreement would need a vote; and storage that cannot keep up shows as a stall.
            saver.wait()
            waited_s = (monotonic_ns() - began_ns) / 1e9
            if not saver.stale and saver.saved != self._mark():
                saver.start(self._snapshot())
            if wait:
                saver.wait()
        finally:
            progress.checkpoint_stalled(monotonic_ns() - began_ns)
        if waited_s > LONG_WAIT_S and not self._told_to_save_less:
            self._told_to_save_less = True
            if self._need_resume("step()").first:
                say(f"step {self._step} waited {waited_s:.0f} s for the previous save; save less often (every=...)")

    def _snapshot(self) -> Snapshot:
        step, over = self._mark()
        ranks = self._need_resume("step()")
        skeleton, tensors = self._subject.take()
        copies = self._copies.take(tensors)
        position = self._feed.position() if self._feed else replace(self._position, world_size=ranks.size)
        return Snapshot(
            step=step,
            over=over,
            captured_ns=monotonic_ns(),
            tensors=copies,
            shared={"version": 1, "skeleton": skeleton},
            own={
                "version": 1,
                "rng": random_state.capture(),
                "position": snapshot(vars(position), "position"),
                "own": snapshot(self._subject.take_own(), "per_rank"),
                "buffers": snapshot(self._subject.buffers(tensors), "buffers") if ranks.size > 1 else {},
            },
            ready=self._copies.wait,
        )

    def _preempted(self, saver: Saver) -> Preempted:
        """The exception to end with, after the last save was tried."""
        ranks = self._need_resume("step()")
        if saver.saved == self._mark():
            if ranks.first:
                say(f"preempted: saved at step {self._step}, ending with {REQUEUE}")
            return Preempted(REQUEUE)
        of_nodes = ranks.gather(self._store.complete()[:1] if self._leads else [])
        older = next((each for each in of_nodes if each), [])
        code = REQUEUE if older else ENDED_BY_SIGTERM
        if ranks.first:
            left = f"the newest checkpoint is of step {older[0].step}" if older else "there is no checkpoint"
            say(f"preempted, but step {self._step} could not be saved; {left}, ending with {code}")
        return Preempted(code)


def default_directory(environ: Mapping[str, str]) -> str:
    """The checkpoint directory of a program that does not name one."""
    program = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    return environ.get("GPULAUNCH_CHECKPOINT_DIR") or os.path.join("checkpoints", program or "program")


def _several(one_or_more: Any) -> Sequence[Any]:
    if one_or_more is None:
        return ()
    return tuple(one_or_more) if isinstance(one_or_more, (list, tuple)) else (one_or_more,)
