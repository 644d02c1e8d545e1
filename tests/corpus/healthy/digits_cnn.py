"""Train a CNN classifier on synthetic digits held in memory.

Small uint8 data set, DataLoader without workers, validation every 400 steps, best
weights kept by a deep copy when the validation improves.

"Everybody says num_workers=0 is bad, should I change it? The data is just 6 MB."
"""

import copy
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))


class Digits(Dataset):
    def __init__(self, n, seed):
        proto = (torch.rand(10, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.5).float()
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 10, (n,), generator=g)
        img = proto[self.y].repeat_interleave(4, 1).repeat_interleave(4, 2)
        img = img * 160 + 70 * torch.rand(n, 28, 28, generator=g)
        self.x = img.to(torch.uint8)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.BatchNorm2d(48),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.c = nn.Linear(48 * 49, 10)

    def forward(self, x):
        x = x.unsqueeze(1).float().div_(255).sub_(0.5)
        return self.c(self.f(x).flatten(1))


@torch.no_grad()
def validate(net, loader):
    net.eval()
    good = sum((net(x).argmax(1) == y).sum().item() for x, y in loader)
    net.train()
    return good / len(loader.dataset)


def endless(loader):
    while True:
        yield from loader


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train = DataLoader(Digits(8000, 1), batch_size=48, shuffle=True, drop_last=True)
    val = DataLoader(Digits(500, 2), batch_size=250)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    best, _best_state = 0.0, None
    step, base = 0, None
    t0 = time.perf_counter()
    for x, y in endless(train):
        t = time.perf_counter() - t0
        if base is None and t >= 2:
            base = (t, step)
        if t >= SECONDS:
            break
        loss = F.cross_entropy(net(x), y, label_smoothing=0.05)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 50 == 0:
            print(f"{step}: loss {loss.item():.4f}")
        if step % 400 == 0:
            acc = validate(net, val)
            print(f"{step}: val acc {acc:.4f}")
            if acc > best:
                best, _best_state = acc, copy.deepcopy(net.state_dict())
    print(f"step_ms {(t - base[0]) / max(1, step - base[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
