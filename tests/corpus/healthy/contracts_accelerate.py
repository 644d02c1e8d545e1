# ranks: 2
"""Trains a classifier of contracts with Accelerate on two processes, with gradients of four micro-batches.

"Does accumulate() do what it should?"
"""

import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    pages = torch.rand(8192, 400)
    loader = DataLoader(TensorDataset(pages, pages.argmax(1) % 8), batch_size=32, shuffle=True, drop_last=True)
    net = nn.Sequential(nn.Linear(400, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        for page, kind in loader:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(page), kind)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
        over = accelerator.reduce(torch.tensor(float(now - began > SECONDS)))
        if over > 0:
            break
    accelerator.print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
