"""Marks the ground in a rover's pictures as sand, rock or shadow, with Accelerate.

A small U-shaped network, dice and cross entropy. What the tracker gets goes to a file of JSON lines.

"I moved to Accelerate and added some monitoring on the way, since then the epochs take much longer."
"""

import json
import os
import tempfile
import time

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
CLASSES, SIDE, WATCH_EVERY = 3, 32, 200 if CURED else 1


class Terrain(Dataset):
    def __init__(self, count=2000):
        g = torch.Generator().manual_seed(8)
        coarse = torch.randn(count, CLASSES, 5, 5, generator=g)
        self.masks = nn.functional.interpolate(coarse, SIDE, mode="bilinear").argmax(1)
        colours = torch.rand(CLASSES, 3, generator=g)
        self.pictures = colours[self.masks].permute(0, 3, 1, 2) + 0.3 * torch.randn(count, 3, SIDE, SIDE, generator=g)

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, i):
        return self.pictures[i], self.masks[i]


def twice(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU(True), nn.Conv2d(b, b, 3, padding=1), nn.ReLU(True)
    )


class SmallUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2, self.d3 = twice(3, 12), twice(12, 32), twice(32, 128)
        self.u2, self.u1 = twice(160, 32), twice(44, 12)
        self.out = nn.Conv2d(12, CLASSES, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(nn.functional.max_pool2d(a, 2))
        c = self.d3(nn.functional.max_pool2d(b, 2))
        b = self.u2(torch.cat([nn.functional.interpolate(c, scale_factor=2), b], 1))
        return self.out(self.u1(torch.cat([nn.functional.interpolate(b, scale_factor=2), a], 1)))


def dice(logits, masks):
    p = logits.softmax(1)
    t = nn.functional.one_hot(masks, CLASSES).permute(0, 3, 1, 2)
    return 1 - (2 * (p * t).sum((0, 2, 3)) / (p.sum((0, 2, 3)) + t.sum((0, 2, 3)))).mean()


class Watcher:
    """Keeps an eye on the weights and the gradients, as wandb.watch does."""

    def __init__(self, model, file):
        self.model, self.file = model, file

    def write(self, step):
        record = {"step": step}
        for name, p in self.model.named_parameters():
            for kind, values in (("weight", p.detach()), ("grad", p.grad)):
                counts, edges = np.histogram(values.numpy(), bins=64)
                record[f"{kind}/{name}"] = {"counts": counts.tolist(), "low": float(edges[0]), "high": float(edges[-1])}
        self.file.write(json.dumps(record) + "\n")


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    data = Terrain()
    loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    model = SmallUNet()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    step, mark, began = 0, None, time.perf_counter()
    with tempfile.TemporaryFile("w") as file:
        watcher = Watcher(accelerator.unwrap_model(model), file)
        while (now := time.perf_counter() - began) < SECONDS:
            for pictures, masks in loader:
                logits = model(pictures)
                loss = nn.functional.cross_entropy(logits, masks) + dice(logits, masks)
                accelerator.backward(loss)
                if step % WATCH_EVERY == 0:
                    watcher.write(step)  # cause: hot-line
                opt.step()
                opt.zero_grad()
                step += 1
                if step % 200 == 0:
                    accelerator.print(f"step {step} loss {loss.item():.4f}")
                now = time.perf_counter() - began
                if mark is None and now >= 2:
                    mark = now, step
                if now >= SECONDS:
                    break
    accelerator.print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
