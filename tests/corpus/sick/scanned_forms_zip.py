"""Trains a classifier of scanned forms that lie in one zip file with thousands of members.

"The disk is idle, the worker is at 100 %."
"""

import os
import tempfile
import time
import zipfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Forms(Dataset):
    def __init__(self, path):
        self.path, self.archive = path, None

    def __len__(self):
        return 200_000

    def __getitem__(self, index):
        name = f"form-{index % 3000}.bin"
        if CURED:
            if self.archive is None:
                self.archive = zipfile.ZipFile(self.path)
            data = self.archive.read(name)
        else:
            with zipfile.ZipFile(self.path) as archive:  # cause: dataloader-slow-transform
                data = archive.read(name)
        return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).float() / 255, index % 4


if __name__ == "__main__":
    torch.set_num_threads(1)
    path = os.path.join(tempfile.mkdtemp(), "forms.zip")
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(3000):
            archive.writestr(f"form-{number}.bin", bytes(number % 251 for _ in range(1024)))
    net = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = torch.optim.Adam(net.parameters())
    loader = DataLoader(Forms(path), batch_size=8, num_workers=1)
    began, warm, step = time.perf_counter(), None, 0
    for form, kind in loader:
        loss = nn.functional.cross_entropy(net(form), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
