"""Predicts the next word in transcripts of radio shows with a GRU.

"The recurrent network is tiny, and yet a step takes longer than in the tutorial with the large one."
"""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
WORDS = 4_000


class NextWord(nn.Module):
    def __init__(self, width=48, hidden=96):
        super().__init__()
        self.project = nn.Linear(WORDS, width, bias=False)
        self.gru = nn.GRU(width, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 400)

    def forward(self, words):
        if CURED:
            vectors = F.embedding(words, self.project.weight.t())
        else:
            vectors = self.project(F.one_hot(words, WORDS).float())  # cause: hot-line
        states, _ = self.gru(vectors)
        return self.out(states)


def batches(transcript, size=24, length=24):
    while True:
        starts = torch.randint(0, len(transcript) - length - 1, (size,))
        places = starts[:, None] + torch.arange(length + 1)
        window = transcript[places]
        yield window[:, :-1], window[:, 1:] % 400


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transcript = torch.randint(0, WORDS, (300_000,))
    model = NextWord()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    began, warm, step = time.perf_counter(), None, 0
    for words, targets in batches(transcript):
        logits = model(words)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
