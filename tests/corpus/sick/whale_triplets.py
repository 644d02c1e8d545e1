"""Learns to recognise single whales by their calls, with a triplet loss.

A batch has 16 whales with five calls of each. For each call the farthest call of the same whale and the
nearest call of another whale are taken (the "batch hard" of the re-identification papers).

"The encoder takes three milliseconds forward, I don't understand what the rest of the step does."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
WHALES, CALLS, MELS, FRAMES, PICK, EACH, MARGIN = 200, 12, 24, 64, 16, 5, 0.3


def make_calls():
    g = torch.Generator().manual_seed(4)
    voices = torch.randn(WHALES, 1, MELS, FRAMES // 4, generator=g)
    voices = nn.functional.interpolate(voices, (MELS, FRAMES), mode="bilinear")
    return voices + 0.8 * torch.randn(WHALES, CALLS, MELS, FRAMES, generator=g)


class Encoder(nn.Module):
    def __init__(self, width=64, out=64):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(MELS, width, 5, 2, 2), nn.GELU(), nn.Conv1d(width, 2 * width, 3, 2, 1), nn.GELU(),
            nn.Conv1d(2 * width, 2 * width, 3, 1, 1), nn.GELU(),
        )  # fmt: skip
        self.out = nn.Linear(2 * width, out)

    def forward(self, x):
        return nn.functional.normalize(self.out(self.conv(x).mean(2)), dim=1)


def triplet_loss(z, who):
    dist = (2 - 2 * z @ z.t()).clamp_min(1e-8).sqrt()
    if CURED:
        same = who[:, None] == who[None]
        far = dist.masked_fill(~same, -1).amax(1)
        near = dist.masked_fill(same, 9).amin(1)
        return (far - near + MARGIN).clamp_min(0).mean()
    losses = []
    for i in range(len(z)):  # cause: small-operations-loop
        same = who == who[i]
        far = dist[i][same].max()
        near = dist[i][~same].min()
        losses.append(nn.functional.relu(far - near + MARGIN))
    return torch.stack(losses).mean()


def pick(calls):
    whales = torch.randperm(WHALES)[:PICK]
    takes = torch.rand(PICK, CALLS).argsort(1)[:, :EACH]
    return calls[whales[:, None], takes].flatten(0, 1), whales.repeat_interleave(EACH)


@torch.no_grad()
def top_one(model, calls):
    z = model(calls[:40, :4].flatten(0, 1))
    who = torch.arange(40).repeat_interleave(4)
    likeness = (z @ z.t()).fill_diagonal_(-2)
    return (who[likeness.argmax(1)] == who).float().mean().item()


def main():
    torch.manual_seed(0)
    calls = make_calls()
    model = Encoder()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step, mark = 0, None
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if now >= SECONDS:
            break
        batch, who = pick(calls)
        loss = triplet_loss(model(batch), who)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 200 == 0:
            print(f"step {step} loss {loss.item():.4f} top one {top_one(model, calls):.3f}")
    print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
