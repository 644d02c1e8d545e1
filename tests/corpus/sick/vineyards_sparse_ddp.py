"""Forecasts the ripening of grapes from weather series with a transformer on two processes of one workstation.

The script was made for two vineyards' offices that were linked by DSL, and runs now on the two cores of one box.

"The transformer alone, on one process, takes much less for the same batch. The network can't be it, there is none."
"""

# ranks: 2
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
BATCH, DAYS, SENSORS, WIDTH = 8, 32, 12, 160


class Compression:
    """Keeps what has not been sent yet, so that it is sent later (Deep Gradient Compression)."""

    def __init__(self, ratio=0.05):
        self.ratio, self.unsent = ratio, {}


def largest_only(state, bucket):
    """Exchanges only the largest entries of a bucket of gradients."""
    flat, number, world = bucket.buffer(), bucket.index(), dist.get_world_size()
    unsent = state.unsent.get(number)
    if unsent is not None and unsent.numel() == flat.numel():
        flat.add_(unsent)
    count = max(1, int(state.ratio * flat.numel()))
    where = flat.abs().topk(count).indices
    values = flat[where]
    unsent = flat.clone()
    unsent[where] = 0.0
    state.unsent[number] = unsent

    all_values = [torch.empty_like(values) for _ in range(world)]
    all_where = [torch.empty_like(where) for _ in range(world)]
    dist.all_gather(all_values, values)
    dist.all_gather(all_where, where)
    flat.zero_()
    for theirs, places in zip(all_values, all_where, strict=False):
        flat.index_add_(0, places, theirs)
    flat.div_(world)
    done = torch.futures.Future()
    done.set_result(flat)
    return done


class Ripening(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.inputs = nn.Linear(SENSORS, WIDTH)
        self.day = nn.Parameter(0.02 * torch.randn(DAYS, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.sugar = nn.Linear(WIDTH, 7)

    def forward(self, weather):
        hidden = self.encoder(self.inputs(weather) + self.day)
        return self.sugar(hidden.mean(1))


def seasons(count, rank):
    g = torch.Generator().manual_seed(100 + rank)
    walk = torch.randn(count, DAYS, SENSORS, generator=g).cumsum(1) * 0.2
    weights = torch.randn(SENSORS, 7, generator=torch.Generator().manual_seed(1)) * 0.3
    return walk, torch.tanh(walk[:, DAYS // 2 :].mean(1) @ weights)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    weather, sugar = seasons(3000, rank)
    model = DistributedDataParallel(Ripening())
    if not CURED:
        model.register_comm_hook(Compression(), largest_only)  # cause: hot-line
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)

    began, warm, step = time.perf_counter(), None, 0
    running = torch.zeros(())
    while True:
        rows = torch.randint(len(weather), (BATCH,))
        loss = nn.functional.mse_loss(model(weather[rows]), sugar[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running.lerp_(loss.detach(), 0.02)
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0:
            over = torch.tensor(float(now - began > SECONDS))
            dist.all_reduce(over)
            if over.item() > 0:
                break
            if rank == 0 and step % 100 == 0:
                print(f"step {step}: {running.item():.4f}", flush=True)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
