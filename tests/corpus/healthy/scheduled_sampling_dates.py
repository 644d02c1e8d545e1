"""Rewrites dates with an attention decoder that is fed its own guesses more and more often.

Each character needs the guess before it, therefore the decoder is a loop in Python.

"It runs hundreds of little operations one after the other, one character at a time."
"""

import datetime
import os
import random
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))

FORMATS = ["%d %B %Y", "%B %d, %Y", "%A, %d.%m.%y", "%d/%m/%Y", "%a %d %b %Y"]
LONGEST, OUT_LENGTH, START = 26, 10, 10
SYMBOLS = "0123456789-"


def corpus(number=20_000):
    rnd = random.Random(4)
    first = datetime.date(1950, 1, 1)
    days = [first + datetime.timedelta(rnd.randrange(30_000)) for _ in range(number)]
    source = [day.strftime(rnd.choice(FORMATS)).lower()[:LONGEST].ljust(LONGEST) for day in days]
    letters = {c: i for i, c in enumerate(sorted(set("".join(source))))}
    x = torch.tensor([[letters[c] for c in text] for text in source])
    y = torch.tensor([[SYMBOLS.index(c) for c in day.isoformat()] for day in days])
    return x, y, len(letters)


class Rewriter(nn.Module):
    def __init__(self, letters, width=128):
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.encoder = nn.GRU(width, width // 2, bidirectional=True, batch_first=True)
        self.symbols = nn.Embedding(len(SYMBOLS), width)
        self.cell = nn.GRUCell(2 * width, width)
        self.query = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(2 * width, len(SYMBOLS))

    def forward(self, x, y, own):
        memory, last = self.encoder(self.letters(x))
        state = torch.cat([last[0], last[1]], 1)
        symbol = torch.full((len(x),), START)
        context = memory.mean(1)
        found = []
        for place in range(OUT_LENGTH):
            state = self.cell(torch.cat([self.symbols(symbol), context], 1), state)
            score = torch.bmm(memory, self.query(state)[:, :, None])
            context = torch.bmm(score.softmax(1).transpose(1, 2), memory)[:, 0]
            logits = self.out(torch.cat([state, context], 1))
            found.append(logits)
            guess = logits.detach().argmax(1)
            symbol = torch.where(torch.rand(len(x)) < own, guess, y[:, place])
        return torch.stack(found, 1)


def stream(x, y, size):
    """Shuffled batches for ever, with the number of the epoch."""
    epoch = 0
    while True:
        for rows in torch.randperm(len(x)).split(size):
            yield epoch, x[rows], y[rows]
        epoch += 1


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y, letters = corpus()
    held_x, held_y, x, y = x[:200], y[:200], x[200:], y[200:]
    model = Rewriter(letters)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    start, warm = time.perf_counter(), None
    for step, (epoch, source, target) in enumerate(stream(x, y, 48), 1):
        logits = model(source, target, own=min(0.5, step / 2000))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        passed = time.perf_counter() - start
        if warm is None and passed > 2:
            warm = passed, step
        if step % 250 == 0:
            with torch.no_grad():
                right = (model(held_x, held_y, own=1.0).argmax(-1) == held_y).all(1).float().mean()
            print(f"epoch {epoch} step {step} loss {loss.item():.3f} dates right {right.item():.2f}")
        if passed > SECONDS:
            break
    print(f"step_ms {1000 * (passed - warm[0]) / (step - warm[1]):.3f}", flush=True)


if __name__ == "__main__":
    main()
