"""Train a super-resolution CNN on random textures.

Images are kept in one big tensor; a small state with the weights and four preview
images is written every 25 steps, so that a notebook can show the progress.

"My checkpoint should be about half a MB (tiny net + 4 images of 48x48) but there are hiccups
regularly, and the disk quota mail from the cluster admin surprised me."
"""

import os
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SAVE_EVERY, SCALE = 25, 2


class Textures(Dataset):
    def __init__(self, n=9000, size=48):
        g = torch.Generator().manual_seed(1)
        base = torch.rand(n, 3, 12, 12, generator=g)
        self.hr = F.interpolate(base, size=size, mode="nearest")

    def __len__(self):
        return len(self.hr)

    def __getitem__(self, i):
        hr = self.hr[i]
        lr = F.avg_pool2d(hr, SCALE)
        return lr, hr


class ESPCN(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.head = nn.Conv2d(3, ch, 5, padding=2)
        self.body = nn.ModuleList(nn.Conv2d(ch, ch, 3, padding=1) for _ in range(3))
        self.tail = nn.Conv2d(ch, 3 * SCALE**2, 3, padding=1)
        self.up = nn.PixelShuffle(SCALE)

    def forward(self, x):
        h = torch.tanh(self.head(x))
        for conv in self.body:
            h = h + 0.2 * F.relu(conv(h))
        return self.up(self.tail(h)) + F.interpolate(x, scale_factor=SCALE, mode="bilinear")


def psnr(a, b):
    return (-10 * torch.log10(F.mse_loss(a, b))).item()


class Snapshot:
    def __init__(self, folder, dataset):
        self.path = os.path.join(folder, "progress.pt")
        self.preview = dataset.hr[:4]  # fixed images that the notebook shows

    def write(self, model, step, curve):
        images = self.preview.clone() if CURED else self.preview
        state = {"step": step, "model": model.state_dict(), "curve": curve, "preview": images}
        tmp = self.path + ".tmp"
        torch.save(state, tmp)  # cause: checkpoint-stall
        os.replace(tmp, self.path)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = Textures()
    loader = DataLoader(data, batch_size=12, shuffle=True, num_workers=1, persistent_workers=True)
    model = ESPCN()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9995)
    curve = []
    with tempfile.TemporaryDirectory() as folder:
        snap = Snapshot(folder, data)
        it = iter(loader)
        lr, hr = next(it)
        step, warm = 0, None
        t0 = time.perf_counter()
        while (el := time.perf_counter() - t0) < SECONDS:
            if warm is None and el >= 2:
                warm = (el, step)
            out = model(lr)
            loss = F.l1_loss(out, hr)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
            if step % SAVE_EVERY == 0:
                curve.append(loss.item())
                snap.write(model, step, curve)
            if step % 100 == 0:
                print(f"step {step}: l1 {loss.item():.4f} psnr {psnr(out.detach(), hr):.2f} dB")
            try:
                lr, hr = next(it)
            except StopIteration:
                it = iter(loader)
                lr, hr = next(it)
        el = time.perf_counter() - t0
        del it, loader
    print(f"step_ms {(el - warm[0]) / max(1, step - warm[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
