"""Land-cover segmentation of satellite tiles with Accelerate on two processes.

"Scaling from one process to two is poor. My guess is that DDP's buckets are too small
for convolution weights; I tried bucket_cap_mb=100 and saw no difference at all."
"""

# ranks: 2
import os
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


@dataclass
class SegConfig:
    classes: int = 32
    size: int = 96
    width: int = 8
    batch: int = 4
    tiles: int = 512
    lr: float = 1e-3
    log_every: int = 32


class Tiles(Dataset):
    def __init__(self, cfg):
        g = torch.Generator().manual_seed(1)
        coarse = torch.randint(0, cfg.classes, (cfg.tiles, 1, 6, 6), generator=g).float()
        self.mask = F.interpolate(coarse, size=cfg.size, mode="nearest").squeeze(1).to(torch.uint8)
        self.colour = torch.randn(cfg.classes, 4, generator=g)
        self.noise = torch.randn(4, cfg.size, cfg.size, generator=g)

    def __len__(self):
        return len(self.mask)

    def __getitem__(self, i):
        m = self.mask[i].long()
        return self.colour[m].permute(2, 0, 1) + 0.3 * self.noise, m


class SmallUNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        w = cfg.width
        self.e1 = self.stage(4, w)
        self.e2 = self.stage(w, 2 * w, stride=2)
        self.e3 = self.stage(2 * w, 4 * w, stride=2)
        self.d2 = self.stage(6 * w, 2 * w)
        self.d1 = self.stage(3 * w, w)
        self.cls = nn.Conv2d(w, cfg.classes, 1)

    @staticmethod
    def stage(i, o, stride=1):
        return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

    def forward(self, x):
        a = self.e1(x)
        b = self.e2(a)
        c = self.e3(b)
        b = self.d2(torch.cat([b, F.interpolate(c, scale_factor=2.0)], 1))
        a = self.d1(torch.cat([a, F.interpolate(b, scale_factor=2.0)], 1))
        return self.cls(a)


class ConfusionMeter:
    def __init__(self, n):
        self.n = n
        self.reset()

    def reset(self):
        self.mat = torch.zeros(self.n, self.n, dtype=torch.long)

    def update(self, logits, target):
        pred = logits.argmax(1)
        self.mat += torch.bincount((target * self.n + pred).flatten(), minlength=self.n**2).view(self.n, self.n)

    def miou(self, mat):
        inter = mat.diagonal().float()
        union = (mat.sum(0) + mat.sum(1)).float() - inter
        return (inter / union.clamp_min(1)).mean().item()


class Engine:
    def __init__(self, cfg):
        self.cfg, self.acc = cfg, Accelerator(cpu=True)
        torch.manual_seed(0)
        model = SmallUNet(cfg)
        opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
        loader = DataLoader(Tiles(cfg), cfg.batch, shuffle=True, drop_last=True)
        self.model, self.opt, self.loader = self.acc.prepare(model, opt, loader)
        self.meter = ConfusionMeter(cfg.classes)
        self.step = 0

    def track(self, logits, target):
        if CURED:
            self.meter.update(logits, target)
            return
        all_logits, all_target = self.acc.gather_for_metrics((logits, target))  # cause: hot-line
        self.meter.update(all_logits, all_target)

    def report(self, loss):
        mat = self.acc.reduce(self.meter.mat, "sum") if CURED else self.meter.mat
        self.acc.print(f"step {self.step} loss {loss.item():.3f} mIoU {self.meter.miou(mat):.3f}", flush=True)
        self.meter.reset()

    def expired(self, since):
        flag = torch.tensor([float(time.perf_counter() - since > SECONDS)])
        return self.acc.reduce(flag, "sum").item() > 0

    def fit(self):
        t0, mark, n0 = time.perf_counter(), None, 0
        while True:
            self.model.train()
            for x, y in self.loader:
                logits = self.model(x)
                loss = F.cross_entropy(logits, y)
                self.acc.backward(loss)
                self.opt.step()
                self.opt.zero_grad()
                self.track(logits.detach(), y)  # cause: hot-line
                self.step += 1
                if mark is None and time.perf_counter() - t0 > 2:
                    mark, n0 = time.perf_counter(), self.step
                if self.step % self.cfg.log_every == 0:
                    self.report(loss)
                if self.step % 10 == 0 and self.expired(t0):
                    return 1e3 * (time.perf_counter() - mark) / max(1, self.step - n0)


if __name__ == "__main__":
    engine = Engine(SegConfig())
    result = engine.fit()
    engine.acc.print(f"step_ms {result:.3f}")
    engine.acc.end_training()
