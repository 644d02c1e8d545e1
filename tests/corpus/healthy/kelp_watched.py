"""Trains a segmentation of kelp forests, with hooks on layers and gradients, an average of the weights, and a log.

"A colleague says that all those hooks and the average must cost a lot."
"""

import copy
import logging
import os
import tempfile
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
log = logging.getLogger("kelp")


class Average:
    """An exponential average of the weights, in place."""

    def __init__(self, model, decay):
        self.decay, self.model = decay, copy.deepcopy(model).requires_grad_(False)
        self.mine, self.theirs = list(self.model.parameters()), list(model.parameters())

    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(self.mine, self.theirs, 1 - self.decay)


class Shapes:
    """What each layer gave last: only the shape."""

    def __init__(self, model):
        self.last = {}
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(lambda _, __, out, name=name: self.last.__setitem__(name, out.shape))


def unet(width=20):
    return nn.Sequential(
        nn.Conv2d(4, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.ReLU(), nn.Conv2d(width, 1, 1),
    )  # fmt: skip


def main():
    logging.basicConfig(filename=os.path.join(tempfile.mkdtemp(), "kelp.log"), level=logging.INFO)
    torch.set_num_threads(1)
    model = unet()
    shapes, average = Shapes(model), Average(model, 0.999)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.nan_to_num() if gradient.dim() == 1 else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=200)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20_000)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [200])
    bands = torch.rand(128, 4, 48, 48)
    kelp = (bands[:, 3:] > bands[:, :1]).float()
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(128, (8,))
        loss = nn.functional.binary_cross_entropy_with_logits(model(bands[rows]), kelp[rows])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update()
        step += 1
        if step % 100 == 0:
            log.info("step %d loss %.4f norm %.3f, %d layers", step, loss.item(), norm.item(), len(shapes.last))
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
