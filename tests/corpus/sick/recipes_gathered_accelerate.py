"""Trains a GRU that writes cooking recipes word by word, with Accelerate on two processes.

The share of words it guesses right is kept over both processes and printed now and then.

"On one process this was fine. On two I get nothing like twice the words per second, and it became worse when I
went from a vocabulary of 1000 words to one of 6000."
"""

# ranks: 2
import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
WORDS, LENGTH, BATCH, WIDTH = 6000, 40, 8, 96


class Recipes(Dataset):
    def __init__(self, count=4096, seed=9):
        g = torch.Generator().manual_seed(seed)
        words = (torch.rand(count, LENGTH + 1, generator=g).square() * WORDS).long()
        words[:, 1::2] = (words[:, :-1:2] * 5 + 1) % WORDS
        self.words = words

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i, :-1], self.words[i, 1:]


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.out.weight = self.embed.weight

    def forward(self, words):
        hidden, _ = self.rnn(self.embed(words))
        return self.out(hidden)


class Accuracy:
    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.right, self.seen = 0, 0

    @torch.no_grad()
    def add(self, logits, wanted):
        if CURED:
            guessed, wanted = self.accelerator.gather_for_metrics((logits.argmax(-1), wanted))
        else:
            logits, wanted = self.accelerator.gather_for_metrics((logits.detach(), wanted))  # cause: hot-line
            guessed = logits.argmax(-1)
        self.right += (guessed == wanted).sum().item()
        self.seen += wanted.numel()

    def take(self):
        share = self.right / max(self.seen, 1)
        self.right, self.seen = 0, 0
        return share


def train(accelerator):
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(Recipes(), batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accuracy = Accuracy(accelerator)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        for words, wanted in loader:
            logits = model(words)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accuracy.add(logits, wanted)
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if step % 20 == 0:
                over = accelerator.reduce(torch.tensor(float(now - began > SECONDS)))
                if over.item() > 0:
                    return 1000 * (now - warm[1]) / (step - warm[0])
            if step % 100 == 0:
                accelerator.print(f"step {step} right {accuracy.take():.3f}", flush=True)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    ms = train(accelerator)
    accelerator.print(f"step_ms {ms:.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
