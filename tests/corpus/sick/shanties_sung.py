"""Trains a GRU on the letters of sea shanties; every 40 steps it validates and lets the model sing a few lines.

"The curve of my steps per second has dips, though the validation set has only four batches. The GRU has no attention,
so nothing in it should grow with the length of what it has written."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
LETTERS = "\n abcdefghijklmnopqrstuvwxyz'"
LENGTH, BATCH, VERSE = 64, 16, 144


def shanties(n=2500, seed=6):
    g = torch.Generator().manual_seed(seed)
    words = ["heave", "ho", "the", "captain's", "rum", "blow", "whale", "sail", "lads", "away", "tide", "and"]
    lines = [" ".join(words[i] for i in torch.randint(len(words), (6,), generator=g)) for _ in range(n)]
    return torch.tensor([LETTERS.index(c) for c in "\n".join(lines)])


class Singer(nn.Module):
    def __init__(self, width=144):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), 48)
        self.gru = nn.GRU(48, width, batch_first=True)
        self.out = nn.Linear(width, len(LETTERS))

    def forward(self, letters, state=None):
        hidden, state = self.gru(self.letters(letters), state)
        return self.out(hidden), state

    @torch.no_grad()
    def sing(self, first="heave ho", singers=2):
        self.eval()
        song = torch.tensor([[LETTERS.index(c) for c in first]] * singers)
        state, heard = None, song
        while song.shape[1] < VERSE:
            if CURED:
                logits, state = self(heard, state)
            else:
                logits, _ = self(song)  # cause: hot-line
            heard = torch.multinomial((logits[:, -1] / 0.7).softmax(-1), 1)
            song = torch.cat([song, heard], 1)
        self.train()
        return ["".join(LETTERS[i] for i in line) for line in song.tolist()]


def pieces(text, n):
    at = torch.randint(len(text) - LENGTH - 1, (n, 1)) + torch.arange(LENGTH + 1)
    piece = text[at]
    return piece[:, :-1], piece[:, 1:]


@torch.no_grad()
def validate(model, text):
    model.eval()
    losses = []
    for k in range(4):
        span = text[k * 1600 : (k + 1) * 1600 + 1]
        logits, _ = model(span[:-1].view(25, -1))
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), span[1:]))
    model.train()
    return torch.stack(losses).mean().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = shanties()
    held_out, text = text[:8000], text[8000:]
    model = Singer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step, mark, t0 = 0, None, time.perf_counter()
    while True:
        seen, then = pieces(text, BATCH)
        logits, _ = model(seen)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), then.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 40 == 0:
            sung = model.sing()[0].splitlines()[-1]  # cause: hot-line
            print(f"{step}: held out {validate(model, held_out):.3f}: {sung}", flush=True)
        now = time.perf_counter()
        if mark is None and now - t0 > 2:
            mark = step, now
        if now - t0 > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
