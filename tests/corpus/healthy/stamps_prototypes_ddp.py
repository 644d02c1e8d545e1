"""Groups stamps without labels by swapped assignments to prototypes (SwAV), with DDP on two processes.

The assignments are balanced over both processes' stamps by a few rounds of Sinkhorn, which exchange sums.

"In every step the two processes call all_reduce several times for next to nothing. I was told to keep it out of the
loop."
"""

# ranks: 2
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
BATCH, SIDE, CROP, PROTOTYPES, ROUNDS, HEAT = 48, 24, 20, 48, 3, 0.1


def stamps(count):
    gen = torch.Generator().manual_seed(5)
    designs = F.interpolate(torch.randn(30, 1, 6, 6, generator=gen), size=(SIDE, SIDE), mode="bilinear")
    kinds = torch.randint(30, (count,), generator=gen)
    return designs[kinds] + 0.2 * torch.randn(count, 1, SIDE, SIDE, generator=gen)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 24, 3, 1, 1), nn.ReLU(inplace=True), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU(inplace=True),
            nn.Conv2d(48, 64, 3, 2, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(64, 128), nn.ReLU(inplace=True), nn.Linear(128, 48),
        )  # fmt: skip
        self.prototypes = nn.Linear(48, PROTOTYPES, bias=False)

    def forward(self, x):
        return self.prototypes(F.normalize(self.body(x), dim=1))


@torch.no_grad()
def balanced(scores, world):
    """Sinkhorn for both views at once: (views, stamps, prototypes), each prototype with an equal share of stamps."""
    share = torch.exp(scores / 0.05)
    for _ in range(ROUNDS):
        mass = share.sum(1, keepdim=True)
        dist.all_reduce(mass)
        share /= mass * PROTOTYPES
        share /= share.sum(2, keepdim=True) * (BATCH * world)
    return share * (BATCH * world)


def views(x):
    """Two crops of each stamp, each somewhere else, one with its contrast changed."""
    windows = x.unfold(2, CROP, 1).unfold(3, CROP, 1)
    places = SIDE - CROP + 1
    at = torch.arange(len(x)).repeat(2)
    crops = windows[at, :, torch.randint(places, (len(at),)), torch.randint(places, (len(at),))]
    return crops * (0.6 + 0.8 * torch.rand(len(at), 1, 1, 1))


def train(rank, world):
    torch.manual_seed(1)
    model = DistributedDataParallel(Net().to(memory_format=torch.channels_last), gradient_as_bucket_view=True)
    weight = model.module.prototypes.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5, fused=True)
    data = stamps(8000)[rank::world]
    torch.manual_seed(100 + rank)
    began, mark, step, total = time.perf_counter(), None, 0, torch.zeros(())
    while True:
        with torch.no_grad():
            weight.copy_(F.normalize(weight, dim=1))
        scores = model(views(data[torch.randint(len(data), (BATCH,))])).unflatten(0, (2, BATCH))
        target = balanced(scores.detach(), world)
        loss = -(target.flip(0) * F.log_softmax(scores / HEAT, dim=2)).sum(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        step += 1
        now = time.perf_counter()
        if mark is None and now - began > 2:
            mark = step, now
        if step % 40 == 0:
            news = torch.stack((total / 40, torch.tensor(float(now - began > SECONDS))))
            dist.all_reduce(news)
            total.zero_()
            if rank == 0:
                print(f"{step}: {news[0].item() / world:.4f}", flush=True)
            if news[1] > 0:
                return 1000 * (now - mark[1]) / (step - mark[0])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mean = train(rank, dist.get_world_size())
    if rank == 0:
        print(f"step_ms {mean:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
