"""Learns to continue melodies; each epoch has a new set of them, longer ones from time to time, and noise from workers.

"There is no DataLoader to keep: the melodies of the next epoch are others."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
PITCHES, COUNT = 48, 640


class Melodies(Dataset):
    def __init__(self, length, seed):
        draw = torch.Generator().manual_seed(seed)
        steps = torch.randint(-3, 4, (COUNT, length + 1), generator=draw)
        self.notes = (steps.cumsum(1) + PITCHES // 2).clamp(0, PITCHES - 1)

    def __len__(self):
        return len(self.notes)

    def __getitem__(self, index):
        notes = self.notes[index]
        heard = torch.where(torch.rand(len(notes) - 1) < 0.05, torch.randint(PITCHES, ()), notes[:-1])
        return heard, notes[1:]


class Continues(nn.Module):
    def __init__(self, width=160):
        super().__init__()
        self.pitch = nn.Embedding(PITCHES, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, PITCHES)

    def forward(self, notes):
        return self.out(self.layer(self.pitch(notes))[0])


def main():
    torch.set_num_threads(1)
    net = Continues()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    began, warm, step, epoch, now = time.perf_counter(), None, 0, 0, 0.0
    while now - began < SECONDS:
        melodies = Melodies(length=24 + min(epoch // 10, 8), seed=epoch)
        loader = DataLoader(melodies, batch_size=32, shuffle=True, num_workers=2)
        for heard, following in loader:
            loss = nn.functional.cross_entropy(net(heard).flatten(0, 1), following.flatten())
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
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
