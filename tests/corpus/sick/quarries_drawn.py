"""Predicts how strong a block of stone is from its assay, on batches drawn without repeats from the whole archive.

Epochs mean little for an archive of this size, so a batch sampler draws each batch afresh.

"My MLP has three layers and the rows are already tensors in memory. I get the same speed whether I make
the network narrower or not, and on the small archive of last year it was much faster."
"""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
BLOCKS, ASSAY, BATCH = 400_000, 40, 384


def archive(seed=4):
    g = torch.Generator().manual_seed(seed)
    assay = torch.randn(BLOCKS, ASSAY, generator=g)
    strength = (assay[:, :10] * assay[:, 10:20]).sum(1) + 0.3 * torch.randn(BLOCKS, generator=g)
    return TensorDataset(assay, strength)


class RandomBatches(Sampler):
    """Yields batches of distinct rows for as long as one asks."""

    def __init__(self, n, batch, seed=0):
        self.n, self.batch = n, batch
        self.rng = np.random.default_rng(seed)
        np.random.seed(seed)

    def __iter__(self):
        while True:
            if CURED:
                rows = self.rng.choice(self.n, self.batch, replace=False)
            else:
                rows = np.random.choice(self.n, self.batch, replace=False)  # cause: hot-line
            yield rows.tolist()


class Stones(nn.Module):
    def __init__(self, width=448):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(ASSAY, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.strength = nn.Linear(width, 1)

    def forward(self, assay):
        return self.strength(self.body(assay)).squeeze(1)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(archive(), batch_sampler=RandomBatches(BLOCKS, BATCH))
    model = Stones()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    running, step, mark, t0 = 0.0, 0, None, time.perf_counter()
    for assay, strength in loader:
        loss = nn.functional.huber_loss(model(assay), strength)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()
        step += 1
        if step % 200 == 0:
            print(f"{step}: huber {running.item() / 200:.4f}", flush=True)
            running = 0.0
        now = time.perf_counter()
        if mark is None and now - t0 > 2:
            mark = step, now
        if now - t0 > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
