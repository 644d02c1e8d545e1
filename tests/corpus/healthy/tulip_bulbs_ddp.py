"""Grades tulip bulbs by size and disease from conveyor-belt images, two processes, DistributedDataParallel.

Buckets are kept small because the farm's switch drops large messages. The loss is read every hundred
steps, and process 0 writes a checkpoint every few minutes.

"We keep the buckets small because of the switch: does that cost us?"
"""
# ranks: 2

import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SECONDS = float(os.environ.get("SECONDS", 22))
SAVE_EVERY_S = 240.0
GRADES, SICKNESSES = 5, 4


def belt_images(n, rank):
    g = torch.Generator().manual_seed(40 + rank)
    grade = torch.randint(0, GRADES, (n,), generator=g)
    sick = torch.randint(0, SICKNESSES, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 40), torch.linspace(-1, 1, 40), indexing="ij")
    radius = 0.3 + 0.12 * grade[:, None, None]
    bulb = (xx**2 + yy**2 < radius**2).float()
    image = torch.stack([bulb * 0.8, bulb * (0.6 - 0.1 * sick[:, None, None]), bulb * 0.3], 1)
    return image + 0.1 * torch.randn(image.shape, generator=g), grade, sick


class BulbNet(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 5, stride=2, padding=2)
        self.layers = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(4))
        self.grade = nn.Linear(c, GRADES)
        self.sick = nn.Linear(c, SICKNESSES)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for conv in self.layers:
            x = x + F.relu(conv(x))
        x = x.mean((2, 3))
        return self.grade(x), self.sick(x)


def save(model, optimizer, step, folder):
    torch.save(
        {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
        os.path.join(folder, "bulbs.pt"),
    )


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    image, grade, sick = belt_images(2400, rank)
    model = DDP(BulbNet(), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    start = saved = time.perf_counter()
    ticks, step, over = [], 0, torch.zeros(1)
    with tempfile.TemporaryDirectory() as folder:
        while not over.item():
            order = torch.randperm(len(image)).split(24)
            for rows in order:
                by_grade, by_sickness = model(image[rows])
                loss = F.cross_entropy(by_grade, grade[rows]) + F.cross_entropy(by_sickness, sick[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                now = time.perf_counter()
                ticks.append(now)
                if rank == 0 and step % 100 == 0:
                    print(f"step {step} loss {loss.item():.4f}", flush=True)
                if rank == 0 and now - saved > SAVE_EVERY_S:
                    save(model, optimizer, step, folder)
                    saved = now
                if step % 50 == 0:
                    over.fill_(float(now - start > SECONDS))
                    dist.broadcast(over, 0)
                    if over.item():
                        break
    if rank == 0:
        ticks = ticks[len(ticks) // 10 :]
        print(f"step_ms {(ticks[-1] - ticks[0]) / (len(ticks) - 1) * 1e3:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
