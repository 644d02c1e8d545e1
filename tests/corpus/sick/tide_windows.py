"""Forecasts the tide at a harbour from the readings of the last day.

One long series of readings is cut into windows, a small convolutional network predicts the
next six readings from the 96 before them.

"My network is tiny and the batches are small, still I only get forty steps a second and the
profile of the model itself looks fine."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
READINGS, PAST, AHEAD, BATCH = 500_000, 96, 6, 96


class TideWindows(Dataset):
    """All windows of the series, a batch of them is cut at once."""

    def __init__(self):
        g = torch.Generator().manual_seed(7)
        hours = torch.arange(READINGS) / 4
        moon = torch.sin(hours * 0.5059) + 0.4 * torch.sin(hours * 0.5236 + 1) + 0.2 * torch.sin(hours * 0.2625)
        weather = torch.nn.functional.avg_pool1d(torch.randn(1, 1, READINGS, generator=g), 25, 1, 12)[0, 0]
        self.level = moon + weather
        self.offsets = torch.arange(PAST + AHEAD)

    def __len__(self):
        return READINGS - PAST - AHEAD

    def __getitems__(self, starts):
        windows = self.level[torch.tensor(starts)[:, None] + self.offsets]
        return windows[:, None, :PAST], windows[:, PAST:]


class TideNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        layers, channels = [], 1
        for dilation in (1, 2, 4, 8):
            layers += [nn.Conv1d(channels, width, 3, padding=dilation, dilation=dilation), nn.GELU()]
            channels = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width * 12, AHEAD)

    def forward(self, x):
        h = nn.functional.avg_pool1d(self.body(x), 8)
        return self.head(h.flatten(1))


def forever(loader):
    while True:
        yield from loader


def main():
    torch.manual_seed(0)
    loader = DataLoader(TideWindows(), batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    model = TideNet()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    endless = forever(loader)
    step, mark, running = 0, None, 0.0
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if now >= SECONDS:
            break
        if CURED:
            past, ahead = next(endless)
        else:
            past, ahead = next(iter(loader))  # cause: hot-line
        loss = nn.functional.smooth_l1_loss(model(past), ahead)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        running = 0.98 * running + 0.02 * loss.item()
        if step % 200 == 0:
            print(f"step {step} loss {running:.4f}")
    print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
