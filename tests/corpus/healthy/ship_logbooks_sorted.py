"""Reads the kind of weather out of ships' logbooks; LSTM over batches of neighbours in length.

Entries are sorted by length and cut into batches, so that nearly nothing is padding; the batches come in random
order, which is why the time of a step goes up and down.

"The time of a step goes up and down by a factor of four: what is wrong with my loader?"
"""

import os
import random
import time

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

SECONDS = float(os.environ.get("SECONDS", 22))
WORDS, KINDS = 1200, 8


def logbook(n=4000, seed=1790):
    rng = random.Random(seed)
    entries = []
    for _ in range(n):
        kind = rng.randrange(KINDS)
        length = max(6, min(90, int(rng.gauss(32, 16))))
        ids = [
            1 + kind * 20 + rng.randrange(20) if rng.random() < 0.2 else rng.randrange(200, WORDS)
            for _ in range(length)
        ]
        entries.append((torch.tensor(ids), kind))
    return entries


class SortedBatches:
    def __init__(self, entries, size):
        entries = sorted(entries, key=lambda e: len(e[0]))
        self.batches = []
        for i in range(0, len(entries) - size + 1, size):
            ids, kinds = zip(*entries[i : i + size], strict=False)
            self.batches.append((pad_sequence(ids, batch_first=True), torch.tensor(kinds)))

    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)))


class LogbookReader(nn.Module):
    def __init__(self, dim=64, hidden=128):
        super().__init__()
        self.words = nn.Embedding(WORDS, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True)
        self.out = nn.Linear(hidden, KINDS)

    def forward(self, ids):
        h, _ = self.lstm(self.words(ids))
        return self.out(h.masked_fill((ids == 0).unsqueeze(-1), -1e4).amax(1))


def train_for(seconds):
    batches = SortedBatches(logbook(), size=32)
    reader = LogbookReader()
    optimizer = torch.optim.Adam(reader.parameters(), lr=2e-3, fused=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    stamps, running = [time.perf_counter()], torch.zeros(())
    epoch = 0
    while True:
        running.zero_()
        for ids, kinds in batches:
            loss = criterion(reader(ids), kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
            stamps.append(time.perf_counter())
            if stamps[-1] - stamps[0] > seconds:
                return stamps, epoch
        epoch += 1
        print(f"epoch {epoch}: mean loss {running.item() / len(batches.batches):.3f}")


if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.manual_seed(0)
    random.seed(0)
    stamps, epochs = train_for(SECONDS)
    stamps = stamps[len(stamps) // 10 :]
    print(f"epochs={epochs} step_ms {(stamps[-1] - stamps[0]) / (len(stamps) - 1) * 1e3:.3f}")
