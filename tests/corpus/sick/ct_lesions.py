"""Trains a small U-Net that outlines lesions on axial slices of generated CT volumes.

The volumes are exported once as archives, one per patient, and the network is trained slice by slice
with a sum of Dice and cross-entropy.

"I only use 64x64 slices and a toy U-Net, yet an epoch takes nearly as long as it did with
the network that was twice as wide. Making the network smaller hardly helps any more."
"""

# cause: dataloader-too-few-workers or dataloader-slow-transform no-line
import os
import pathlib
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

PATIENTS, DEPTH, SIDE = 12, 48, 64


def export_patients(folder):
    rng = np.random.default_rng(11)
    zz, yy, xx = np.mgrid[:DEPTH, :SIDE, :SIDE].astype(np.float32)
    paths = []
    for p in range(PATIENTS):
        ct = rng.normal(-80, 30, (DEPTH, SIDE, SIDE))
        seg = np.zeros((DEPTH, SIDE, SIDE), np.uint8)
        for _ in range(4):
            cz, cy, cx = rng.uniform(2, DEPTH - 2), *rng.uniform(10, SIDE - 10, 2)
            ball = ((zz - cz) * 2) ** 2 + (yy - cy) ** 2 + (xx - cx) ** 2 < rng.uniform(4, 9) ** 2
            seg[ball] = 1
            ct[ball] += 90
        path = folder / f"patient_{p:03d}.npz"
        np.savez_compressed(path, ct=ct.astype(np.int16), seg=seg)
        paths.append(path)
    return paths


class Slices(Dataset):
    def __init__(self, paths):
        self.index = [(p, z) for p in paths for z in range(DEPTH)]
        self.volumes = {}
        if CURED:
            for p in paths:
                with np.load(p) as f:
                    self.volumes[p] = {"ct": f["ct"], "seg": f["seg"]}

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        path, z = self.index[i]
        if CURED:
            f = self.volumes[path]
        else:
            f = np.load(path)
        ct, seg = f["ct"][z], f["seg"][z]
        if np.random.rand() < 0.5:
            ct, seg = ct[:, ::-1], seg[:, ::-1]
        image = torch.from_numpy(np.clip(ct, -200, 200).astype(np.float32) / 200)
        return image[None], torch.from_numpy(seg.astype(np.float32))[None]


def double_conv(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self, w=6):
        super().__init__()
        self.d1, self.d2, self.mid = double_conv(1, w), double_conv(w, 2 * w), double_conv(2 * w, 4 * w)
        self.u2, self.u1 = double_conv(6 * w, 2 * w), double_conv(3 * w, w)
        self.head = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        m = self.mid(F.max_pool2d(b, 2))
        b = self.u2(torch.cat([b, F.interpolate(m, scale_factor=2)], 1))
        a = self.u1(torch.cat([a, F.interpolate(b, scale_factor=2)], 1))
        return self.head(a)


def dice_loss(logits, target):
    p = logits.sigmoid()
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


def fit(folder):
    torch.manual_seed(0)
    loader = DataLoader(Slices(export_patients(folder)), batch_size=5, shuffle=True, drop_last=True)
    net = UNet()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
    steps, warm, start = 0, None, time.perf_counter()
    while True:
        for image, mask in loader:
            logits = net(image)
            loss = dice_loss(logits, mask) + F.binary_cross_entropy_with_logits(logits, mask)
            opt.zero_grad()
            loss.backward()
            opt.step()
            steps += 1
            now = time.perf_counter() - start
            if warm is None and now > 2:
                warm = (steps, now)
            if now > SECONDS:
                return (now - warm[1]) / (steps - warm[0]) * 1000


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as tmp:
        print(f"step_ms {fit(pathlib.Path(tmp)):.3f}", flush=True)
