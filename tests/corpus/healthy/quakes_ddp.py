"""Locates quakes from waveforms on two ranks; rank 0 writes a small checkpoint after every epoch.

"Rank 1 is idle while rank 0 saves, and they talk to each other after every single batch!"
"""
# ranks: 2

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    waves = torch.randn(6_400, 3, 256)
    places = torch.tanh(waves[:, :, :64].mean(2))
    data = TensorDataset(waves, places)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    net = nn.Sequential(
        nn.Conv1d(3, 32, 7), nn.GELU(), nn.Conv1d(32, 48, 7, stride=2), nn.GELU(), nn.Conv1d(48, 64, 5, stride=2),
        nn.GELU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(128, 3),
    )  # fmt: skip
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = os.path.join(tempfile.mkdtemp(), "quakes.pt")
    began, warm, step, epoch, done = time.perf_counter(), None, 0, 0, False
    while not done:
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total[0] += loss.detach()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if step % 25 == 0:
                stop = torch.tensor([float(now - began > SECONDS)])
                dist.all_reduce(stop, op=dist.ReduceOp.MAX)
                if stop.item():
                    done = True
                    break
        epoch += 1
        total[1] = len(loader)
        dist.all_reduce(total)
        if rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
            print(f"epoch {epoch} loss {total[0].item() / total[1].item():.5f} of {ranks} ranks", flush=True)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
