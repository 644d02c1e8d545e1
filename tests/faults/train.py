"""A small DDP job that loads, steps, saves and resumes, and does one wrong thing to itself when it is told to.

    gpulaunch --nproc 2 train.py OUT --steps 60 [--save-every 10] [--plant WHAT --rank 1 --at 20] [--hold]

Every rank appends one line for each step to OUT/trace-<rank>.jsonl, with the loss and the samples that made it. What is
planted happens once in a job, whatever is restarted: OUT/planted says that it has. With --hold the last step waits for
OUT/released, so that a fault from outside, however late it comes, finds the job at work.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 4
STEPS_PER_EPOCH = 15
FOREVER_S = 3600
STALL_S = 40
SHM_BYTES = 64 << 20


class Samples(Dataset):
    """Numbers made from their index; the item says its index, so that the order can be checked."""

    def __init__(self, size: int, plan: Plan) -> None:
        self._size = size
        self._plan = plan
        self._served = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self._served += 1
        if self._served > self._plan.at * BATCH and self._plan.due("hang-dataset"):
            time.sleep(FOREVER_S)
        if self._served > self._plan.at * BATCH and self._plan.due("stall-dataset"):
            time.sleep(STALL_S)
        if self._plan.what == "big-batch" and self._plan.mine:
            return torch.ones(SHM_BYTES // 4), index
        return torch.sin(torch.arange(8) * (index + 1.0)), index


class Plan:
    """What is to go wrong, where and when."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.what: str = args.plant
        self.at: int = args.at
        self.mine = rank == args.rank
        self._done = args.out / "planted"

    def due(self, what: str) -> bool:
        """Whether this is the one time that `what` happens on this rank."""
        if self.what != what or not self.mine:
            return False
        try:
            self._done.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def go_wrong(plan: Plan, group: dist.ProcessGroup) -> None:
    """Do what is planned for this step."""
    if plan.due("exception") or (plan.what == "always" and plan.mine):
        raise ValueError("planted")
    if plan.due("os-exit"):
        os._exit(7)
    if plan.due("segfault"):
        ctypes.string_at(0)
    if plan.due("exit-0"):
        sys.exit(0)
    if plan.due("deadlock"):
        dist.all_reduce(torch.ones(1), group=group)  # the others wait for this rank in DDP's own
    if plan.due("hold-gil"):
        ctypes.PyDLL(None).sleep(FOREVER_S)
    if plan.due("hog"):
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20)) * 16)
    if plan.due("grandchild"):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            Path(plan._done.with_name("grandchild")).write_text(str(os.getpid()))
            time.sleep(FOREVER_S)
        while not plan._done.with_name("grandchild").exists():
            time.sleep(0.01)
        raise ValueError("planted")


def deaf(args: argparse.Namespace, rank: int) -> None:
    """The others leave the job alone in a way that SIGTERM does not reach; then this rank fails."""
    stuck = args.out / f"stuck-{rank}"
    if rank != args.rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stuck.touch()
        time.sleep(FOREVER_S)
    while len(list(args.out.glob("stuck-*"))) < dist.get_world_size() - 1:
        time.sleep(0.01)
    raise ValueError("planted")


def epochs(args: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader):
    """(step, batch) from where the job is, and what to call after each step."""
    total = args.steps // STEPS_PER_EPOCH
    if not args.save_every:

        def plain() -> Iterator[tuple[int, list[torch.Tensor]]]:
            step = 0
            for epoch in range(total):
                loader.sampler.set_epoch(epoch)
                for batch in loader:
                    step += 1
                    yield step, batch

        return plain(), lambda: None
    from gpulaunch.checkpoint import Checkpoint

    checkpoint = Checkpoint(model=model, optimizer=optimizer, every=args.save_every, keep=None if args.keep_all else 3)
    checkpoint.resume()

    def resumable() -> Iterator[tuple[int, list[torch.Tensor]]]:
        for _ in checkpoint.epochs(total):
            for batch in checkpoint.batches(loader):
                yield checkpoint.steps_done + 1, batch

    return resumable(), checkpoint.step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--keep-all", action="store_true")
    parser.add_argument("--pace", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--plant", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--at", type=int, default=20)
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--deaf-to", default="")
    args = parser.parse_args()

    for name in filter(None, args.deaf_to.split(",")):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    other_group = dist.new_group(list(range(ranks)))
    plan = Plan(args, rank)
    samples = Samples(ranks * STEPS_PER_EPOCH * BATCH, plan)
    sampler = DistributedSampler(samples, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(samples, batch_size=BATCH, sampler=sampler, num_workers=args.workers)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trace = os.open(args.out / f"trace-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    attempt = int(os.environ.get("GPULAUNCH_ATTEMPT") or os.environ["TORCHELASTIC_RESTART_COUNT"])
    leaked = []
    steps, after_step = epochs(args, model, optimizer, loader)
    for step, (inputs, indices) in steps:
        if step == args.at and args.plant == "deaf" and attempt == 0:
            deaf(args, rank)
        if step == args.at:
            go_wrong(plan, other_group)
        if args.plant == "leak":
            leaked.append(bytearray(1 << 20))
        if step == args.steps and args.hold:
            while not (args.out / "released").exists():
                time.sleep(0.01)
        time.sleep(args.pace)
        optimizer.zero_grad()
        loss = model(inputs[..., :8]).square().mean()
        loss.backward()
        optimizer.step()
        line = {
            "attempt": attempt,
            "step": step,
            "loss": loss.item().hex(),
            "samples": indices.tolist(),
            "at_s": time.clock_gettime(time.CLOCK_MONOTONIC),
        }
        os.write(trace, json.dumps(line).encode() + b"\n")
        after_step()
    dist.barrier()
    dist.destroy_process_group()
    if plan.due("teardown"):
        ctypes.PyDLL(None).sleep(FOREVER_S)


if __name__ == "__main__":
    main()
