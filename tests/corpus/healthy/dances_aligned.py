"""Forecasts how a dance goes on; the loss is soft-DTW, which lets a guess be a little early or late.

"There is a Python loop in the loss, with some tiny operations each time. Surely that can be one operation?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
BATCH, PAST, AHEAD, JOINTS = 32, 48, 24, 6


def soft_dtw(cost, gamma):
    """Along the antidiagonals, each for the whole batch at once: a cell needs its neighbours of the two before."""
    count, n, m = cost.shape
    far = cost.new_full((count, n + 1), 1e6)
    before, last = torch.cat([cost.new_zeros(count, 1), far[:, 1:]], 1), far
    column = torch.arange(n + m - 1)[:, None] - torch.arange(n)
    inside = (column >= 0) & (column < m)
    at = torch.arange(n) * m + column.clamp(0, m - 1)
    diagonals = cost.flatten(1).index_select(1, at.flatten()).view(count, n + m - 1, n)
    for here, valid in zip(diagonals.unbind(1), inside.unbind(), strict=True):
        ways = torch.stack([last[:, 1:], last[:, :-1], before[:, :-1]])
        value = here - gamma * torch.logsumexp(-ways / gamma, 0)
        value = torch.where(valid, value, far[:, 1:])
        before, last = last, torch.cat([far[:, :1], value], 1)
    return last[:, n]


class Dancer(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.read = nn.GRU(JOINTS, width, batch_first=True)
        self.say = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, AHEAD * JOINTS))

    def forward(self, past):
        return self.say(self.read(past)[1][0]).view(-1, AHEAD, JOINTS)


def dances(count=1500):
    moment = torch.arange(PAST + AHEAD)[None, :, None]
    beat = 0.2 + 0.3 * torch.rand(count, 1, 1)
    swing = torch.sin(beat * moment + 6.283 * torch.rand(count, 1, JOINTS))
    return swing + 0.05 * torch.randn(count, PAST + AHEAD, JOINTS)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, model = dances(), Dancer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        dance = data[torch.randint(len(data), (BATCH,))]
        guess, truth = model(dance[:, :PAST]), dance[:, PAST:]
        loss = soft_dtw(torch.cdist(guess, truth).square(), gamma=0.1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"{step} loss {loss.item():.4f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
