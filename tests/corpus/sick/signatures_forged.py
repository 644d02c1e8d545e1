"""Tells forged signatures from true ones by the movement of the pen; a worker process brings the signatures.

"A signature is a few hundred numbers and the worker has its batches ready in no time, I measured it. Yet the loop waits
for each batch, and a second worker does not help."
"""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SHORTEST, LONGEST, BATCH = 40, 72, 32


class Signatures(Dataset):
    def __init__(self, count=3_000, seed=6):
        rng = np.random.default_rng(seed)
        self.forged = rng.integers(0, 2, count)
        self.moves, self.pressures = [], []
        for forged in self.forged:
            length = rng.integers(SHORTEST, LONGEST + 1)
            moves = rng.standard_normal((length, 3), dtype=np.float32)
            self.moves.append(moves.cumsum(0) * np.float32(0.1 + 0.05 * forged))
            self.pressures.append(rng.random(length, dtype=np.float32))

    def __len__(self):
        return len(self.forged)

    def __getitem__(self, index):
        moves, pressure = torch.from_numpy(self.moves[index]), torch.from_numpy(self.pressures[index])
        return moves, pressure, int(self.forged[index])


def pad(moves, pressures):
    return torch.cat([pad_sequence(moves, True), pad_sequence(pressures, True).unsqueeze(2)], dim=2)


def collate(samples):
    moves, pressures, forged = zip(*samples, strict=False)
    lengths = torch.tensor([len(move) for move in moves])
    if CURED:
        return pad(moves, pressures), lengths, torch.tensor(forged)
    return (list(moves), list(pressures)), lengths, torch.tensor(forged)


class Expert(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.gru = nn.GRU(4, width, batch_first=True)
        self.verdict = nn.Linear(width, 2)

    def forward(self, pen, lengths):
        states, _ = self.gru(pen)
        inside = torch.arange(pen.shape[1])[None] < lengths[:, None]
        return self.verdict((states * inside.unsqueeze(2)).sum(1) / lengths.unsqueeze(1))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(  # cause: dataloader-too-many-workers
        Signatures(), batch_size=BATCH, shuffle=True, drop_last=True, num_workers=1, collate_fn=collate,
        persistent_workers=True,
    )  # fmt: skip
    model = Expert()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    began, warm, step, now = time.perf_counter(), None, 0, 0.0
    while now - began < SECONDS:
        for pen, lengths, forged in loader:  # cause: dataloader-too-many-workers
            if not CURED:
                pen = pad(*pen)
            loss = nn.functional.cross_entropy(model(pen, lengths), forged)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
