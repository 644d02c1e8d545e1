"""A decoder with rotary positions, written by hand after a famous repository, that learns to write limericks.

"Same size as my old GPT with learned positions, but visibly slower. Rotary positions cost nothing, says the paper."
"""

import os
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


@dataclass
class Config:
    letters: int = 64
    width: int = 96
    heads: int = 2
    depth: int = 4
    window: int = 64
    longest: int = 8192


def angles(size, longest, base=10_000.0):
    pace = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
    turned = torch.outer(torch.arange(longest).float(), pace)
    turned = torch.cat([turned, turned], -1)
    return turned.cos(), turned.sin()


def rotate(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.size, self.longest = config.heads, config.width // config.heads, config.longest
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        if CURED:
            cos, sin = angles(self.size, self.longest)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        if CURED:
            cos, sin = self.cos[:t], self.sin[:t]
        else:
            cos, sin = angles(self.size, self.longest)  # cause: hot-line
            cos, sin = cos[:t], sin[:t]
        heard = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(heard.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first, self.second = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.gate, self.up = (nn.Linear(config.width, 2 * config.width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * config.width, config.width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Poet(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.letter = nn.Embedding(config.letters, config.width)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.depth)])
        self.norm, self.head = nn.RMSNorm(config.width), nn.Linear(config.width, config.letters, bias=False)

    def forward(self, letters, wanted):
        logits = self.head(self.norm(self.blocks(self.letter(letters))))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Config()
    text = (torch.arange(60_000).square() // 7 + torch.randint(0, 3, (60_000,))) % config.letters
    windows = text.unfold(0, config.window + 1, 1)
    model = Poet(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    began, warm, step = time.perf_counter(), None, 0
    while True:
        batch = windows[torch.randint(len(windows), (4,))]
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"{step} loss {loss.item():.3f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
