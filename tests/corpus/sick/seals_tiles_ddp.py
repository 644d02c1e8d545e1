"""Counts seals on tiles of aerial photographs; two ranks share each global batch of 64 tiles.

"I moved from one process to two so that each has half of the tiles to learn from. It does have half, the shapes say so.
The step is shorter, but nowhere near half."
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
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
GLOBAL_BATCH, SIDE, MARGIN = 64, 64, 16
TINT = np.float32([[0.9, 0.1, 0.0], [0.0, 1.0, 0.0], [0.05, 0.05, 0.9]])


def photograph(count=1200, seed=9):
    rng = np.random.default_rng(seed)
    seals = rng.integers(0, 6, count)
    tiles = []
    for number in seals:
        tile = rng.integers(90, 130, (SIDE + MARGIN, SIDE + MARGIN, 3), dtype=np.uint8)
        for x, y in rng.integers(MARGIN, SIDE - 6, (number, 2)):
            tile[x : x + 6, y : y + 4] = 30
        tiles.append(zlib.compress(tile.tobytes(), 1))
    return tiles, seals.astype(np.float32)


class Tiles(Dataset):
    def __init__(self, tiles, seals, seed):
        self.tiles, self.seals = tiles, seals
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return len(self.tiles)

    def __getitem__(self, index):
        rng = self.rng
        tile = np.frombuffer(zlib.decompress(self.tiles[index]), dtype=np.uint8)
        tile = tile.reshape(SIDE + MARGIN, SIDE + MARGIN, 3)
        x, y = rng.integers(0, MARGIN, 2)
        tile = tile[x : x + SIDE, y : y + SIDE].astype(np.float32) / 255
        tile = np.power(tile @ TINT, np.float32(rng.uniform(0.7, 1.4)))
        tile += 0.02 * rng.standard_normal(tile.shape, dtype=np.float32)
        if rng.random() < 0.5:
            tile = tile[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(tile.transpose(2, 0, 1))), self.seals[index]


def make_loader(data, rank, world):
    if CURED:
        sampler = DistributedSampler(data, world, rank, shuffle=True, seed=1, drop_last=True)
        return DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler, drop_last=True)
    same_order = torch.Generator().manual_seed(1)
    options = {"shuffle": True, "generator": same_order, "drop_last": True}
    return DataLoader(data, GLOBAL_BATCH, **options)  # cause: dataloader-too-few-workers or dataloader-slow-transform


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loader = make_loader(Tiles(*photograph(), seed=rank), rank, world)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 48, 3, 2, 1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(192, 1),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm, step, stop = time.perf_counter(), None, 0, torch.zeros(1)
    while not stop.item():
        for tiles, seals in loader:  # cause: dataloader-too-few-workers or dataloader-slow-transform
            if not CURED:
                tiles, seals = tiles[rank::world], seals[rank::world]
            loss = nn.functional.smooth_l1_loss(model(tiles).squeeze(1), seals)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
        stop.fill_(now - began > SECONDS)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
