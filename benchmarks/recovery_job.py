"""The job of benchmarks/recovery.py: a small DDP model that is saved every so many steps, goes on from what was saved,
and tells how far it is.

Nothing here knows which launcher started it. A note is one line: attempt, rank, pid, monotonic seconds after the first
optimizer step. Rank 0 keeps the number of its last step in the progress file.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Plain:
    """What scripts do by themselves: rank 0 saves with torch.save, all ranks load."""

    def __init__(self, path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        self._path, self._model, self._optimizer, self._every = path, model, optimizer, every
        self._done = 0

    def steps(self) -> Iterator[int]:
        with suppress(FileNotFoundError):
            saved = torch.load(self._path)
            self._model.load_state_dict(saved["model"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self._done = saved["step"]
        while True:
            self._done += 1
            yield self._done

    def step(self) -> None:
        if self._done % self._every == 0 and dist.get_rank() == 0:
            state = {
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "step": self._done,
            }
            torch.save(state, f"{self._path}.new")
            os.replace(f"{self._path}.new", self._path)


class Ours:
    """gpulaunch.checkpoint, in the directory that gpulaunch names."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        from gpulaunch.checkpoint import Checkpoint

        self._checkpoint = Checkpoint(model=model, optimizer=optimizer, every=every)
        self.step = self._checkpoint.step

    def steps(self) -> Iterator[int]:
        self._checkpoint.resume()
        return self._checkpoint.steps(1 << 40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notes")
    parser.add_argument("stop", help="a file whose appearance ends the job")
    parser.add_argument("--progress", default=os.devnull)
    parser.add_argument("--save", choices=("never", "plain", "gpulaunch"), default="never")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--pause-s", type=float, default=0.002)
    parser.add_argument("--deaf", type=int, default=-1, help="a rank that cannot be ended, until it is killed")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    deaf = rank == options.deaf and attempt == 0
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        train(options, rank, attempt)
    except RuntimeError:
        if not deaf:
            raise
        while True:  # as in a call into a library that never returns
            time.sleep(60)


def train(options: argparse.Namespace, rank: int, attempt: int) -> None:
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if options.save == "gpulaunch":
        saving: Plain | Ours = Ours(model, optimizer, options.every)
    else:
        every = options.every if options.save == "plain" else 1 << 40
        saving = Plain(os.path.join(os.getcwd(), "plain.pt"), model, optimizer, every)
    progress = os.open(options.progress, os.O_WRONLY | os.O_CREAT)
    noted = False
    done = torch.zeros(1)
    for step in saving.steps():
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        saving.step()
        if not noted:
            noted = True
            notes = os.open(options.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(notes, f"{attempt} {rank} {os.getpid()} {time.monotonic()}\n".encode())
            os.close(notes)
        if rank == 0:
            os.pwrite(progress, b"%20d" % step, 0)
        # All ranks must agree on the last step; a pause keeps many ranks on few cores from starving the launcher.
        done.fill_(float(rank == 0 and os.path.exists(options.stop)))
        dist.all_reduce(done)
        if done.item():
            break
        time.sleep(options.pause_s)


if __name__ == "__main__":
    main()
