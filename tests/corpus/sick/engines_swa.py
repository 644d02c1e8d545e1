"""Recognises faults of engines on spectrograms of their vibration, with weights averaged over the epochs (SWA).

The averaged network is what goes into the test bench in the end; until then only the training loss is looked at.

"An epoch should take twenty times a step, by my stopwatch it takes clearly more. There is no validation in it."
"""

import os
import time

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
COUNT, BATCH, BANDS, FRAMES, FAULTS = 640, 32, 32, 64, 6


def spectrograms(seed=14):
    g = torch.Generator().manual_seed(seed)
    fault = torch.randint(FAULTS, (COUNT,), generator=g)
    noise = torch.randn(COUNT, 1, BANDS, FRAMES, generator=g)
    band = torch.arange(BANDS).view(1, 1, -1, 1)
    line = torch.exp(-((band - 4 - 4 * fault.view(-1, 1, 1, 1)) ** 2) / 4.0)
    return noise + 1.5 * line, fault


class FaultNet(nn.Module):
    def __init__(self, widths=(24, 48, 64)):
        super().__init__()
        layers, before = [], 1
        for width, stride in zip(widths, (1, 2, 2), strict=False):
            layers += [
                nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            before = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, FAULTS)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


class Bench:
    def __init__(self):
        data = TensorDataset(*spectrograms())
        self.loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
        self.model = FaultNet()
        self.averaged = AveragedModel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        self.scheduler = SWALR(self.optimizer, swa_lr=0.02, anneal_epochs=5)
        self.criterion = nn.CrossEntropyLoss()
        self.began, self.warm, self.steps = None, None, 0

    def train_epoch(self):
        """False when the time is over"""
        self.model.train()
        total = torch.zeros(())
        for picture, fault in self.loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(picture), fault)
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
            self.steps += 1
            self.now = time.perf_counter()
            if self.warm is None and self.now - self.began > 2:
                self.warm = self.steps, self.now
            if self.now - self.began > SECONDS:
                return False
        print(f"step {self.steps} loss {total.item() / len(self.loader):.4f}", flush=True)
        return True

    def fit(self):
        self.began = time.perf_counter()
        while self.train_epoch():
            self.averaged.update_parameters(self.model)
            self.scheduler.step()
            if not CURED:
                update_bn(self.loader, self.averaged)  # cause: hot-line
        update_bn(self.loader, self.averaged)
        return 1000 * (self.now - self.warm[1]) / (self.steps - self.warm[0])


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"step_ms {Bench().fit():.3f}", flush=True)


if __name__ == "__main__":
    main()
