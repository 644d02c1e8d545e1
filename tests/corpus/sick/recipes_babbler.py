"""A tiny GPT that babbles recipes, letter by letter, written after a well-known video.

The text is drawn from a grammar of a few lines.

"Same number of weights as my GRU, but it gets slow when I let it look back further. I kept everything as simple as
I could."
"""

import math
import os
import random
import time

import torch
import torch.nn as nn
from torch.nn import functional as F

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

batch_size = 4
block_size = 256
n_embd = 96
n_head = 6
n_layer = 3
learning_rate = 1e-3
torch.set_num_threads(1)
torch.manual_seed(1337)
random.seed(1337)

foods = "leek onion flour butter salt thyme carrot barley cream vinegar mustard plum".split()
verbs = "chop boil fry peel grind soak press strain".split()
text = " ".join(
    f"{random.choice(verbs)} {random.randint(1, 9)} {random.choice(foods)} and {random.choice(foods)}."
    for _ in range(20_000)
)
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
offsets = torch.arange(block_size + 1)


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size, 1))
    rows = data[ix + offsets]
    return rows[:, :-1], rows[:, 1:]


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.c_attn(x).split(n_embd, dim=2))
        if CURED:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # cause: hot-line
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            y = att @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(len(chars), n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
t0, warm, step = time.perf_counter(), None, 0
while True:
    xb, yb = get_batch()
    loss = model(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    step += 1
    t1 = time.perf_counter()
    if warm is None and t1 - t0 > 2:
        warm = step, t1
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
    if t1 - t0 > SECONDS:
        break
print(f"step_ms {1000 * (t1 - warm[1]) / (step - warm[0]):.3f}", flush=True)
