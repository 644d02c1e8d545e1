"""Train a temporal convolution network to forecast electricity load.

Series are sums of daily and weekly cycles with noise. Every 25 steps a probe logs the
activation statistics of the blocks to watch for dying units.

"Iterations get slower and slower over the hours, linear like a leak, but memory is flat.
Restarting from the checkpoint makes it fast again."
"""

import math
import os
import time
from collections import defaultdict

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
HISTORY, HORIZON, PROBE_EVERY = 168, 24, 25


class LoadSeries(Dataset):
    def __init__(self, meters=40, hours=2500, seed=0):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(hours)
        ph = torch.rand(meters, 1, generator=g) * 6
        amp = torch.rand(meters, 1, generator=g) + 0.5
        day = amp * torch.sin(2 * math.pi * t / 24 + ph)
        week = 0.4 * torch.cos(2 * math.pi * t / 168 + ph)
        self.y = day + week + 0.15 * torch.randn(meters, hours, generator=g)
        self.per = hours - HISTORY - HORIZON

    def __len__(self):
        return self.y.shape[0] * self.per

    def __getitem__(self, i):
        m, s = divmod(i, self.per)
        w = self.y[m, s : s + HISTORY + HORIZON]
        return w[None, :HISTORY], w[HISTORY:]


class Block(nn.Module):
    def __init__(self, ch, dil):
        super().__init__()
        self.pad = 2 * dil
        self.conv = nn.Conv1d(ch, ch, 3, dilation=dil)
        self.act = nn.GELU()

    def forward(self, x):
        return x + self.act(self.conv(nn.functional.pad(x, (self.pad, 0))))


class TCN(nn.Module):
    def __init__(self, ch=32, depth=5):
        super().__init__()
        self.inp = nn.Conv1d(1, ch, 1)
        self.blocks = nn.Sequential(*[Block(ch, 2**k) for k in range(depth)])
        self.out = nn.Linear(ch, HORIZON)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x))[:, :, -1])


class Probe:
    """Activation statistics of all blocks on a fixed batch."""

    def __init__(self, model, batch):
        self.model, self.batch = model, batch
        self.stats = defaultdict(dict)

    def _hook(self, name):
        def fn(module, args, out):
            o = out.detach()
            self.stats[name] = {
                "mean": o.mean(),
                "std": o.std(),
                "dead": (o.abs() < 1e-4).float().mean(),
            }  # cause: hot-line

        return fn

    @torch.no_grad()
    def __call__(self):
        handles = []
        for name, m in self.model.named_modules():
            if isinstance(m, Block):
                handles.append(m.register_forward_hook(self._hook(name)))
        self.model(self.batch)
        if CURED:
            for h in handles:
                h.remove()
        return " ".join(f"{n.split('.')[-1]}:{float(s['std']):.2f}" for n, s in self.stats.items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ds = LoadSeries()
    dl = DataLoader(ds, batch_size=32, shuffle=True, drop_last=True)
    model = TCN()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = Probe(model, torch.stack([ds[i * 997][0] for i in range(4)]))
    k, w = 0, None
    start = time.time()
    for x, y in dl:
        age = time.time() - start
        if w is None and age >= 2:
            w = age, k
        if age >= SECONDS:
            break
        loss = nn.functional.smooth_l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        k += 1
        if k % PROBE_EVERY == 0:
            print(f"{k:5d} loss {loss.item():.4f} act-std {probe()}")
    print(f"step_ms {(age - w[0]) / max(1, k - w[1]) * 1e3:.3f}", flush=True)
