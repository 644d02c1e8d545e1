"""Trains an MLP on embeddings of proteins; workers are spawned, because the database driver cannot be forked.

"Each pass over the 40 batches begins with a pause of seconds, in which nothing happens."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Embeddings(Dataset):
    def __len__(self):
        return 40 * 64

    def __getitem__(self, index):
        return torch.full((320,), index / 2560), torch.tensor(index % 12)


class Folds(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(320, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU())
        self.head = nn.Linear(1024, 12)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    torch.set_num_threads(1)
    loader = DataLoader(  # cause: dataloader-workers-restarted
        Embeddings(), 64, shuffle=True, num_workers=1, multiprocessing_context="spawn", persistent_workers=CURED
    )
    model = Folds()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    began, warm, step = time.perf_counter(), None, 0
    while (now := time.perf_counter()) - began < SECONDS:
        for x, fold in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), fold).backward()
            optimizer.step()
            step += 1
        if warm is None and time.perf_counter() - began > 2:
            warm = step, time.perf_counter()
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
