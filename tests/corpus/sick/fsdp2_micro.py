"""FSDP2 over a deep click-through tower, four micro-batches an optimizer step.
Author's remark: "moved from DDP to fully_shard; accumulation is just the same loop"."""

# ranks: 2
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
ACCUMULATE = 4


class Tower(nn.Module):
    def __init__(self, width=448, depth=2):
        super().__init__()
        self.inp = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = x + b(x)
        return self.head(x).squeeze(-1)


def micro_batch(g):
    x = torch.randn(48, 64, generator=g)
    return x, (x[:, 0] * x[:, 1] > 0).float()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Tower()
    for b in model.blocks:
        fully_shard(b, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(rank)

    start = time.perf_counter()
    mark = None
    step = 0
    flag = torch.zeros(1)
    while flag.item() == 0:
        for micro in range(ACCUMULATE):
            if CURED:
                model.set_requires_gradient_sync(micro == ACCUMULATE - 1)
            x, y = micro_batch(g)
            loss = F.binary_cross_entropy_with_logits(model(x), y) / ACCUMULATE
            loss.backward()  # cause: reduced-in-accumulation
        opt.step()
        opt.zero_grad()
        step += 1
        elapsed = time.perf_counter() - start
        if mark is None and elapsed > 2:
            mark = (time.perf_counter(), step)
        if step % 5 == 0:
            flag[0] = 1.0 if elapsed > SECONDS else 0.0
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"step_ms {1000 * (time.perf_counter() - mark[0]) / (step - mark[1])}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
