"""Watches volcanoes on two ranks, from a stream of infrared frames that holds only the difference to the frame before.

A frame is known only when all before it have been added up, so each rank has to unpack the frames of the other as well.

"Each of the two ranks reads the whole stream and then skips every second clip. Should not each read its half?"
"""

# ranks: 2
import os
import time
import zlib

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
SIDE, FRAMES, CLIP, BATCH = 40, 2048, 4, 8


def film(seed=13):
    rng = np.random.default_rng(seed)
    deltas = []
    for _ in range(FRAMES):
        delta = np.zeros((SIDE, SIDE), np.int16)
        y, x = rng.integers(SIDE - 12, size=2)
        delta[y : y + 12, x : x + 12] = rng.integers(-9, 10, (12, 12))
        deltas.append(zlib.compress(delta.tobytes(), 6))
    return deltas


class Film(IterableDataset):
    def __init__(self, deltas, rank, world):
        self.deltas, self.rank, self.world = deltas, rank, world

    def __iter__(self):
        frame, clip, k = np.zeros((SIDE, SIDE), np.int16), [], 0
        while True:
            for packed in self.deltas:
                frame = frame + np.frombuffer(zlib.decompress(packed), np.int16).reshape(SIDE, SIDE)
                clip.append(frame)
                if len(clip) > CLIP:
                    if k % self.world == self.rank:
                        yield torch.from_numpy(np.stack(clip)).float().div(50)
                    clip, k = [], k + 1


class Watcher(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.down = nn.Conv2d(CLIP, width, 5, padding=2)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, clip):
        x = nn.functional.silu(self.down(clip))
        x = x + nn.functional.silu(self.middle(x))
        return clip[:, -1:] + self.up(x)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loader = DataLoader(Film(film(), rank, world), batch_size=BATCH)
    model = DistributedDataParallel(Watcher())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, mark, t0 = 0, None, time.perf_counter()
    for clip in loader:
        loss = nn.functional.smooth_l1_loss(model(clip[:, :-1]), clip[:, -1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if mark is None and now - t0 > 2:
            mark = step, now
        if step % 20 == 0:
            over = torch.tensor(float(now - t0 > SECONDS))
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            if rank == 0 and step % 100 == 0:
                print(f"{step}: loss {loss.item():.4f}", flush=True)
            if over.item():
                break
    if rank == 0:
        print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
