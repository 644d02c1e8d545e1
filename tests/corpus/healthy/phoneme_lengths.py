"""Spelling-to-phoneme tagger whose batches have very different shapes.

Words and phrases are sorted into batches of about equal numbers of characters, so that a batch holds
a few long phrases or many short words.

"My step time jumps by a factor of two from step to step. Something must be wrong with the loader."
"""

import os
import random
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

SECONDS = float(os.environ.get("SECONDS", "22"))

LETTERS, PHONEMES, BUDGET = 30, 44, 900


class Lexicon(Dataset):
    def __init__(self, count=9000):
        rnd = random.Random(9)
        g = torch.Generator().manual_seed(9)
        rule = torch.randint(1, PHONEMES, (LETTERS, LETTERS), generator=g)
        self.items = []
        for _ in range(count):
            n = min(90, 3 + int(rnd.expovariate(1 / 18)))
            w = torch.randint(1, LETTERS, (n,), generator=g)
            self.items.append((w, rule[w, w.roll(1)]))
        self.lengths = [len(w) for w, _ in self.items]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class BudgetSampler(Sampler):
    def __init__(self, lengths, budget):
        self.batches, batch = [], []
        for i in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and (len(batch) + 1) * lengths[i] > budget:
                self.batches.append(batch)
                batch = []
            batch.append(i)
        self.batches.append(batch)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)))


def collate(items):
    words, phonemes = zip(*items, strict=False)
    return pad_sequence(words, batch_first=True), pad_sequence(phonemes, batch_first=True, padding_value=-100)


class Tagger(nn.Module):
    def __init__(self, dim=64, hidden=96):
        super().__init__()
        self.emb = nn.Embedding(LETTERS, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Sequential(nn.Linear(2 * hidden, 128), nn.ReLU(), nn.Linear(128, PHONEMES))

    def forward(self, w):
        h, _ = self.rnn(self.emb(w))
        return self.out(h)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(9)
    random.seed(9)
    lexicon = Lexicon()
    loader = DataLoader(lexicon, batch_sampler=BudgetSampler(lexicon.lengths, BUDGET), collate_fn=collate)
    tagger = Tagger()
    opt = torch.optim.AdamW(tagger.parameters(), lr=2e-3, fused=True)
    steps, mark, begin = 0, None, time.perf_counter()
    running = torch.zeros(())
    spent = 0.0
    while spent < SECONDS:
        for w, p in loader:
            loss = F.cross_entropy(tagger(w).flatten(0, 1), p.flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(tagger.parameters(), 5.0)
            opt.step()
            running += loss.detach()
            steps += 1
            spent = time.perf_counter() - begin
            if mark is None and spent > 2:
                mark = steps, spent
            if spent >= SECONDS:
                break
        print(f"after {steps} steps: {running.item() / steps:.4f}")
    print(f"step_ms {(spent - mark[1]) / (steps - mark[0]) * 1000:.3f}", flush=True)


if __name__ == "__main__":
    main()
