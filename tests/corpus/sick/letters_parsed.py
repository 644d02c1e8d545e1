"""Trains a sorter of letters to a city's offices; a dataclass cleans each letter when it is made.

"Two workers on two cores, and htop shows both of them red all the time. The dataset only reads from a list."
"""

import os
import random
import re
import time
import zlib
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
STOPWORDS = sorted({"".join(random.Random(seed).choices("aeinorst", k=2 + seed % 4)) for seed in range(500)})
STOPSET = frozenset(STOPWORDS)
NOISE = re.compile(r"\b(?:" + "|".join(STOPWORDS) + r")\b")
WORD = re.compile(r"[a-z]+")


@dataclass
class Letter:
    text: str
    office: int
    words: list = field(default_factory=list)

    def __post_init__(self):
        if CURED:
            self.words = [word for word in WORD.findall(self.text) if word not in STOPSET]
        else:
            cleaned = NOISE.sub(" ", self.text)  # cause: dataloader-slow-transform
            self.words = WORD.findall(cleaned)

    @property
    def ids(self):
        return torch.tensor([hash_of(word) for word in self.words[:128]] + [0] * max(0, 128 - len(self.words)))


def hash_of(word, buckets=4096):
    return 1 + zlib.crc32(word.encode()) % (buckets - 1)


class Letters(Dataset):
    def __init__(self):
        draw = random.Random(1)
        words = ["".join(draw.choices("abcdefghijklmnorstuvw", k=draw.randint(3, 9))) for _ in range(3000)] + STOPWORDS
        self.raw = [(" ".join(draw.choices(words, k=600)), draw.randrange(12)) for _ in range(400)]

    def __len__(self):
        return 200_000

    def __getitem__(self, index):
        letter = Letter(*self.raw[index % len(self.raw)])
        return letter.ids, letter.office


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4096, 96, padding_idx=0)
        self.convolve = nn.Conv1d(96, 64, 3, padding=1)
        self.out = nn.Linear(64, 12)

    def forward(self, ids):
        return self.out(self.convolve(self.embed(ids).transpose(1, 2)).relu().amax(2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    loader = DataLoader(Letters(), batch_size=32, shuffle=True, num_workers=2)
    sorter = Sorter()
    optimizer = torch.optim.Adam(sorter.parameters())
    began, warm = time.perf_counter(), None
    for step, (ids, offices) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(sorter(ids), offices)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(sorter.parameters(), 1.0)
        optimizer.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
