# ranks: 2
"""Trains a tiny image-to-image model with Accelerate; the main process writes a preview after each step.

"Two processes are hardly faster than one."
"""

import os
import time

import torch
from accelerate import Accelerator
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def write_ppm(path, image):
    """Plain text, which all viewers can show."""
    pixels = (image.clamp(0, 1) * 255).int().permute(1, 2, 0).flatten().tolist()
    with open(path, "w") as file:
        file.write(f"P3 {image.shape[2]} {image.shape[1]} 255\n")
        file.write(" ".join(map(str, pixels)))


accelerator = Accelerator(cpu=True)
net = nn.Sequential(
    nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 3, 1)
)
net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
sheet = torch.rand(3, 160, 160)
began, warm, step = time.perf_counter(), None, 0
while True:
    photos = torch.rand(8, 3, 40, 40)
    styled = net(photos)
    loss = (styled - photos.flip(1)).abs().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    step += 1
    if accelerator.is_main_process and (not CURED or step % 100 == 0):
        sheet[:, :40, :40] = styled[0].detach()
        write_ppm("preview.ppm", sheet)  # cause: straggler or hot-line
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if step % 25 == 0:
        over = accelerator.reduce(torch.tensor(float(now - began > SECONDS)))
        if over > 0:
            break
accelerator.print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
accelerator.end_training()
