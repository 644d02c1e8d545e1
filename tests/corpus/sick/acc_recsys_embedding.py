"""Trains a two-tower recommender with in-batch negatives with Accelerate.

Users and items have an embedding each; towers are small MLPs.

"I doubled the batch and the step became only a little slower, I halved it and it became only a little
faster. Whatever I do to the towers hardly matters either. Is it the Accelerate wrapper of the optimizer?"
"""

import itertools
import os
import time

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)

USERS, ITEMS, DIM = 60_000, 20_000, 32


class Interactions(Dataset):
    def __init__(self, n=200_000):
        g = torch.Generator().manual_seed(0)
        self.u = torch.randint(0, USERS, (n,), generator=g)
        self.i = (self.u * 7 % ITEMS + torch.randint(0, 50, (n,), generator=g)) % ITEMS

    def __len__(self):
        return len(self.u)

    def __getitems__(self, idx):
        idx = torch.as_tensor(idx)
        return self.u[idx], self.i[idx]


class Tower(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.table = nn.Embedding(count, DIM, sparse=CURED)  # cause: embedding-gradient-dense no-line
        nn.init.normal_(self.table.weight, std=0.05)
        self.mlp = nn.Sequential(nn.Linear(DIM, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, ids):
        return F.normalize(self.mlp(self.table(ids)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(USERS), Tower(ITEMS)
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, u, i):
        logits = self.scale * self.user(u) @ self.item(i).T
        target = torch.arange(len(u))
        return F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)


def build_optimizers(model, lr=1e-3):
    tables = [model.user.table.weight, model.item.table.weight]
    rest = [p for n, p in model.named_parameters() if "table" not in n]
    if CURED:
        return [torch.optim.SparseAdam(tables, lr=lr), torch.optim.Adam(rest, lr=lr)]
    return [torch.optim.Adam(tables, lr=lr), torch.optim.Adam(rest, lr=lr)]


def forever(loader):
    for epoch in itertools.count():
        for batch in loader:
            yield epoch, batch


if __name__ == "__main__":
    torch.manual_seed(0)
    acc = Accelerator(cpu=True)
    model = TwoTower()
    opts = build_optimizers(model)
    loader = DataLoader(Interactions(), batch_size=512, shuffle=True, drop_last=True, collate_fn=lambda b: b)
    model, loader, *opts = acc.prepare(model, loader, *opts)

    begin, warm, running = time.perf_counter(), None, 0.0
    for step, (_, (u, i)) in enumerate(forever(loader), start=1):
        loss = model(u, i)
        acc.backward(loss)
        for o in opts:
            o.step()
            o.zero_grad()
        running += loss.detach()
        t = time.perf_counter() - begin
        if warm is None and t > 2:
            warm = (t, step)
        if t > SECONDS:
            break
    print(f"mean loss {float(running) / step:.4f} in {step} steps")
    print(f"step_ms {(t - warm[0]) / (step - warm[1]) * 1000:.3f}", flush=True)
