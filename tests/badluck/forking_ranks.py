"""Ranks that fork in the middle of training, without exec, and train on in the child as well as in the parent.

Not a test: `python forking_ranks.py DIRECTORY` imports torch once and runs every story in a rank of its own, forked as
gpulaunch forks its ranks. A rank makes three steps before its story and four after it; a child makes five. Prints one
line for each rank: its name, its pid and its exit code.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from gpulaunch import mark
from gpulaunch.profiler.probe import inject, progress

DATA = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
STEPS_OF_A_CHILD = 5


class Training:
    """A model, and its batches one by one."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches: Iterator[Any] = iter(DataLoader(DATA, batch_size=8))

    def backward(self) -> None:
        inputs, targets = next(self.batches)
        torch.nn.functional.cross_entropy(self.model(inputs), targets).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.backward()
            self.step()


def child(training: Training) -> None:
    """Everything that a rank may do, done by what is not the rank."""
    training.steps(2)
    again = Training()
    again.batches = iter(DataLoader(DATA, batch_size=4, num_workers=1, multiprocessing_context="fork"))
    again.steps(3)
    for _ in range(5):
        gc.collect(0)
    torch.save(again.model.state_dict(), os.devnull)
    torch.zeros(4).to("meta")
    with mark.phase("forward"):
        mark.note("the child was here")
        mark.step()
    progress.checkpoint_saved(step=9, captured_ns=9, stall_ns=9, size_bytes=9)


def forked(work: Callable[[], None]) -> None:
    """Do this in a forked child, and wait for it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- the stories: each is between the third step and the fourth


def alone(training: Training) -> None:
    """Nobody forks."""


def between_steps(training: Training) -> None:
    forked(lambda: child(training))


def within_a_step(training: Training) -> None:
    """After the backward of the fourth step, before its optimizer; the child ends that step, too."""
    training.backward()

    def end_it() -> None:
        training.step()
        child(training)

    forked(end_it)
    training.step()


class ForksWhenSaved:
    """A part of a checkpoint that forks while it is written, and writes itself in both."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def __reduce__(self) -> Any:
        forked(lambda: child(self._training))
        return (int, ())


def within_a_save(training: Training) -> None:
    torch.save({"x": ForksWhenSaved(training)}, os.devnull)


def grandchild(training: Training) -> None:
    forked(lambda: forked(lambda: child(training)))


def by_multiprocessing(training: Training) -> None:
    process = multiprocessing.get_context("fork").Process(target=child, args=(training,))
    process.start()
    process.join()
    assert process.exitcode == 0


def with_a_ledger(training: Training) -> None:
    """torch's meta device counts as an accelerator (see `run`): the rank moves one tensor, its child another."""
    torch.zeros(2).to("meta")
    forked(lambda: child(training))


def orphan(training: Training) -> None:
    """The child goes on when its parent has ended: it waits until it is told to train."""
    ready, told = os.pipe()
    if os.fork() == 0:
        os.close(told)
        os.read(ready, 1)  # the end of the file: nobody holds the other end any more
        child(training)
        with open(os.path.join(os.environ["GPULAUNCH_CHANNEL_DIR"], "orphan"), "w") as done:
            done.write("done")
        os._exit(0)


def impostor(training: Training) -> None:
    """A child that takes itself for the rank: what this test would see if forked children were not switched off."""

    probe = inject.current()
    assert probe is not None

    def pretend() -> None:
        probe.thread = threading.get_ident()
        inject.adopt(probe)
        child(training)

    forked(pretend)


STORIES = (alone, between_steps, within_a_step, within_a_save, grandchild, by_multiprocessing, with_a_ledger, orphan,
           impostor)  # fmt: skip


def run(number: int, story: Callable[[Training], None]) -> None:
    os.environ["RANK"] = str(number)
    if story is with_a_ledger:
        os.environ["GPULAUNCH_DEVICE_TYPES"] = "meta"
    inject.arm()
    training = Training()
    training.steps(3)
    story(training)
    training.steps(3 if story is within_a_step else 4)


def main(directory: str) -> None:
    os.environ["GPULAUNCH_CHANNEL_DIR"] = directory
    torch.set_num_threads(1)  # threads of OpenMP are lost in a fork, and the child would wait for them
    gc.disable()  # collections are counted: those that a story makes, and no others
    for number, story in enumerate(STORIES):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run(number, story)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                probe = inject.current()
                probe.loader.flush() if probe is not None else None
                os._exit(code)
        print(story.__name__, pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
