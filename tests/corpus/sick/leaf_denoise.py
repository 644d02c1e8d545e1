"""Self-supervised denoising of leaf photographs with a small residual CNN.

Photographs are 320x320 arrays in memory. Every sample is a random 64x64 patch; the input gets
exposure, blur and sensor noise, the target stays clean.

"The patches are tiny and everything is in RAM, still the model waits. When I take
photographs with more megapixels it gets worse, though the patch size stays the same."
"""

# cause: dataloader-too-few-workers or dataloader-slow-transform no-line
import os
import time

import numpy as np
import torch
from scipy.ndimage import uniform_filter
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SIDE, PATCH = 320, 64


def photographs(count=48):
    rng = np.random.default_rng(2)
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float32) / SIDE
    out = []
    for _ in range(count):
        fx, fy, ph = rng.uniform(3, 14, 3)
        vein = np.abs(np.sin(fx * x + fy * y + ph))
        green = 0.3 + 0.5 * vein
        out.append(np.stack([0.4 * green, green, 0.2 * vein], -1).astype(np.float32))
    return out


class Exposure:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self, pair):
        noisy, clean = pair
        gain = np.float32(self.rng.uniform(0.85, 1.15))
        return np.clip(noisy * gain, 0, 1), np.clip(clean * gain, 0, 1)


class Blur:
    def __call__(self, pair):
        noisy, clean = pair
        return uniform_filter(noisy, size=(3, 3, 1)), clean


class SensorNoise:
    def __init__(self, rng, sigma=0.06):
        self.rng, self.sigma = rng, np.float32(sigma)

    def __call__(self, pair):
        noisy, clean = pair
        return noisy + self.sigma * self.rng.standard_normal(noisy.shape, dtype=np.float32), clean


class RandomPatch:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self, pair):
        r, c = self.rng.integers(0, SIDE - PATCH, 2)
        return tuple(p[r : r + PATCH, c : c + PATCH] for p in pair)


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, pair):
        for s in self.steps:
            pair = s(pair)
        return pair


class Leaves(Dataset):
    def __init__(self):
        rng = np.random.default_rng(3)
        self.images = photographs()
        degrade, patch = [Exposure(rng), Blur(), SensorNoise(rng)], RandomPatch(rng)
        if CURED:
            self.transform = Compose([patch, *degrade])
        else:
            self.transform = Compose([*degrade, patch])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        img = self.images[i]
        return tuple(torch.from_numpy(np.ascontiguousarray(p.transpose(2, 0, 1))) for p in self.transform((img, img)))


class DnCNN(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x):
        return x - self.body(x)


def endless(loader):
    while True:
        yield from loader


def main():
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = DnCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(Leaves(), batch_size=4, shuffle=True)
    t0 = time.perf_counter()
    it, at2 = 0, None
    for noisy, clean in endless(loader):
        loss = nn.functional.l1_loss(model(noisy), clean)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        it += 1
        t = time.perf_counter() - t0
        if at2 is None and t >= 2:
            at2 = it, t
        if it % 100 == 0:
            print(f"iter {it} l1 {loss.item():.4f}")
        if t >= SECONDS:
            break
    print(f"step_ms {(t - at2[1]) / (it - at2[0]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
