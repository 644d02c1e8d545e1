"""Recommends films with neural collaborative filtering; before every epoch, other unseen films are drawn for each user.

"persistent_workers=True made the epochs a little shorter, and the hit rate much worse. It took me a week to see why."
"""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
USERS, FILMS, SEEN, NEGATIVES = 900, 1600, 8000, 4


class Ratings(Dataset):
    def __init__(self):
        draw = np.random.default_rng(0)
        self.seen = np.unique(draw.integers(USERS * FILMS, size=SEEN))
        self.draw = draw

    def ng_sample(self):
        """The seen films, and as many others; workers are forked after it, and so have them."""
        users, films = np.divmod(self.seen, FILMS)
        others = self.draw.integers(FILMS, size=NEGATIVES * len(users))
        drawn = np.repeat(users, NEGATIVES) * FILMS + others
        drawn = drawn[~np.isin(drawn, self.seen)]
        self.users = np.concatenate([users, drawn // FILMS])
        self.films = np.concatenate([films, drawn % FILMS])
        self.liked = np.concatenate([np.ones(len(users), np.float32), np.zeros(len(drawn), np.float32)])

    def __len__(self):
        return len(self.users)

    def __getitem__(self, index):
        return self.users[index], self.films[index], self.liked[index]


class NCF(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.users, self.films = nn.Embedding(USERS, size), nn.Embedding(FILMS, size)
        self.body = nn.Sequential(
            nn.Linear(2 * size, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, users, films):
        return self.body(torch.cat([self.users(users), self.films(films)], 1))[:, 0]


def main():
    torch.set_num_threads(1)
    ratings = Ratings()
    ratings.ng_sample()
    loader = DataLoader(ratings, batch_size=1024, shuffle=True, num_workers=2)
    net = NCF()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    began, warm, step, epoch, now = time.perf_counter(), None, 0, 0, 0.0
    while now - began < SECONDS:
        loader.dataset.ng_sample()
        for users, films, liked in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(users, films), liked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if now - began > SECONDS:
                break
        epoch += 1
        if warm is None and now - began > 2:
            warm = step, now
    print(f"{epoch} epochs", flush=True)
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
