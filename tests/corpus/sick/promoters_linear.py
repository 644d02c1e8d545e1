"""Finds promoters in stretches of DNA with a transformer whose attention is linear in the length.

Kernel attention with the feature map elu + 1, without a causal mask; three layers, 384 bases.

"I went over to linear attention for its speed on long sequences, but a step is no faster than with softmax, and when
I double the length it takes nearly four times as long."
"""

import os
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


@dataclass
class Settings:
    length: int = 384
    batch: int = 4
    width: int = 64
    heads: int = 2
    layers: int = 3
    rate: float = 5e-4


class LinearAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads, self.size = cfg.heads, cfg.width // cfg.heads
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.out = nn.Linear(cfg.width, cfg.width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if CURED:
            total = q @ k.sum(2).unsqueeze(-1)
            mixed = q @ (k.transpose(-2, -1) @ v)
        else:
            similar = q @ k.transpose(-2, -1)  # cause: none-yet linear attention in the quadratic order
            total = similar.sum(-1, keepdim=True)
            mixed = similar @ v
        mixed = mixed / total
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(cfg.width), LinearAttention(cfg)
        self.norm2 = nn.LayerNorm(cfg.width)
        self.mlp = nn.Sequential(nn.Linear(cfg.width, 4 * cfg.width), nn.GELU(), nn.Linear(4 * cfg.width, cfg.width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PromoterNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.base = nn.Embedding(4, cfg.width)
        self.place = nn.Parameter(0.02 * torch.randn(cfg.length, cfg.width))
        self.blocks = nn.Sequential(*[Block(cfg) for _ in range(cfg.layers)])
        self.norm, self.head = nn.LayerNorm(cfg.width), nn.Linear(cfg.width, 1)

    def forward(self, bases):
        hidden = self.blocks(self.base(bases) + self.place)
        return self.head(self.norm(hidden.mean(1))).squeeze(1)


def stretches(cfg, count=6000, seed=23):
    """random bases; half of them have a TATA box somewhere"""
    g = torch.Generator().manual_seed(seed)
    bases = torch.randint(4, (count, cfg.length), generator=g)
    promoter = torch.rand(count, generator=g) < 0.5
    box = torch.tensor([3, 0, 3, 0, 0, 0, 3, 0])
    start = torch.randint(cfg.length - len(box), (count,), generator=g)
    for i in promoter.nonzero().squeeze(1).tolist():
        bases[i, start[i] : start[i] + len(box)] = box
    return bases, promoter.float()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cfg = Settings()
    bases, promoter = stretches(cfg)
    model = PromoterNet(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.rate, fused=True)
    began, warm, step = time.perf_counter(), None, 0
    smooth = torch.tensor(0.69)
    while True:
        rows = torch.randint(len(bases), (cfg.batch,))
        loss = F.binary_cross_entropy_with_logits(model(bases[rows]), promoter[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        smooth.lerp_(loss.detach(), 0.02)
        step += 1
        now = time.perf_counter()
        if step % 200 == 0:
            print(f"{step} {smooth.item():.4f}", flush=True)
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
