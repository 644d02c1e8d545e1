"""Trains a recurrent frame classifier with DDP on two processes; batches of four, accumulated in eights.

Utterances differ a little in length from batch to batch, by the same plan on both processes.

"So many small batches, and the two processes speak with each other only at times."
"""

# ranks: 2
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
MELS, PHONES, EACH = 40, 30, 8


class Tagger(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(MELS, width, 5, stride=2, padding=2), nn.ReLU())
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, PHONES)

    def forward(self, mel):
        h, _ = self.rnn(self.front(mel).transpose(1, 2))
        return self.out(h)


class Corpus:
    """Random phone strings, each phone a spectrum that lasts for eight frames."""

    def __init__(self, rank, lengths=(9, 10, 11, 12)):
        self.spectra = torch.randn(PHONES, MELS, generator=torch.Generator().manual_seed(0))
        self.gen = torch.Generator().manual_seed(10 + rank)
        self.plan = torch.Generator().manual_seed(99)
        self.lengths = lengths

    def __iter__(self):
        while True:
            length = self.lengths[torch.randint(len(self.lengths), (1,), generator=self.plan)]
            phones = torch.randint(PHONES, (4, length), generator=self.gen)
            mel = self.spectra[phones].repeat_interleave(8, 1).transpose(1, 2)
            yield mel + torch.randn(mel.shape, generator=self.gen), phones.repeat_interleave(4, 1)


def train(rank, world):
    torch.manual_seed(3)
    model = DistributedDataParallel(Tagger(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    begun, warm = time.perf_counter(), None
    running = torch.zeros(())
    for step, (mel, phones) in enumerate(Corpus(rank), 1):
        last = step % EACH == 0
        with contextlib.nullcontext() if last else model.no_sync():
            logits = model(mel)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), phones.flatten())
            (loss / EACH).backward()
        running += loss.detach()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()

        now = time.perf_counter() - begun
        if warm is None and now > 2:
            warm = now, step
        if step % (8 * EACH) == 0:
            news = torch.stack([running / (8 * EACH), torch.tensor(float(now > SECONDS))])
            dist.all_reduce(news)
            running.zero_()
            if rank == 0:
                print(f"{step:6d} {news[0].item() / world:.4f}")
            if news[1] > 0:
                return 1000 * (now - warm[0]) / (step - warm[1])
    return None


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mean = train(rank, dist.get_world_size())
    if rank == 0:
        print(f"step_ms {mean:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
