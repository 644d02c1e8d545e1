"""Trains a network that guesses how rock conducts water from pictures; the water levels are solved with scipy.

The loss compares levels: they are the solution of a sparse system that the guess makes, and have a gradient by the
adjoint system, with the same factors.

"Half of each step is in SuperLU. It is the physics, so I think that is right, or is it not?"
"""

import os
import time

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import splu
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
SIDE, BATCH = 26, 3


def incidence():
    """The differences between the cells on both sides of each edge."""
    cell = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)
    one = np.concatenate([cell[:, :-1].ravel(), cell[:-1].ravel()])
    other = np.concatenate([cell[:, 1:].ravel(), cell[1:].ravel()])
    edge = np.arange(len(one))
    values = np.concatenate([np.ones(len(one)), -np.ones(len(one))])
    return one, other, sparse.csr_matrix((values, (np.tile(edge, 2), np.concatenate([one, other]))))


ONE, OTHER, SLOPE = incidence()
BACK = SLOPE.T.tocsr()
LEAK = sparse.identity(SIDE * SIDE, format="csr") * 0.02


class Levels(torch.autograd.Function):
    """The levels of water over a rock whose edges conduct so well."""

    @staticmethod
    def forward(ctx, edges, rain):
        ctx.factors, ctx.levels = [], []
        for conducts, falls in zip(edges.detach().double().numpy(), rain.double().numpy(), strict=True):
            system = BACK @ sparse.diags(conducts) @ SLOPE + LEAK
            factors = splu(system.tocsc())
            ctx.factors.append(factors)
            ctx.levels.append(factors.solve(falls))
        return torch.from_numpy(np.stack(ctx.levels)).float()

    @staticmethod
    def backward(ctx, slope):
        rows = []
        for factors, level, wanted in zip(ctx.factors, ctx.levels, slope.double().numpy(), strict=True):
            adjoint = factors.solve(wanted)
            rows.append(-(SLOPE @ adjoint) * (SLOPE @ level))
        return torch.from_numpy(np.stack(rows)).float(), None


class Guess(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, picture):
        rock = nn.functional.softplus(self.net(picture)).flatten(1) + 0.05
        return 0.5 * (rock[:, ONE] + rock[:, OTHER])


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    guess = Guess()
    optimizer = torch.optim.Adam(guess.parameters(), lr=1e-3)
    pictures = torch.randn(60, 2, SIDE, SIDE)
    rain = torch.rand(60, SIDE * SIDE)
    truth = nn.functional.softplus(pictures.mean(1).flatten(1)) + 0.05
    with torch.no_grad():
        measured = Levels.apply(0.5 * (truth[:, ONE] + truth[:, OTHER]), rain)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(60, (BATCH,))
        levels = Levels.apply(guess(pictures[rows]), rain[rows])
        loss = nn.functional.mse_loss(levels, measured[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
