"""Learns an embedding of molecule fingerprints with a triplet loss.

Each anchor comes with a molecule of the same scaffold and one of another scaffold.

"On the pilot set of 5k molecules training flew. We now have ten times as many molecules, the batch
and the network are the same as before, and still every iteration has become slower."
"""

# cause: dataloader-too-few-workers or dataloader-slow-transform no-line
import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

N, BITS, SCAFFOLDS, BATCH = 50_000, 256, 600, 64


def make_library(seed=0):
    rng = np.random.default_rng(seed)
    scaffold = rng.integers(0, SCAFFOLDS, N)
    core = rng.random((SCAFFOLDS, BITS)) < 0.15
    flips = rng.random((N, BITS)) < 0.04
    return (core[scaffold] ^ flips).astype(np.float32), scaffold


class TripletFingerprints(Dataset):
    def __init__(self, fps, scaffold):
        self.fps = torch.from_numpy(fps)
        self.scaffold = scaffold
        self.rng = np.random.default_rng(1)
        order = np.argsort(scaffold, kind="stable")
        self.members = np.split(order, np.cumsum(np.bincount(scaffold, minlength=SCAFFOLDS))[:-1])

    def __len__(self):
        return len(self.fps)

    def pick(self, s):
        if CURED:
            same = self.members[s]
            other = self.rng.integers(N)
            while self.scaffold[other] == s:
                other = self.rng.integers(N)
            return same[self.rng.integers(len(same))], other
        alike = self.scaffold == s
        same, others = np.flatnonzero(alike), np.flatnonzero(~alike)
        return same[self.rng.integers(len(same))], others[self.rng.integers(len(others))]

    def __getitem__(self, i):
        pos, neg = self.pick(self.scaffold[i])
        return self.fps[i], self.fps[pos], self.fps[neg]


class Encoder(nn.Module):
    def __init__(self, hidden=512, out=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(BITS, hidden),
            nn.LayerNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, out),
        )

    def forward(self, x):
        return nn.functional.normalize(self.net(x), dim=-1)


class Meter:
    """Mean time of a step without the first two seconds."""

    def __init__(self):
        self.begin = time.perf_counter()
        self.steps, self.mark = 0, None

    def tick(self):
        self.steps += 1
        self.passed = time.perf_counter() - self.begin
        if self.mark is None and self.passed > 2:
            self.mark = self.steps, self.passed
        return self.passed < SECONDS

    def report(self):
        print(f"step_ms {1000 * (self.passed - self.mark[1]) / (self.steps - self.mark[0]):.3f}", flush=True)


def train():
    torch.manual_seed(0)
    data = TripletFingerprints(*make_library())
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
    encoder = Encoder()
    criterion = nn.TripletMarginLoss(margin=0.3)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=5e-4, fused=True)
    meter = Meter()
    for epoch in range(1000):
        for anchor, pos, neg in loader:
            a, p, n = encoder(torch.cat([anchor, pos, neg])).chunk(3)
            loss = criterion(a, p, n)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not meter.tick():
                return meter
        print("epoch", epoch, "loss", round(loss.item(), 4))
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    train().report()
