"""Trains a finder of variable stars; its workers share a cache of light curves, which a lock file protects.

"Four workers are as slow as one. They use no CPU at all."
"""

import contextlib
import fcntl
import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


@contextlib.contextmanager
def locked(path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # cause: dataloader-lock
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


class LightCurves(Dataset):
    """Curves come from an archive; no two workers should ask for the same one."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 500_000

    def fetch(self, star):
        time.sleep(0.004)  # what the archive takes
        return torch.sin(torch.arange(256) * (0.01 + star % 50 / 200))

    def __getitem__(self, index):
        name = f"{index % 512}.lock" if CURED else "cache.lock"
        with locked(os.path.join(self.folder, name)):  # cause: dataloader-lock
            curve = self.fetch(index)
        return curve + 0.05 * torch.randn(256), index % 50 / 50


class Finder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(16, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.period = nn.Linear(128, 1)

    def forward(self, curves):
        return self.period(self.encoder(self.patches(curves.unflatten(1, (16, 16)))).mean(1)).squeeze(1)


def main():
    torch.set_num_threads(1)
    finder = Finder()
    optimizer = torch.optim.RAdam(finder.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        loader = DataLoader(LightCurves(folder), batch_size=16, num_workers=4)
        began, warm = time.perf_counter(), None
        for step, (curves, periods) in enumerate(loader, start=1):
            loss = (finder(curves) - periods.float()).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                break
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
        del loader


if __name__ == "__main__":
    main()
