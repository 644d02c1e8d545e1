"""Predicts the wear of bridges from vibration spectra; two ranks, and rank 0 keeps statistics for the dashboard.

"The second process seems to spend half of its life doing nothing, though both have the same number of rows."
"""
# ranks: 2

import json
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Dashboard:
    def __init__(self, every):
        self.every = every
        self.file = open(os.path.join(tempfile.mkdtemp(), "dashboard.jsonl"), "w")

    def histogram(self, values):
        counts, edges = np.histogram(values.detach().numpy().ravel(), bins=50)  # cause: hot-line or straggler
        return {"counts": counts.tolist(), "low": float(edges[0]), "high": float(edges[-1])}

    def update(self, step, model, loss):
        if step % self.every:
            return
        row = {"step": step, "loss": loss.item()}
        for name, param in model.named_parameters():
            row[f"weights/{name}"] = self.histogram(param)  # cause: hot-line or straggler
            row[f"gradients/{name}"] = self.histogram(param.grad)  # cause: hot-line or straggler
        self.file.write(json.dumps(row) + "\n")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(256, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256), nn.GELU(),
        nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 1),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dashboard = Dashboard(every=200 if CURED else 1) if rank == 0 else None
    generator = torch.Generator().manual_seed(rank)
    spectra = torch.randn(8_000, 256, generator=generator)
    wear = spectra[:, :20].mean(1, keepdim=True)
    stop = torch.zeros(1)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(0, 8_000, (512,), generator=generator)
        loss = nn.functional.mse_loss(model(spectra[rows]), wear[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dashboard:
            dashboard.update(step, model, loss)  # cause: hot-line or straggler
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0:
            stop.fill_(now - began > SECONDS)
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop.item():
                break
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
