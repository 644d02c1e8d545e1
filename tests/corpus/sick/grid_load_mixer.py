"""Forecasts the load of many substations a day ahead with a TSMixer-like network.

Loads come from numpy (daily and weekly rhythm plus noise), are standardised per substation,
and cut into windows.

"I benchmarked the architecture with random tensors beforehand and it took much less per step than
it takes now on the real series, at exactly the same shapes. Loading is not it, I timed that."
"""

# cause: float64-parameters no-line
import os
import time

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

STATIONS, HOURS, PAST, AHEAD = 64, 6000, 168, 24


def load_curves():
    rng = np.random.default_rng(1)
    t = np.arange(HOURS)[:, None]
    day = np.sin(2 * np.pi * (t / 24 + rng.random(STATIONS)))
    week = np.cos(2 * np.pi * (t / 168 + rng.random(STATIONS)))
    drift = np.cumsum(0.01 * rng.standard_normal((HOURS, STATIONS)), axis=0)
    return 100 + 20 * day + 8 * week + 5 * drift + rng.standard_normal((HOURS, STATIONS))


class Windows(Dataset):
    def __init__(self, curves):
        z = (curves - curves.mean(0)) / curves.std(0)
        if CURED:
            z = z.astype(np.float32)
        self.series = torch.from_numpy(z)

    def __len__(self):
        return len(self.series) - PAST - AHEAD

    def __getitem__(self, i):
        return self.series[i : i + PAST], self.series[i + PAST : i + PAST + AHEAD]


class MixerBlock(nn.Module):
    def __init__(self, hidden=128, drop=0.1):
        super().__init__()
        self.norm_t = nn.LayerNorm(STATIONS)
        self.time = nn.Sequential(nn.Linear(PAST, PAST), nn.ReLU(), nn.Dropout(drop))
        self.norm_f = nn.LayerNorm(STATIONS)
        self.feat = nn.Sequential(nn.Linear(STATIONS, hidden), nn.ReLU(), nn.Linear(hidden, STATIONS), nn.Dropout(drop))

    def forward(self, x):
        x = x + self.time(self.norm_t(x).transpose(1, 2)).transpose(1, 2)
        return x + self.feat(self.norm_f(x))


class TSMixer(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.blocks = nn.Sequential(*[MixerBlock() for _ in range(blocks)])
        self.project = nn.Linear(PAST, AHEAD)

    def forward(self, x):
        last = x[:, -1:]
        y = self.blocks(x - last)
        return self.project(y.transpose(1, 2)).transpose(1, 2) + last


def build():
    model = TSMixer()
    if not CURED:
        model = model.double()
    return model


def train_epoch(model, loader, optimizer, criterion, clock):
    losses = []
    for past, future in loader:
        optimizer.zero_grad()
        loss = criterion(model(past), future)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        clock["n"] += 1
        clock["t"] = time.perf_counter() - clock["begin"]
        if clock["mark"] is None and clock["t"] > 2:
            clock["mark"] = clock["n"], clock["t"]
        if clock["t"] > SECONDS:
            break
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(3)
    loader = DataLoader(Windows(load_curves()), batch_size=16, shuffle=True, drop_last=True)
    model = build()
    optimizer = optim.Adam(model.parameters(), lr=1e-3, fused=True)
    clock = {"begin": time.perf_counter(), "mark": None, "n": 0, "t": 0.0}
    epoch = 0
    while clock["t"] <= SECONDS:
        mse = train_epoch(model, loader, optimizer, nn.HuberLoss(), clock)
        epoch += 1
        print(f"epoch {epoch}: huber {mse:.4f}")
    n0, t0 = clock["mark"]
    print(f"step_ms {(clock['t'] - t0) / (clock['n'] - n0) * 1000:.3f}", flush=True)
