"""A training program as users write them, that waits once, after 50 fast steps, as healthy programs do.

    gpulaunch --nproc 2 waiting_program.py WHAT [PLACE]

PLACE: a pipe that somebody reads from late, for "save"; the address of a slow server, for "download".
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
import urllib.request

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 100
WAITS_AT = 50
BATCH = 4
RETRY_S = (4, 8, 16, 32)  # 60 s in all
WAIT_S = 240
SIMULATOR = f"import sys, time; time.sleep({WAIT_S}); sys.stdout.write('rollouts'); sys.stdout.flush()"
# Where others have the cores, a compiler gets a quarter of one.
COMPILER = "import time; end = time.time() + 70\nwhile time.time() < end: sum(range(200_000)), time.sleep(0.015)"


class Remote(Dataset):
    """Samples from a storage that is away for a minute, once."""

    def __init__(self, flaky: bool) -> None:
        self._flaky = flaky

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._flaky and index == WAITS_AT * BATCH:
            for seconds in RETRY_S:
                time.sleep(seconds)
        return torch.full((8,), index / STEPS)


def collect_rollouts(how: str) -> None:
    """Wait for a simulator: for its pipe, its socket, or the file that it will have written."""
    if how == "sleep":
        time.sleep(WAIT_S)
    elif how == "recv":
        mine, theirs = socket.socketpair()
        with subprocess.Popen([sys.executable, "-c", SIMULATOR], stdout=theirs):
            theirs.close()
            assert mine.recv(100) == b"rollouts"
    elif how == "poll":
        with subprocess.Popen([sys.executable, "-c", SIMULATOR], stdout=subprocess.PIPE) as simulator:
            poller = select.poll()
            poller.register(simulator.stdout, select.POLLIN)
            while not poller.poll(10_000):
                pass


def validate(model: torch.nn.Module) -> None:
    """The score of a model, from a tool that takes its time."""
    with torch.no_grad():
        model(torch.ones(1, 8))
    subprocess.run(["sleep", "150"], check=True)


def save_checkpoint(model: torch.nn.Module, path: str) -> None:
    """Save to a place that takes it late."""
    torch.save(model.state_dict(), path)


def main() -> None:
    what, place = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    flaky = what == "dataset-all" or (what in ("dataset", "worker") and rank == 0)
    loader = DataLoader(Remote(flaky), batch_size=BATCH, num_workers=int(what == "worker"))
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, batch in enumerate(loader):
        if step == WAITS_AT:
            if what.endswith("-all") or rank == 0:
                collect_rollouts(what.removesuffix("-all"))
            if what == "validation" and rank == 0:
                validate(model.module)
            if what == "save" and rank == 0:
                save_checkpoint(model.module, place)
            if what == "download" and rank == 0:
                with urllib.request.urlopen(place) as answer:
                    assert answer.read() == b"weights"
            if what == "compile" and rank == 0:
                subprocess.run([sys.executable, "-c", COMPILER], check=True, preexec_fn=lambda: os.nice(19))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    print(f"rank {rank} trained {step + 1} steps")


if __name__ == "__main__":
    main()
