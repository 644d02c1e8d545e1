"""Pre-trains an encoder on customs declarations by masking some of their fields, on two processes.

The number of masked fields differs between the ranks, so that they agree on it in each step and divide the loss by
the mean over all of them; the head sees only the masked fields.

"There is an all_reduce of a single number in every step. Should I drop it, or do it more rarely?"
"""

# ranks: 2
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CODES, FIELDS, BATCH, WIDTH, MASK = 500, 32, 12, 128, 0


class Declarations(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CODES, WIDTH)
        self.field = nn.Parameter(0.02 * torch.randn(FIELDS, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CODES)

    def forward(self, codes, masked):
        hidden = self.encoder(self.embed(codes) + self.field)
        return self.head(hidden[masked])


def archive(rank, count=6000):
    g = torch.Generator().manual_seed(50 + rank)
    codes = torch.randint(1, CODES, (count, FIELDS), generator=g)
    codes[:, 1::2] = 1 + codes[:, ::2] * 3 % (CODES - 1)
    return codes


def masked_mean(logits, wanted, world):
    """mean over the masked fields of all ranks, after DDP has averaged the gradients"""
    total = torch.tensor(float(len(wanted)))
    dist.all_reduce(total)
    return nn.functional.cross_entropy(logits, wanted, reduction="sum") * world / total


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    codes = archive(rank)
    torch.manual_seed(60 + rank)
    model = DistributedDataParallel(Declarations())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        wanted = codes[torch.randint(len(codes), (BATCH,))]
        masked = torch.rand(wanted.shape) < 0.15
        masked[0, 0] = True
        logits = model(wanted.masked_fill(masked, MASK), masked)
        loss = masked_mean(logits, wanted[masked], world)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0:
            over = torch.tensor(float(now - began > SECONDS))
            dist.all_reduce(over)
            if over.item() > 0:
                break
    if rank == 0:
        print(f"loss {loss.item():.3f}")
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
