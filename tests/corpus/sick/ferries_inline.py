"""Trains a forecast of how full ferries are from lines of their booking system, which are parsed when they are needed.

"I left the workers out, as parsing a few lines of text is no work for another process."
"""

import os
import random
import time
from datetime import datetime

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def hours_of(stamp):
    moment = datetime.strptime(stamp, "%d.%m.%Y %H:%M:%S")
    return moment.hour / 24, moment.weekday() / 7, moment.timetuple().tm_yday / 366


class Line:
    """A departure and its earlier ones: stamp, passengers and cars."""

    def __init__(self, text):
        self.entries = [entry.split(";") for entry in text.split("|")]

    def numbers(self):
        return [[*hours_of(stamp), int(people) / 400, int(cars) / 90] for stamp, people, cars in self.entries]


def entry_of(draw):
    stamp = (
        f"{draw.randint(1, 28):02}.{draw.randint(1, 12):02}.2024 {draw.randint(5, 22):02}:{draw.randint(0, 59):02}:00"
    )
    return f"{stamp};{draw.randint(0, 400)};{draw.randint(0, 90)}"


class Departures(Dataset):
    def __init__(self):
        draw = random.Random(9)
        self.lines = ["|".join(entry_of(draw) for _ in range(24)) for _ in range(2000)]

    def __len__(self):
        return 400_000

    def __getitem__(self, index):
        numbers = torch.tensor(Line(self.lines[index % 2000]).numbers())
        return numbers[:-1], numbers[-1, 3:]


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.GRU(5, 256, batch_first=True)
        self.out = nn.Linear(256, 2)

    def forward(self, earlier):
        return self.out(self.read(earlier)[0][:, -1])


def main():
    torch.set_num_threads(1)
    loader = DataLoader(  # cause: dataloader-too-few-workers
        Departures(), batch_size=64, shuffle=True, num_workers=1 if CURED else 0
    )
    forecast = Forecast()
    optimizer = torch.optim.Adam(forecast.parameters(), 1e-3)
    began, warm = time.perf_counter(), None
    for step, (earlier, full) in enumerate(loader, start=1):
        loss = nn.functional.mse_loss(forecast(earlier), full)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(forecast.parameters(), 1.0)
        optimizer.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
