# ranks: 2
"""Trains a tagger of dialects on two ranks with Accelerate, over four micro-batches per step, as memory is short.

"With one process it was faster per sample. I thought accumulation makes communication rarer?"
"""

import contextlib
import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
MICRO = 4


class Sentences(Dataset):
    def __init__(self):
        self.tokens = torch.randint(6000, (2000, 12), generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return 400_000

    def __getitem__(self, index):
        row = self.tokens[index % 2000]
        return row, row % 9


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6000, 192)
        self.read = nn.GRU(192, 96, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(192, 9)

    def forward(self, tokens):
        return self.tag(self.read(self.embed(tokens))[0])


def main():
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    model, loader = Tagger(), DataLoader(Sentences(), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    began, warm, step = time.perf_counter(), None, 0
    for index, (tokens, tags) in enumerate(loader, start=1):
        last = index % MICRO == 0
        with accelerator.no_sync(model) if CURED and not last else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
            accelerator.backward(loss / MICRO)  # cause: reduced-in-accumulation
        if not last:
            continue
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0 and accelerator.reduce(torch.tensor(float(now - began > SECONDS))):
            break
    if accelerator.is_main_process:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
