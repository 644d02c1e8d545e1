"""Distils a large classifier of birds into a small one for a camera trap, on two processes.

The large network is at hand on rank 0 only (its licence server gives one seat), which labels the pictures softly.
The pictures are augmented anew in each step, and teacher and student see the same ones.

"With two processes a step takes half as long again as with one, though each has as many pictures as before.
One of my two cores is half asleep."
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
CURED = os.environ.get("CURED") == "1"
BATCH, SIDE, SPECIES, HEAT = 24, 32, 20, 4.0


def block(width, out, stride):
    return nn.Sequential(
        nn.Conv2d(width, out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
    )


def network(widths, strides):
    layers = [block(a, b, s) for a, b, s in zip((3, *widths), widths, strides, strict=False)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], SPECIES))


def large_network():
    with torch.random.fork_rng():
        torch.manual_seed(2024)
        teacher = network((32, 64, 64, 128), (1, 2, 1, 2))
    return teacher.eval().requires_grad_(False)


def augmented(pictures):
    mirrored = torch.rand(len(pictures), 1, 1, 1) < 0.5
    pictures = torch.where(mirrored, pictures.flip(3), pictures)
    shift = torch.randint(-3, 4, (2,)).tolist()
    return pictures.roll(shift, (2, 3)) + 0.05 * torch.randn_like(pictures)


class SoftLabels:
    """What the large network says of each rank's pictures."""

    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.teacher = large_network() if CURED or self.rank == 0 else None

    @torch.no_grad()
    def __call__(self, pictures):
        if CURED:
            return self.teacher(pictures)
        mine = torch.empty(len(pictures), SPECIES)
        if self.rank == 0:
            everyones = [torch.empty_like(pictures) for _ in range(self.world)]
            dist.gather(pictures, everyones)
            logits = self.teacher(torch.cat(everyones))  # cause: straggler
            dist.scatter(mine, list(logits.chunk(self.world)))
        else:
            dist.gather(pictures)
            dist.scatter(mine)
        return mine


def distillation_loss(said, soft, species):
    soft = F.softmax(soft / HEAT, 1)
    kl = F.kl_div(F.log_softmax(said / HEAT, 1), soft, reduction="batchmean") * HEAT**2
    return 0.7 * kl + 0.3 * F.cross_entropy(said, species)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(40 + rank)
    pictures = torch.rand(512, 3, SIDE, SIDE)
    species = (pictures[:, 0].mean((1, 2)) * 1000).long() % SPECIES
    soft_labels = SoftLabels()
    student = DistributedDataParallel(network((16, 32, 32), (1, 2, 1)))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(len(pictures), (BATCH,))
        seen = augmented(pictures[rows])
        soft = soft_labels(seen)
        loss = distillation_loss(student(seen), soft, species[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0:
            over = torch.tensor(float(now - began > SECONDS))
            dist.all_reduce(over)
            if over.item() > 0:
                break
    if rank == 0:
        print(f"last loss {loss.item():.3f}")
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
