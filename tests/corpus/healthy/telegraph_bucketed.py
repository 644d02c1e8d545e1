"""Reads telegraph signals of all lengths with a recurrent network and CTC, in batches of like lengths.

Every five hundred steps a few held-out messages are read by a beam search in Python.

"Each batch has another shape, nothing is packed, and the beam search is pure Python."
"""

import math
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
BANDS, LETTERS, EACH, BATCH, WIDTH = 16, 26, 6, 20, 96


class Messages:
    """Messages of 6 to 14 letters, each letter six frames of noise and a pattern; a bucket for each length."""

    def __init__(self, count, seed):
        self.gen = torch.Generator().manual_seed(seed)
        patterns = torch.randn(LETTERS + 1, EACH, BANDS, generator=torch.Generator().manual_seed(0))
        self.buckets = []
        for length in range(6, 15):
            letters = torch.randint(1, LETTERS + 1, (count, length), generator=self.gen)
            sound = patterns[letters].flatten(1, 2)
            self.buckets.append((sound + 0.6 * torch.randn(sound.shape, generator=self.gen), letters))

    def draw(self, count):
        sound, letters = self.buckets[torch.randint(len(self.buckets), (1,), generator=self.gen).item()]
        some = torch.randint(len(sound), (count,), generator=self.gen)
        return sound[some], letters[some]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(BANDS, WIDTH, 5, stride=3, padding=2)
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, LETTERS + 1)

    def forward(self, sound):
        """(messages, frames, bands) to (frames, messages, letters), as the loss wants them."""
        h = F.relu(self.front(sound.transpose(1, 2))).permute(2, 0, 1)
        return F.log_softmax(self.out(self.rnn(h)[0]), dim=2)


def both(a, b):
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def beam(scores, width=4):
    """Prefixes with the log-probabilities that they end in a blank or in a letter."""
    beams = {(): (0.0, -math.inf)}
    for row in scores:
        grown = {}
        best = sorted(range(len(row)), key=row.__getitem__)[-6:]
        for prefix, (blank, letter) in beams.items():
            whole = both(blank, letter)
            for sign in best:
                if sign == 0:
                    old = grown.get(prefix, (-math.inf, -math.inf))
                    grown[prefix] = both(old[0], whole + row[0]), old[1]
                    continue
                repeated = bool(prefix) and prefix[-1] == sign
                if repeated:
                    old = grown.get(prefix, (-math.inf, -math.inf))
                    grown[prefix] = old[0], both(old[1], letter + row[sign])
                longer = (*prefix, sign)
                old = grown.get(longer, (-math.inf, -math.inf))
                grown[longer] = old[0], both(old[1], (blank if repeated else whole) + row[sign])
        beams = dict(sorted(grown.items(), key=lambda item: -both(*item[1]))[:width])
    return list(max(beams, key=lambda prefix: both(*beams[prefix])))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, held = Messages(600, 1), Messages(8, 2)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    began, mark, step = time.perf_counter(), None, 0
    while True:
        sound, letters = data.draw(BATCH)
        scores = model(sound)
        frames, signs = torch.full((BATCH,), len(scores)), torch.full((BATCH,), letters.shape[1])
        loss = F.ctc_loss(scores, letters, frames, signs, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        step += 1
        if step % 500 == 0:
            sound, letters = held.draw(4)
            with torch.inference_mode():
                read = [beam(each) for each in model(sound).transpose(0, 1).tolist()]
            right = sum(a == b for a, b in zip(read, letters.tolist(), strict=True))
            print(f"{step}: loss {loss.item():.3f}, {right} of 4 read", flush=True)
        now = time.perf_counter()
        if mark is None and now - began > 2:
            mark = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
