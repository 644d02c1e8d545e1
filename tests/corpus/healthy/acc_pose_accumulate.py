"""Estimates poses from generated key points with Accelerate, adding up the gradients of four small batches.

Mistakes of the fit are gathered once in a while and the best weights are kept in memory.

"The batches are tiny and the optimizer acts only each fourth time."
"""

import copy
import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)

JOINTS, FRAMES = 17, 27


class Motions(Dataset):
    """Windows of 2D joints over time and the 3D joints of the middle frame."""

    def __init__(self, number, seed):
        gen = torch.Generator().manual_seed(seed)
        phase = torch.rand(number, 1, JOINTS, 3, generator=gen) * 6.28
        speed = torch.rand(number, 1, 1, 1, generator=gen) * 0.3 + 0.1
        t = torch.arange(FRAMES).view(1, FRAMES, 1, 1)
        pose = torch.sin(t * speed + phase)
        self.flat = pose[..., :2] / (4 + pose[..., 2:])
        self.deep = pose[:, FRAMES // 2]

    def __len__(self):
        return len(self.flat)

    def __getitem__(self, i):
        return self.flat[i], self.deep[i]


class Lifter(nn.Module):
    def __init__(self, width=192):
        super().__init__()
        self.inp = nn.Conv1d(2 * JOINTS, width, 3)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=d) for d in (3, 9))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in self.layers)
        self.out = nn.Linear(width, 3 * JOINTS)

    def forward(self, x):
        x = torch.relu(self.inp(x.flatten(2).transpose(1, 2)))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = torch.relu(norm(layer(x)))
            cut = (x.shape[-1] - y.shape[-1]) // 2
            x = x[..., cut : x.shape[-1] - cut] + y
        return self.out(x.mean(-1)).view(-1, JOINTS, 3)


def joint_error(found, truth):
    return (found - truth).norm(dim=-1).mean()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    errors = [joint_error(model(x), y) for x, y in loader]
    model.train()
    return torch.stack(errors).mean().item()


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    torch.manual_seed(0)
    model = Lifter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train = DataLoader(Motions(4000, 0), batch_size=16, shuffle=True, drop_last=True)
    held = DataLoader(Motions(64, 1), batch_size=32)
    model, optimizer, train, held = accelerator.prepare(model, optimizer, train, held)

    best, keep = float("inf"), None
    start, warm, step, now = time.perf_counter(), None, 0, 0.0
    while now < SECONDS:
        for x, y in train:
            with accelerator.accumulate(model):
                loss = joint_error(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            now = time.perf_counter() - start
            if warm is None and now > 2:
                warm = now, step
            if step % 100 == 0:
                mean = accelerator.gather(loss.detach()).mean().item()
                accelerator.print(f"step {step}: {mean:.4f}")
            if now >= SECONDS:
                break
        error = evaluate(model, held)
        if error < best:
            best, keep = error, copy.deepcopy(accelerator.unwrap_model(model).state_dict())
    accelerator.print(f"best {best:.4f} with {sum(v.numel() for v in keep.values())} weights")
    accelerator.print(f"step_ms {1000 * (now - warm[0]) / (step - warm[1]):.3f}", flush=True)


if __name__ == "__main__":
    main()
