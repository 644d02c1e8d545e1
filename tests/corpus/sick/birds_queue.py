"""Momentum contrast (MoCo) on crops of bird photographs, two processes, each with a queue of negatives.

"One GPU does 30 steps a second, two do 15 each; is that the price of DDP?"
"""
# ranks: 2

import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def encoder(dim):
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2, padding=1),
        nn.GroupNorm(4, 24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.GroupNorm(4, 48),
        nn.ReLU(),
        nn.Conv2d(48, 96, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, dim),
    )


class MoCo(nn.Module):
    def __init__(self, dim=128, length=65536, momentum=0.99, temperature=0.1):
        super().__init__()
        self.momentum, self.temperature = momentum, temperature
        self.query = encoder(dim)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, length), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, first, second):
        q = F.normalize(self.query(first), dim=1)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.key.parameters()), list(self.query.parameters()), 1 - self.momentum)
            k = F.normalize(self.key(second), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue
        return torch.cat([positive, negative], 1) / self.temperature, k

    @torch.no_grad()
    def enqueue(self, keys):
        at = int(self.pointer)
        self.queue[:, at : at + len(keys)] = keys.T
        self.pointer[0] = (at + len(keys)) % self.queue.shape[1]


def two_views(photos, rng):
    """Two random crops and flips; one crop for the batch is random enough with so small a batch."""
    views = []
    for _ in range(2):
        y, x = torch.randint(9, (2,), generator=rng).tolist()
        view = photos[:, :, y : y + 32, x : x + 32]
        if torch.rand((), generator=rng) < 0.5:
            view = view.flip(-1)
        views.append(view * (0.8 + 0.4 * torch.rand(len(photos), 1, 1, 1, generator=rng)))
    return views


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    moco = MoCo()
    model = DDP(moco, broadcast_buffers=not CURED)  # cause: hot-line
    optimizer = torch.optim.SGD(moco.query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    rng = torch.Generator().manual_seed(rank)
    photos = torch.rand(2048, 3, 40, 40, generator=rng)
    target = torch.zeros(8, dtype=torch.long)

    over = torch.zeros(1)
    start, warm, step = time.perf_counter(), None, 0
    while not over:
        batch = photos[torch.randint(len(photos), (8,), generator=rng)]
        logits, keys = model(*two_views(batch, rng))
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moco.enqueue(keys)
        step += 1
        now = time.perf_counter()
        if warm is None and now - start > 2:
            warm = step, now
        if step % 20 == 0:
            over.fill_(now - start > SECONDS)
            dist.broadcast(over, 0)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
