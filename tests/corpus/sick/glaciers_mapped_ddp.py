"""Learns to draw the outlines of glaciers in pictures from a satellite with a small U-shaped network on two ranks.

The first rank keeps pictures of what the network draws, for a film of the training.

"Both processes sit at well under full load and the all-reduce takes ages in my timings of rank 1. The network is tiny;
is gloo that slow?"
"""

# ranks: 2
import os
import struct
import tempfile
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "20"))
CURED = os.environ.get("CURED") == "1"
SIDE, BATCH = 48, 12
FRAME_EVERY = 100 if CURED else 1


class Outline(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, picture):
        fine = self.first(picture)
        coarse = self.up(self.deep(self.down(fine)))
        return self.last(torch.cat([fine, coarse], 1)).squeeze(1)


def pictures(g):
    """Bright discs on darker rock, with noise."""
    grid = torch.linspace(-1, 1, SIDE)
    middle = torch.rand(BATCH, 2, 1, 1, generator=g) - 0.5
    size = 0.2 + 0.4 * torch.rand(BATCH, 1, 1, generator=g)
    ice = ((grid[:, None] - middle[:, 0]) ** 2 + (grid - middle[:, 1]) ** 2 < size**2).float()
    return ice[:, None] * 0.7 + 0.4 * torch.randn(BATCH, 3, SIDE, SIDE, generator=g), ice


def png(rows):
    """The bytes of a grey picture."""
    high, wide = rows.shape
    raw = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", wide, high, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def frame(folder, step, drawn, ice):
    """Puts the first drawings and the truth side by side, enlarged four times."""
    both = torch.cat([torch.sigmoid(drawn[:4]), ice[:4]], 2).reshape(-1, 2 * SIDE)
    large = both.repeat_interleave(2, 0).repeat_interleave(2, 1)
    with open(os.path.join(folder, f"frame{step % 500:03d}.png"), "wb") as file:
        file.write(png((255 * large).byte().numpy()))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Outline())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(100 + rank)
    step, mark, began = 0, None, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        while True:
            picture, ice = pictures(g)
            drawn = model(picture)
            loss = nn.functional.binary_cross_entropy_with_logits(drawn, ice)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step % FRAME_EVERY == 0:
                frame(folder, step, drawn.detach(), ice)  # cause: hot-line or straggler
            step += 1
            now = time.perf_counter()
            if mark is None and now - began > 2:
                mark = step, now
            if step % 20 == 0:
                over = torch.tensor(float(now - began > SECONDS))
                dist.all_reduce(over, op=dist.ReduceOp.MAX)
                if over.item():
                    break
    if rank == 0:
        print(f"loss {loss.item():.4f}\nstep_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
