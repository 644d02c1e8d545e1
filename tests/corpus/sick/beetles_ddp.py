"""Names beetles in pictures, on two ranks that draw the same batches, and each of them learns from its half.

"One rank and two ranks have to see the same pictures, bit by bit, or the reviewers complain. It does not scale."
"""
# ranks: 2

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
BATCH, SIDE, KINDS = 48, 56, 12


class Augment:
    """Turns, zooms, moves, brightens, sharpens: what is drawn for a picture does not depend on the number of ranks."""

    def __init__(self, seed=7):
        self.generator = torch.Generator().manual_seed(seed)
        bell = torch.exp(-torch.linspace(-1.5, 1.5, 5).square())
        self.blur = (torch.outer(bell, bell) / bell.sum() ** 2).expand(3, 1, 5, 5).contiguous()

    def draw(self, count):
        return torch.rand(count, 6, generator=self.generator) * 2 - 1

    def __call__(self, pictures, drawn):
        turn, zoom = drawn[:, 0] * 0.5, 1 + 0.2 * drawn[:, 1]
        theta = torch.zeros(len(pictures), 2, 3)
        theta[:, 0, 0], theta[:, 0, 1], theta[:, 0, 2] = turn.cos() * zoom, -turn.sin() * zoom, 0.1 * drawn[:, 2]
        theta[:, 1, 0], theta[:, 1, 1], theta[:, 1, 2] = turn.sin() * zoom, turn.cos() * zoom, 0.1 * drawn[:, 3]
        pictures = pictures + 0.5 * (pictures - F.conv2d(pictures, self.blur, padding=2, groups=3))
        grid = F.affine_grid(theta, pictures.shape, align_corners=False)
        pictures = F.grid_sample(pictures, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
        mean = pictures.mean((2, 3), keepdim=True)
        contrast, light = 1 + 0.3 * drawn[:, 4], 0.2 * drawn[:, 5]
        pictures = (pictures - mean) * contrast[:, None, None, None] + mean + light[:, None, None, None]
        return pictures.clamp(0, 1)


class Batches:
    def __init__(self, rank, ranks):
        g = torch.Generator().manual_seed(3)
        self.pictures = torch.rand(1500, 3, SIDE, SIDE, generator=g)
        self.kinds = torch.randint(0, KINDS, (1500,), generator=g)
        self.pictures[torch.arange(1500), :, self.kinds, self.kinds] = 1
        self.mine, self.augment = slice(rank, None, ranks), Augment()

    def __iter__(self):
        while True:
            rows = torch.randint(len(self.kinds), (BATCH,), generator=self.augment.generator)
            drawn = self.augment.draw(BATCH)
            if CURED:
                rows, drawn = rows[self.mine], drawn[self.mine]
                yield self.augment(self.pictures[rows], drawn), self.kinds[rows]
            else:
                pictures = self.augment(self.pictures[rows], drawn)  # cause: hot-line
                yield pictures[self.mine], self.kinds[rows[self.mine]]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(3, 24, 5, stride=3), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(48, 48, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(192, KINDS),
        )
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50_000)
    began, warm, stop = time.perf_counter(), None, torch.zeros(1)
    for step, (pictures, kinds) in enumerate(Batches(rank, dist.get_world_size()), start=1):
        loss = F.cross_entropy(model(pictures), kinds, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 25 == 0:
            stop.fill_(now - began > SECONDS)
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop.item():
                break
    if rank == 0:
        print(f"loss {loss.item():.3f}")
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
