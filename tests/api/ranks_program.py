"""A program of several ranks: ranks_program.py KIND DIRECTORY STEPS [WHAT]

KIND is ddp or fsdp. Prints a digest of the whole state, model and optimizer, where it begins and where it ends.
WHAT happens on rank 1: `sigterm` at step 5; `full` disk at steps 2 and 3.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gpulaunch.checkpoint import Checkpoint


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every parameter, buffer and moment, whole; collective."""
    found = hashlib.sha256()
    state = [state[name] for state in optimizer.state.values() for name in sorted(state)]
    for value in [*model.parameters(), *model.buffers(), *state]:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    kind, directory, steps, what = [*sys.argv[1:], ""][:4]
    if what:
        os.environ.pop("GPULAUNCH_CONTROL", None)  # these ranks are told by nobody but themselves
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Dropout(0.2))
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    else:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(rank)

    ckpt = Checkpoint(model=net, optimizer=optimizer, dir=directory, keep=None, every=1 if what == "full" else None)
    resumed = ckpt.resume()
    print("BEGIN", resumed, digest(net, optimizer), flush=True)
    for step in ckpt.steps(int(steps)):
        net(torch.rand(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if what == "sigterm" and rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        if what == "full" and rank == 1 and step in (2, 4):
            ckpt.wait()
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 if step == 2 else most, most))
        ckpt.step()
    print("END", ckpt.steps_done, digest(net, optimizer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
