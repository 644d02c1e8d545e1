"""Trains a language model on chat turns of unequal length, which a function of ours pads and masks.

"I use a worker, as one should, and the loop still waits for it."
"""

import os
import random
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
VOCABULARY, LONGEST = 2000, 192


def pad(turns):
    """Pad to the longest; a mask forbids each token to see what is after it, and padding."""
    longest = max(map(len, turns))
    if CURED:
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(turn) for turn in turns], batch_first=True)
        causal = torch.ones(longest, longest, dtype=torch.bool).tril()
        return tokens, causal & (tokens != 0)[:, None, :]
    tokens, mask = [], []
    for turn in turns:
        tokens.append(turn + [0] * (longest - len(turn)))
        rows = [
            [j <= i and tokens[-1][j] != 0 for j in range(longest)] for i in range(longest)
        ]  # cause: dataloader-slow-transform
        mask.append(rows)
    return torch.tensor(tokens), torch.tensor(mask)  # cause: dataloader-slow-transform


class Talk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, VOCABULARY)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        mask = mask | torch.eye(tokens.shape[1], dtype=torch.bool)
        x = x + nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=mask)
        return self.out(x)


if __name__ == "__main__":
    torch.set_num_threads(1)
    chance = random.Random(7)
    turns = [chance.choices(range(1, VOCABULARY), k=chance.randint(LONGEST // 3, LONGEST)) for _ in range(20_000)]
    settings = {"batch_size": 8, "shuffle": True, "collate_fn": pad}
    loader = DataLoader(turns, num_workers=1, **settings)  # cause: dataloader-too-few-workers
    model = Talk()
    optimizer = torch.optim.AdamW(model.parameters())
    began, warm, step = time.perf_counter(), None, 0
    for tokens, mask in loader:
        logits = model(tokens, mask)[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
