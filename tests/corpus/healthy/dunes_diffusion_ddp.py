# ranks: 2
"""Trains a diffusion model of dunes on two ranks; the first one writes a log and saves, every few hundred steps.

"Only the first rank saves and logs. Does the other one wait for it?"
"""

import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))


class Denoiser(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.time = nn.Linear(16, width)
        self.first, self.last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.middle = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(4))

    def forward(self, x, t):
        phase = t[:, None] * torch.logspace(0, 3, 8)
        x = self.first(x) + self.time(torch.cat([phase.sin(), phase.cos()], 1))[:, :, None, None]
        for norm, convolve in zip(self.norms, self.middle, strict=True):
            x = x + convolve(nn.functional.silu(norm(x)))
        return self.last(x)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, folder = dist.get_rank(), tempfile.mkdtemp()
    torch.manual_seed(rank)
    model = DistributedDataParallel(Denoiser(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    dunes = torch.rand(256, 1, 24, 24)
    began, warm, step, total = time.perf_counter(), None, 0, torch.zeros(())
    while True:
        clean, t = dunes[torch.randint(256, (12,))], torch.rand(12)
        noise, keep = torch.randn_like(clean), (t * torch.pi / 2).cos()[:, None, None, None]
        found = model(keep * clean + (1 - keep**2).sqrt() * noise, t)
        loss = nn.functional.mse_loss(found, noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.detach()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 50 == 0:
            news = torch.stack([total, torch.tensor(float(now - began > SECONDS))])
            dist.all_reduce(news)
            total.zero_()
            if rank == 0:
                with open(os.path.join(folder, "log.jsonl"), "a") as file:
                    file.write(json.dumps({"step": step, "loss": news[0].item() / 100}) + "\n")
            if news[1] > 0:
                break
        if step % 300 == 0 and rank == 0:
            torch.save(model.module.state_dict(), os.path.join(folder, "dunes.pt"))
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
