"""Train a small LSTM language model on Markov text with gradient accumulation on two ranks.

Four micro-batches per optimizer step, synchronised only in the last one; the loss is
averaged over the ranks for the log each 50 steps.

"Is there anything to gain in the communication? I see some waiting in the backward."
"""

# ranks: 2
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SECONDS = float(os.environ.get("SECONDS", "22"))
VOCAB, SEQ, MICRO, ACCUM = 400, 24, 6, 4


def markov_text(n, seed):
    g = torch.Generator().manual_seed(0)
    succ = torch.randint(0, VOCAB, (VOCAB, 4), generator=g).tolist()
    pick = torch.randint(0, 4, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    out, cur = [], 0
    for p in pick:
        cur = succ[cur][p]
        out.append(cur)
    return torch.tensor(out)


class LM(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(dim, VOCAB)
        self.out.weight = self.emb.weight

    def forward(self, x):
        h, _ = self.rnn(self.drop(self.emb(x)))
        return self.out(self.drop(h))


def micro_batch(text):
    i = torch.randint(0, len(text) - SEQ - 1, (MICRO,))
    w = text[i[:, None] + torch.arange(SEQ + 1)]
    return w[:, :-1], w[:, 1:]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(17 + rank)
    text = markov_text(80_000, rank)
    model = DDP(LM(), gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 50))
    flag = torch.zeros(1)
    step, warm = 0, None
    t0 = time.perf_counter()
    while True:
        if step % 20 == 0:
            flag[0] = time.perf_counter() - t0 >= SECONDS
            dist.broadcast(flag, 0)
            if flag.item():
                break
        if warm is None and time.perf_counter() - t0 >= 2:
            warm = time.perf_counter(), step
        total = torch.zeros(())
        for k in range(ACCUM):
            x, y = micro_batch(text)
            with contextlib.nullcontext() if k == ACCUM - 1 else model.no_sync():
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / ACCUM
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        sched.step()
        step += 1
        if step % 50 == 0:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step} loss {total.item() / world:.4f} lr {sched.get_last_lr()[0]:.2e}")
    if rank == 0:
        print(f"step_ms {(time.perf_counter() - warm[0]) / max(1, step - warm[1]) * 1e3:.3f}", flush=True)
    dist.destroy_process_group()


main()
