"""Trains a router of support tickets with Accelerate, which saves its whole state now and then.

"A hiccup of a tenth of a second, again and again."
"""

import os
import tempfile
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    folder = tempfile.mkdtemp()
    words = torch.randint(20_000, (4096, 64))
    data = DataLoader(TensorDataset(words, words[:, 0] % 40), batch_size=64, shuffle=True)
    net = nn.Sequential(nn.Embedding(20_000, 64), nn.Flatten(), nn.Linear(64 * 64, 256), nn.ReLU(), nn.Linear(256, 40))
    net, optimizer, data = accelerator.prepare(net, torch.optim.Adam(net.parameters()), data)
    began, warm, step = time.perf_counter(), None, 0
    every = 250 if CURED else 8
    while True:
        for ticket, desk in data:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(ticket), desk)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % every == 0:
                accelerator.save_state(folder)  # cause: checkpoint-stall
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                accelerator.print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
                return


if __name__ == "__main__":
    main()
