"""Person re-identification with a batch-all triplet loss and a P x K sampler.

"I went from K=4, P=16 to K=4, P=32 and the step got far more than twice as slow.
Clearly the CNN does not scale to batch 128 on my CPU (cache misses in the convs?)."
"""

import os
import time
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

LOSSES, BACKBONES = {}, {}


def register(table, name):
    def deco(obj):
        table[name] = obj
        return obj

    return deco


@dataclass
class Config:
    backbone: str = "osnet_micro"
    loss: str = "batch_all_triplet"
    ids_per_batch: int = 32
    imgs_per_id: int = 4
    n_ids: int = 200
    margin: float = 0.3
    lr: float = 3e-4
    log_every: int = 50


@register(BACKBONES, "osnet_micro")
class OSNetMicro(nn.Module):
    def __init__(self, dim=128):
        super().__init__()

        def block(i, o, s):
            return nn.Sequential(
                nn.Conv2d(i, i, 3, s, 1, groups=i, bias=False),
                nn.Conv2d(i, o, 1, bias=False),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
            )

        self.stem = nn.Sequential(nn.Conv2d(3, 16, 5, 2, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.body = nn.Sequential(block(16, 32, 2), block(32, 64, 2), block(64, 128, 1))
        self.neck = nn.Linear(128, dim)

    def forward(self, x):
        h = self.body(self.stem(x)).mean((2, 3))
        return F.normalize(self.neck(h), dim=1)


@register(LOSSES, "batch_all_triplet")
class BatchAllTriplet(nn.Module):
    def __init__(self, margin):
        super().__init__()
        self.margin = margin

    def forward(self, emb, pid):
        dist = 1.0 - emb @ emb.t()
        same = pid[:, None] == pid[None, :]
        eye = torch.eye(len(pid), dtype=torch.bool)
        if CURED:
            a, p = torch.nonzero(same & ~eye, as_tuple=True)
            viol = F.relu(dist[a, p][:, None] - dist[a] + self.margin) * (~same[a]).float()
        else:
            viol = F.relu(dist[:, :, None] - dist[:, None, :] + self.margin)  # cause: none-yet most is masked
            valid = (same & ~eye)[:, :, None] & (~same)[:, None, :]
            viol = viol * valid.float()
        active = (viol.detach() > 1e-8).sum().clamp_min(1)
        return viol.sum() / active, active


class PKSampler:
    """P identities, K pictures of each."""

    def __init__(self, pids, p, k):
        self.by_id = defaultdict(list)
        for i, pid in enumerate(pids.tolist()):
            self.by_id[pid].append(i)
        self.table = torch.tensor([self.by_id[i] for i in sorted(self.by_id)])
        self.p, self.k = p, k

    def draw(self):
        ids = torch.randperm(len(self.table))[: self.p]
        cols = torch.rand(self.p, self.table.size(1)).argsort(1)[:, : self.k]
        return self.table[ids].gather(1, cols).flatten()


class AverageMeter:
    def __init__(self, momentum=0.95):
        self.m, self.v = momentum, None

    def update(self, x):
        self.v = x if self.v is None else self.m * self.v + (1 - self.m) * x


class LogHook:
    def __init__(self, every):
        self.every, self.meter = every, AverageMeter()

    def after_step(self, runner):
        if runner.step % self.every == 0:
            self.meter.update(runner.out["loss"].item())
            print(f"[{runner.step}] loss {self.meter.v:.4f} active {int(runner.out['active'])}", flush=True)


class Runner:
    def __init__(self, cfg):
        torch.manual_seed(0)
        self.cfg, self.step, self.out = cfg, 0, {}
        self.model = BACKBONES[cfg.backbone]()
        self.criterion = LOSSES[cfg.loss](cfg.margin)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        proto = torch.randn(cfg.n_ids, 1, 3, 48, 24)
        self.images = (proto + 0.7 * torch.randn(cfg.n_ids, 8, 3, 48, 24)).flatten(0, 1)
        self.pids = torch.arange(cfg.n_ids).repeat_interleave(8)
        self.sampler = PKSampler(self.pids, cfg.ids_per_batch, cfg.imgs_per_id)
        self.hooks = [LogHook(cfg.log_every)]

    def train_step(self):
        idx = self.sampler.draw()
        emb = self.model(self.images[idx])
        loss, active = self.criterion(emb, self.pids[idx])
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.step += 1
        self.out = {"loss": loss.detach(), "active": active}
        for h in self.hooks:
            h.after_step(self)

    def run(self):
        t0 = time.perf_counter()
        warm_t, warm_n = t0, 0
        while time.perf_counter() - t0 < SECONDS:
            self.train_step()
            if warm_n == 0 and time.perf_counter() - t0 > 2:
                warm_t, warm_n = time.perf_counter(), self.step
        print(f"step_ms {1e3 * (time.perf_counter() - warm_t) / max(1, self.step - warm_n):.3f}")


if __name__ == "__main__":
    Runner(Config()).run()
