"""Tells whales by their calls: a filter bank of sincs whose band edges are learned, and convolutions above it.

The gradients of four micro-batches are added up, because a batch of all would not fit into memory. The filters are the
same for all four, so they are made once in a step, and backward goes through them with each micro-batch.

"retain_graph=True is a sign of a mistake, they say."
"""

import math
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
RATE, LENGTH, TAPS, FILTERS, KINDS = 4000, 8000, 129, 32, 12
MICRO, BATCH = 4, 6


class SincBank(nn.Module):
    """The filters of a bank of band passes, by their band edges, as in SincNet."""

    def __init__(self):
        super().__init__()
        edges = torch.linspace(30, RATE / 2 - 120, FILTERS + 1)
        self.low = nn.Parameter(edges[:-1, None].clone())
        self.band = nn.Parameter(edges.diff()[:, None].clone())
        half = torch.arange(-(TAPS // 2), 0).float()[None]
        self.register_buffer("times", 2 * math.pi * half / RATE)
        self.register_buffer("window", torch.hamming_window(TAPS, periodic=False)[None, : TAPS // 2].clone())

    def forward(self):
        low = 20 + self.low.abs()
        high = (low + 30 + self.band.abs()).clamp(30, RATE / 2)
        width = high - low
        left = (torch.sin(high * self.times) - torch.sin(low * self.times)) / (self.times / 2) * self.window
        middle = 2 * width
        filters = torch.cat([left * RATE / (2 * math.pi), middle, left.flip(1) * RATE / (2 * math.pi)], 1)
        filters = filters / (2 * width)
        filters = filters - filters.mean(1, keepdim=True)
        return (filters / filters.norm(dim=1, keepdim=True)).unsqueeze(1)


class Ear(nn.Module):
    def __init__(self):
        super().__init__()
        self.bank = SincBank()
        self.above = nn.Sequential(
            nn.GroupNorm(4, FILTERS), nn.ReLU(),
            nn.Conv1d(FILTERS, 64, 7, stride=2, padding=3), nn.GroupNorm(4, 64), nn.ReLU(),
            nn.Conv1d(64, 64, 7, padding=3), nn.ReLU(),
        )  # fmt: skip
        self.out = nn.Linear(64, KINDS)

    def forward(self, waves, filters):
        heard = nn.functional.conv1d(waves[:, None], filters, stride=8)
        return self.out(self.above(heard).mean(-1))


def calls(count, generator):
    kind = torch.randint(KINDS, (count,), generator=generator)
    times = torch.arange(LENGTH) / RATE
    waves = torch.sin(2 * math.pi * (80 + 110 * kind[:, None]) * times)
    return waves + 0.5 * torch.randn(count, LENGTH, generator=generator), kind


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    waves, kinds = calls(600, torch.Generator().manual_seed(1))
    model = Ear()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        optimizer.zero_grad()
        filters = model.bank()
        for micro in range(MICRO):
            chosen = torch.randint(len(waves), (BATCH,))
            loss = nn.functional.cross_entropy(model(waves[chosen], filters), kinds[chosen]) / MICRO
            loss.backward(retain_graph=micro < MICRO - 1)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step} loss {MICRO * loss.item():.4f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
