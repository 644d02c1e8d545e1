"""Rain nowcasting from a stream of compressed weather-radar sweeps, with Accelerate.

"Two processes, and each one takes only its own sweeps from the stream, so per
process there should be half the reading. Yet an epoch takes as long as before.
Does Accelerate add so much on CPU?"
"""

# ranks: 2
import os
import time
import zlib

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
RAYS, GATES, GRID = 192, 256, 40


def record_sweeps(n=256, seed=21):
    rng = np.random.default_rng(seed)
    field = rng.normal(size=(RAYS, GATES)).cumsum(0).cumsum(1)
    sweeps = []
    for _ in range(n):
        field = np.roll(field, 2, axis=1) * 0.98 + rng.normal(size=(RAYS, GATES))
        sweeps.append(zlib.compress((field * 20).clip(-3e4, 3e4).astype(np.int16).tobytes(), 1))
    return sweeps


def decode(blob):
    """int16 polar sweep -> reflectivity on a Cartesian grid (bilinear)."""
    z = np.frombuffer(zlib.decompress(blob), np.int16).reshape(RAYS, GATES).astype(np.float32)
    z = np.sign(z) * np.log1p(np.abs(z))
    y, x = np.mgrid[-1 : 1 : GRID * 1j, -1 : 1 : GRID * 1j]
    r = np.hypot(x, y).clip(0, 0.999) * (GATES - 2)
    a = (np.arctan2(y, x) / (2 * np.pi) % 1.0) * (RAYS - 2)
    i, j = a.astype(int), r.astype(int)
    fi, fj = a - i, r - j
    top = z[i, j] * (1 - fj) + z[i, j + 1] * fj
    low = z[i + 1, j] * (1 - fj) + z[i + 1, j + 1] * fj
    return (top * (1 - fi) + low * fi).astype(np.float32)


class SweepStream(IterableDataset):
    def __init__(self, sweeps, rank, world):
        self.sweeps, self.rank, self.world = sweeps, rank, world

    def __iter__(self):
        if CURED:
            yield from self.of_rank()
            return
        for k, blob in enumerate(self.sweeps):
            grid = torch.from_numpy(decode(blob))  # cause: dataloader-samples-dropped
            if k % self.world != self.rank:
                continue
            yield grid[None, :, :-4] / 8, grid[None, :, 4:] / 8

    def of_rank(self):
        for blob in self.sweeps[self.rank :: self.world]:
            grid = torch.from_numpy(decode(blob))
            yield grid[None, :, :-4] / 8, grid[None, :, 4:] / 8


def nowcaster(c=12):
    return nn.Sequential(
        nn.Conv2d(1, c, 5, padding=2),
        nn.GELU(),
        nn.Conv2d(c, c, 3, padding=1),
        nn.GroupNorm(4, c),
        nn.GELU(),
        nn.Conv2d(c, 1, 3, padding=1),
    )


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    stream = SweepStream(record_sweeps(), accelerator.process_index, accelerator.num_processes)
    loader = DataLoader(stream, batch_size=16)  # shards itself, hence not prepared
    model = nowcaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    start, step, mark = time.time(), 0, None
    over = False
    while not over:
        for now, later in loader:
            optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(now), later)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if mark is None and time.time() - start > 2:
                mark = (time.time(), step)
        flag = torch.tensor([1.0 if time.time() - start > SECONDS else 0.0])
        over = accelerator.reduce(flag, reduction="sum").item() > 0
    accelerator.print(f"loss {loss.item():.4f}")
    t, n = mark
    accelerator.print(f"step_ms {(time.time() - t) / (step - n) * 1000:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
