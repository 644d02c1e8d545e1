"""Trains a MoCo-like contrastive encoder with a negative queue under DDP (gloo, two ranks).

Keys of all ranks are gathered before they go into the queue, so the queue is the same everywhere.

"The forward pass of the wrapped model takes much longer than that of the bare module, without any gradient
being sent yet. A longer queue makes it worse, far more than its matmul explains."
"""

# ranks: 2
import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)


class Signals(Dataset):
    def __init__(self, n=4096, d=256):
        g = torch.Generator().manual_seed(0)
        centres = torch.randn(64, d, generator=g)
        self.x = centres[torch.randint(0, 64, (n,), generator=g)] + 0.5 * torch.randn(n, d, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, idx):
        x = self.x[torch.as_tensor(idx)]
        return self.view(x), self.view(x)

    @staticmethod
    def view(x):
        keep = (torch.rand_like(x) > 0.2).float()
        return x * keep + 0.1 * torch.randn_like(x)


def encoder(d=256, h=256, out=64):
    return nn.Sequential(nn.Linear(d, h), nn.LayerNorm(h), nn.GELU(), nn.Linear(h, h), nn.GELU(), nn.Linear(h, out))


class MoCo(nn.Module):
    def __init__(self, queue=49152, dim=64, momentum=0.99, tau=0.1):
        super().__init__()
        self.q = encoder(out=dim)
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.m, self.tau = momentum, tau
        self.register_buffer("queue", F.normalize(torch.randn(queue, dim), dim=1))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def keys(self, x):
        torch._foreach_lerp_(list(self.k.parameters()), list(self.q.parameters()), 1 - self.m)
        return F.normalize(self.k(x), dim=1)

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        k = self.keys(b)
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ self.queue.T
        logits = torch.cat([pos, neg], 1) / self.tau
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)), k

    @torch.no_grad()
    def enqueue(self, k):
        parts = [torch.empty_like(k) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, k)
        new = torch.cat(parts)
        p = int(self.ptr)
        self.queue[p : p + len(new)] = new
        self.ptr[0] = (p + len(new)) % len(self.queue)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = MoCo()
    torch.manual_seed(1 + rank)
    ddp = DDP(net, broadcast_buffers=not CURED)  # cause: hot-line
    opt = torch.optim.SGD(net.q.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    ds = Signals()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler, drop_last=True, collate_fn=lambda b: b)

    step, epoch, mark, t0, done = 0, 0, None, time.perf_counter(), False
    while not done:
        sampler.set_epoch(epoch)
        epoch += 1
        for a, b in loader:
            loss, k = ddp(a, b)
            opt.zero_grad()
            loss.backward()
            opt.step()
            net.enqueue(k)
            step += 1
            now = time.perf_counter()
            if mark is None and now - t0 > 2:
                mark = now, step
            if step % 20 == 0:
                flag = torch.tensor([int(now - t0 > SECONDS)])
                dist.broadcast(flag, 0)
                if flag.item():
                    done = True
                    break
    if rank == 0:
        print(f"step_ms {1e3 * (now - mark[0]) / (step - mark[1]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
