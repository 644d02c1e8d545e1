"""Sorts paragraphs of sagas by their manuscript; paragraphs of like length share a batch of about equal token count.

"Some batches have eight rows and others over a hundred. Doesn't that make it slow?"
"""

import os
import random
import time

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

SECONDS = float(os.environ.get("SECONDS", "22"))


class Paragraphs(Dataset):
    def __init__(self, count=4_000):
        source = random.Random(0)
        self.lengths = [min(120, 6 + int(source.expovariate(1 / 25))) for _ in range(count)]
        self.words = [torch.randint(1, 900, (length,)) for length in self.lengths]
        self.manuscripts = torch.randint(0, 5, (count,)).tolist()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, number):
        return self.words[number], self.manuscripts[number]


class TokenBatches(Sampler):
    """Rows of like length, so many that a batch has at most `tokens` places; the batches in random order."""

    def __init__(self, lengths, tokens=900):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches, batch = [], []
        for row in order:
            if batch and (len(batch) + 1) * lengths[row] > tokens:
                self.batches.append(batch)
                batch = []
            batch.append(row)
        self.batches.append(batch)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)))


def collate(rows):
    words, manuscripts = zip(*rows, strict=True)
    return pad_sequence(words, batch_first=True), torch.tensor(manuscripts)


class Reader(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.words = nn.Embedding(900, width, padding_idx=0)
        self.places = nn.Embedding(128, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 5)

    def forward(self, words):
        padding = words == 0
        x = self.words(words) + self.places.weight[: words.shape[1]]
        x = self.body(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
        return self.out(x.sum(1) / (~padding).sum(1, keepdim=True))


def main():
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    paragraphs = Paragraphs()
    loader = DataLoader(paragraphs, batch_sampler=TokenBatches(paragraphs.lengths), collate_fn=collate)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    began, warm, step, now = time.perf_counter(), None, 0, 0.0
    while now - began < SECONDS:
        for words, manuscripts in loader:
            loss = nn.functional.cross_entropy(model(words), manuscripts)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 200 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
