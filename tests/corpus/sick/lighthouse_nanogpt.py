"""Character GPT on the logbooks of lighthouse keepers, cut down from nanoGPT; local attention with ALiBi slopes.

"I made the window configurable per layer, so every block knows its own mask. 60 % of the time is attention, I think
that is normal for this context length?"
"""

import math
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


@dataclass
class GPTConfig:
    block_size: int = 160
    vocab_size: int = 96
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 96
    window: int = 64


def local_alibi(T, n_head, window):
    """(n_head, T, T): -slope * distance inside the window, -inf outside of it and in the future."""
    slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / n_head) for h in range(n_head)])
    bias = torch.full((n_head, T, T), float("-inf"))
    for i in range(T):
        low = max(0, i - window + 1)
        bias[:, i, low : i + 1] = slopes[:, None] * torch.arange(low - i, 1)
    return bias


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        if CURED:
            bias = local_alibi(config.block_size, config.n_head, config.window)
            self.register_buffer("bias", bias, persistent=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.config.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        if CURED:
            bias = self.bias[:, :T, :T]
        else:
            bias = local_alibi(T, self.config.n_head, self.config.window)  # cause: hot-line
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1)) + bias
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


torch.manual_seed(1337)
torch.set_num_threads(1)
config = GPTConfig()
data = torch.from_numpy(np.random.default_rng(0).integers(0, config.vocab_size, 400_000))


def get_batch(batch_size=2):
    ix = torch.randint(len(data) - config.block_size - 1, (batch_size,)).tolist()
    x = torch.stack([data[i : i + config.block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + config.block_size] for i in ix])
    return x, y


model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
iter_num, began, warm = 0, time.perf_counter(), None
while time.perf_counter() - began < SECONDS:
    X, Y = get_batch()
    loss = model(X, Y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    iter_num += 1
    if warm is None and time.perf_counter() - began > 2:
        warm = iter_num, time.perf_counter()
    if iter_num % 100 == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}", flush=True)
print(f"step_ms {1000 * (time.perf_counter() - warm[1]) / (iter_num - warm[0]):.3f}", flush=True)
