"""Trains an autoencoder on the gene counts of bone marrow cells, kept as a sparse matrix of scipy.

"Nine tenths of a cell's counts are zeros, so sparse storage ought to make reading cheap. With the full atlas each step
takes far longer than with the pilot study, though a batch has 256 cells in both."
"""

import os
import time

import numpy as np
import scipy.sparse as sp
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
CELLS, GENES, READS, BATCH = 20_000, 2_000, 400, 256


def read_core_facility_matrix(seed=0):
    """Genes in rows and cells in columns, as the sequencing core delivers it."""
    rng = np.random.default_rng(seed)
    genes = (rng.random(CELLS * READS, dtype=np.float32) ** 1.5 * GENES).astype(np.int32)
    cells = np.repeat(np.arange(CELLS, dtype=np.int32), READS)
    genes = (genes + 7 * (cells % 12)) % GENES
    ones = np.ones(len(genes), dtype=np.float32)
    return sp.coo_matrix((ones, (genes, cells)), shape=(GENES, CELLS)).tocsr()


def read_counts():
    counts = read_core_facility_matrix().T
    if CURED:
        counts = counts.tocsr()
    return counts


def batches(counts, rng):
    while True:
        order = rng.permutation(CELLS)
        for start in range(0, CELLS - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            dense = counts[rows].toarray(order="C")  # cause: hot-line
            dense *= 1e4 / dense.sum(1, keepdims=True)
            yield torch.from_numpy(dense).log1p_()


def build_model():
    return nn.Sequential(
        nn.Linear(GENES, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 32),
        nn.ReLU(), nn.Linear(32, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, GENES),
    )  # fmt: skip


def train():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counts = read_counts()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    began, warm = time.perf_counter(), None
    for step, cells in enumerate(batches(counts, np.random.default_rng(1)), 1):
        loss = nn.functional.mse_loss(model(cells), cells)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    train()
