"""Learns a recurrent model of a minigolf ball from what a camera measures: it carries a state that it samples itself.

What does not hang on the last state (the encoder, the actions' part, the prior, the decoder) is outside of the loop.

"I loop over the time steps in Python with a GRUCell. Everybody says to use nn.GRU instead."
"""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
TIMES, BATCH, SEEN, ACTED, DEEP, CHANCE = 8, 96, 32, 2, 192, 24


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SEEN, 128), nn.ELU(), nn.Linear(128, DEEP))
        self.acted, self.chance = nn.Linear(ACTED, DEEP), nn.Linear(CHANCE, DEEP, bias=False)
        self.cell = nn.GRUCell(DEEP, DEEP)
        self.deep, self.posterior = nn.Linear(DEEP, DEEP, bias=False), nn.Linear(DEEP, 2 * CHANCE)
        self.prior = nn.Sequential(nn.Linear(DEEP, DEEP), nn.ELU(), nn.Linear(DEEP, 2 * CHANCE))
        self.decoder = nn.Sequential(nn.Linear(DEEP + CHANCE, 128), nn.ELU(), nn.Linear(128, SEEN))

    def forward(self, seen, acted):
        told, pushed = self.encoder(seen), self.acted(acted)
        noise = torch.randn(TIMES, BATCH, CHANCE)
        deep, chance = torch.zeros(BATCH, DEEP), torch.zeros(BATCH, CHANCE)
        all_deep, all_chance, all_after = [], [], []
        for seen_now, push, kick in zip(told.unbind(), pushed.unbind(), noise.unbind(), strict=True):
            deep = self.cell(F.elu(push + self.chance(chance)), deep)
            after = self.posterior(F.elu(seen_now + self.deep(deep)))
            mean, raw = after.chunk(2, 1)
            chance = torch.addcmul(mean, F.softplus(raw), kick)
            all_deep.append(deep)
            all_chance.append(chance)
            all_after.append(after)
        deep, chance, after = torch.stack(all_deep), torch.stack(all_chance), torch.stack(all_after)
        drawn = self.decoder(torch.cat((deep, chance), 2))
        return drawn, after, self.prior(deep)


def divergence(after, before):
    (mean, raw), (mean_0, raw_0) = after.chunk(2, 2), before.chunk(2, 2)
    spread, spread_0 = F.softplus(raw) + 0.01, F.softplus(raw_0) + 0.01
    far = (mean - mean_0).square() + spread.square()
    return (torch.log(spread_0 / spread) + far / (2 * spread_0.square()) - 0.5).sum(2)


def play(count, length):
    """Balls on a square green with walls, putted at random, all at once; what the camera sees is a mixture."""
    mix = torch.randn(4, SEEN)
    place, speed = torch.rand(count, 2) * 2 - 1, torch.zeros(count, 2)
    pushes = 0.3 * torch.randn(length, count, 2) * (torch.rand(length, count, 1) < 0.2)
    states = []
    for push in pushes:
        speed = 0.9 * speed + push
        place = place + 0.3 * speed
        out = place.abs() > 1
        speed, place = torch.where(out, -speed, speed), place.clamp(-1, 1)
        states.append(torch.cat((place, speed), 1))
    seen = torch.tanh(torch.stack(states) @ mix)
    return seen + 0.02 * torch.randn_like(seen), pushes


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seen, pushes = play(2000, TIMES)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-4, fused=True)
    began, mark, step = time.perf_counter(), None, 0
    while True:
        some = torch.randint(seen.shape[1], (BATCH,))
        truth = seen[:, some]
        drawn, after, before = model(truth, pushes[:, some])
        loss = F.mse_loss(drawn, truth) * SEEN + divergence(after, before).clamp(min=1.0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"{step}: {loss.item():.4f}", flush=True)
        now = time.perf_counter()
        if mark is None and now - began > 2:
            mark = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
