# ranks: 2
# cause: straggler no-line
"""Trains a small encoder for sentence-pair scoring with DDP, batches bucketed by length.
Author's remark: "bucketing took away the padding, but two workers are hardly faster than one now"."""

import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
VOCAB, DIM = 600, 128


class Sentences(Dataset):
    def __init__(self, n=4096, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(8, 184, (n,), generator=g)
        self.text = [torch.randint(1, VOCAB, (int(m),), generator=g) for m in self.lengths]
        self.label = torch.randint(0, 2, (n,), generator=g)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        return self.text[i], self.label[i]


class BucketSampler(Sampler):
    """Cuts the length-sorted corpus into batches; each rank gets its part, shuffled anew each epoch."""

    def __init__(self, lengths, batch_size, rank, world):
        order = torch.argsort(lengths).tolist()
        batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        share = len(batches) // world
        if CURED:
            self.mine = batches[rank : share * world : world]
        else:
            self.mine = batches[rank * share : (rank + 1) * share]
        self.epoch = 0

    def __len__(self):
        return len(self.mine)

    def __iter__(self):
        g = torch.Generator().manual_seed(77 + self.epoch)
        self.epoch += 1
        for j in torch.randperm(len(self.mine), generator=g).tolist():
            yield self.mine[j]


def pad(samples):
    text, label = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(text, batch_first=True), torch.stack(label)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM, padding_idx=0)
        layer = nn.TransformerEncoderLayer(DIM, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(DIM, 2)

    def forward(self, ids):
        blank = ids.eq(0)
        h = self.enc(self.emb(ids), src_key_padding_mask=blank)
        h = h.masked_fill(blank.unsqueeze(-1), 0.0).sum(1) / (~blank).sum(1, keepdim=True)
        return self.out(h)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    data = Sentences()
    sampler = BucketSampler(data.lengths, 9, rank, world)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=pad)
    model = DDP(Scorer())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    lossfn = nn.CrossEntropyLoss()
    begin = time.perf_counter()
    warm_at, warm_step, step, running = None, 0, 0, True
    stop = torch.zeros(1)
    while running:
        for ids, label in loader:
            opt.zero_grad(set_to_none=True)
            loss = lossfn(model(ids), label)
            loss.backward()
            opt.step()
            step += 1
            now = time.perf_counter()
            if warm_at is None and now - begin > 2:
                warm_at, warm_step = now, step
            if step % 10 == 0:
                stop.fill_(float(now - begin > SECONDS))
                dist.all_reduce(stop, op=dist.ReduceOp.MAX)
                if stop.item() > 0:
                    running = False
                    break
    if rank == 0:
        print(f"step_ms {(time.perf_counter() - warm_at) * 1e3 / (step - warm_step):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
