"""Tells pulsars from noise by folded profiles of a radio telescope, read from text.

"Three dense layers! Why does it need so long for them?"
"""
# cause: dataloader-lists no-line

import csv
import os
import random
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
BINS = 400


def write_profiles(path, count=1_500):
    source = random.Random(0)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        for _ in range(count):
            writer.writerow([f"{source.random():.3f}" for _ in range(BINS)] + [source.randrange(2)])


class Profiles(Dataset):
    def __init__(self, path):
        with open(path, newline="") as file:
            rows = list(csv.reader(file))
        self.profiles = [[float(value) for value in row[:-1]] for row in rows]
        self.labels = [int(row[-1]) for row in rows]
        if CURED:
            self.profiles = torch.tensor(self.profiles)

    def __len__(self):
        return len(self.profiles)

    def __getitem__(self, number):
        return self.profiles[number], self.labels[number]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = os.path.join(tempfile.mkdtemp(), "profiles.csv")
    write_profiles(path)
    loader = DataLoader(Profiles(path), batch_size=100, shuffle=True, drop_last=True)
    model = nn.Sequential(
        nn.Linear(BINS, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 384), nn.ReLU(), nn.Linear(384, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began, warm, step, epoch, now = time.perf_counter(), None, 0, 0, 0.0
    while now - began < SECONDS:
        total = torch.zeros(())
        for profiles, labels in loader:
            if not CURED:
                profiles = torch.stack(profiles, dim=1).float()
            loss = nn.functional.cross_entropy(model(profiles), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                break
        epoch += 1
        if epoch % 20 == 0:
            print(f"epoch {epoch} loss {total.item() / 15:.4f}", flush=True)
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
