"""Trains a transformer with top-1 mixtures of experts on the batch records of glassworks.

"From the papers I understood that a sparse mixture gives four times the parameters at about the cost of a dense model.
My model with four experts per layer is far slower than the one with a single expert."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
WORDS, LENGTH, BATCH, WIDTH, EXPERTS = 400, 48, 12, 96, 4


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        chance = self.router(tokens).softmax(-1)
        weight, chosen = chance.max(-1)
        share = nn.functional.one_hot(chosen, EXPERTS).to(x.dtype)
        self.balance = EXPERTS * (share.mean(0) * chance.mean(0)).sum()
        out = torch.zeros_like(tokens)
        for k, expert in enumerate(self.experts):
            if CURED:
                rows = (chosen == k).nonzero().squeeze(1)
                out = out.index_add(0, rows, expert(tokens[rows]) * weight[rows, None])
            else:
                gate = (weight * share[:, k])[:, None]
                out = out + gate * expert(tokens)  # cause: none-yet every expert runs on every token
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture()

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mixture(self.between(x))


class Model(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def forward(self, words):
        x = self.words(words) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.out(x), sum(layer.mixture.balance for layer in self.layers)


def records(n=60_000):
    g = torch.Generator().manual_seed(3)
    steps = torch.randint(1, 6, (n,), generator=g)
    return steps.cumsum(0) % WORDS


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text, model = records(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, mark, t0 = 0, None, time.perf_counter()
    while True:
        begins = torch.randint(len(text) - LENGTH - 1, (BATCH, 1)) + torch.arange(LENGTH + 1)
        piece = text[begins]
        logits, balance = model(piece[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"{step}: loss {loss.item():.3f} balance {balance.item():.3f}", flush=True)
        now = time.perf_counter()
        if mark is None and now - t0 > 2:
            mark = step, now
        if now - t0 > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
