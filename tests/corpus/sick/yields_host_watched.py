"""Predicts harvests from field surveys and logs the state of the host beside the loss, since a disk ran full in March.

"The monitoring only reads three numbers that the kernel has at hand. It cannot be that, and yet since that week the
night run does not finish by morning."
"""

import csv
import os
import subprocess
import tempfile
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
EVERY = 1000 if CURED else 1


def ask(command):
    done = subprocess.run(command, shell=True, capture_output=True, text=True)  # cause: hot-line
    return done.stdout.strip()


class HostLog:
    def __init__(self, folder):
        self.folder = folder
        self.file = open(os.path.join(folder, "host.csv"), "w", newline="")
        self.rows = csv.writer(self.file)
        self.rows.writerow(["step", "loss", "disk", "memory", "load"])

    def host(self):
        disk = ask(f"df --output=pcent {self.folder} | tail -1")
        memory = ask(f"ps -o rss= -p {os.getpid()}")
        load = ask("cut -d ' ' -f 1 /proc/loadavg")
        return disk, memory, load

    def write(self, step, loss):
        if step % EVERY == 0:
            self.rows.writerow([step, f"{loss.item():.5f}", *self.host()])

    def close(self):
        self.file.close()


def survey(fields=20_000, answers=64, seed=3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(fields, answers, generator=g)
    y = (x[:, :8] * x[:, 8:16]).sum(1, keepdim=True) + 0.1 * torch.randn(fields, 1, generator=g)
    return x, y


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = survey()
    model = nn.Sequential(
        nn.Linear(64, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 256), nn.SiLU(), nn.Linear(256, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        log = HostLog(folder)
        began, warm, step = time.perf_counter(), None, 0
        while True:
            rows = torch.randint(len(x), (320,))
            loss = nn.functional.smooth_l1_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.write(step, loss)
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                break
        log.close()
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
