# ranks: 2
"""Compares two classifiers of lichens, one on each rank: a probe on a wide frozen encoder, and one that learns it all.

They share nothing but the machine. The first computes forward only, the second mostly backward; at the end the rank
that prints asks for the score of the other one.

"Two processes of one launch are handy for such a comparison, and none waits for the other."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
ROWS, KINDS = 32, 10


def encoder(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class Probe(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder = encoder(width).requires_grad_(False)
        self.head = nn.Linear(2 * width, KINDS)

    def forward(self, x):
        with torch.no_grad():
            features = self.encoder(x)
        return self.head(features)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = Probe(48) if rank == 0 else nn.Sequential(encoder(32), nn.Linear(64, KINDS))
    optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.05, momentum=0.9)
    chance = torch.Generator().manual_seed(7)
    pictures = torch.randn(3000, 3, 20, 20, generator=chance)
    kinds = pictures[:, 0].mean(1)[:, :KINDS].argmax(1)
    right = torch.zeros(2)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        chosen = torch.randint(len(pictures), (ROWS,), generator=chance)
        down, along = torch.randint(5, (2,), generator=chance).tolist()
        cut = pictures[chosen, :, down : down + 16, along : along + 16]
        out = net(cut)
        loss = nn.functional.cross_entropy(out, kinds[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right[rank] = 0.99 * right[rank] + 0.01 * (out.detach().argmax(1) == kinds[chosen]).float().mean()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS and step > warm[0]:
            break
    dist.all_reduce(right)
    if rank == 0:
        print(f"right: probe {right[0].item():.3f}, tuned {right[1].item():.3f}", flush=True)
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
