"""Adapts a frozen encoder to transcripts of courts, with low-rank adapters in each of its layers and Accelerate.

"Only two per cent of the weights are trained, yet it is hardly faster than training them all."
"""

import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
WORDS, LENGTH, WIDTH, TOPICS = 1_000, 20, 384, 12


class Adapted(nn.Module):
    """A frozen linear layer, and what is learned on top of it."""

    def __init__(self, fan_in, fan_out, rank=8, alpha=16):
        super().__init__()
        frozen = nn.Linear(fan_in, fan_out)
        self.weight, self.bias = frozen.requires_grad_(False).weight, frozen.bias
        self.down = nn.Parameter(torch.randn(rank, fan_in) / fan_in**0.5)
        self.up = nn.Parameter(torch.zeros(fan_out, rank))
        self.scale = alpha / rank

    def forward(self, x):
        if CURED:
            return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.down), self.up)
        weight = self.weight + self.scale * (self.up @ self.down)  # cause: hot-line
        return F.linear(x, weight, self.bias)


class Layer(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.norm_a = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm_b = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.mixed, self.joined = Adapted(WIDTH, 3 * WIDTH), Adapted(WIDTH, WIDTH)
        self.wide, self.narrow = Adapted(WIDTH, 3 * WIDTH), Adapted(3 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        parts = self.mixed(self.norm_a(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(rows, length, WIDTH)
        x = x + self.joined(seen)
        return x + self.narrow(F.gelu(self.wide(self.norm_b(x))))


class Encoder(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.places = nn.Embedding(LENGTH, WIDTH).requires_grad_(False)
        self.layers = nn.Sequential(*(Layer() for _ in range(depth)))
        self.topic = nn.Linear(WIDTH, TOPICS)

    def forward(self, words):
        return self.topic(self.layers(self.words(words) + self.places.weight).mean(1))


class Transcripts(Dataset):
    def __init__(self, count=3_000):
        g = torch.Generator().manual_seed(8)
        self.topics = torch.randint(TOPICS, (count,), generator=g)
        self.words = torch.randint(WORDS, (count, LENGTH), generator=g)
        self.words[:, ::3] = self.words[:, ::3] // TOPICS + self.topics[:, None] * (WORDS // TOPICS) // 2

    def __len__(self):
        return len(self.topics)

    def __getitem__(self, i):
        return self.words[i].clamp(max=WORDS - 1), self.topics[i]


def main():
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-3)
    loader = DataLoader(Transcripts(), batch_size=6, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    began, warm, step, now = time.perf_counter(), None, 0, 0.0
    while now - began < SECONDS:
        for words, topics in loader:
            loss = F.cross_entropy(model(words), topics)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began >= SECONDS:
                break
        accelerator.print(f"step {step} loss {loss.item():.4f}")
    accelerator.print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
