"""Learns to continue the peals of a church tower, a decoder that is fed its own guesses.

With scheduled sampling each step of the decoder gets either the true bell or the bell that it has just chosen,
so that the steps have to be made one after the other.

"Is the for loop over time the reason that I don't even get fifty steps a second? Everybody says to avoid loops."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)
BELLS, PEALS, PAST, AHEAD, BATCH = 12, 6000, 24, 16, 48


def make_peals():
    """Rounds in which neighbours change places by a rule that the tower keeps to."""
    g = torch.Generator().manual_seed(2)
    rule = torch.randint(BELLS, (BELLS, BELLS), generator=g)
    peals = torch.randint(BELLS, (PEALS, PAST + AHEAD), generator=g)
    for t in range(2, PAST + AHEAD):
        kept = torch.rand(PEALS, generator=g) < 0.95
        peals[:, t] = torch.where(kept, rule[peals[:, t - 1], peals[:, t - 2]], peals[:, t])
    return peals


class Ringer(nn.Module):
    def __init__(self, width=160):
        super().__init__()
        self.bell = nn.Embedding(BELLS, 48)
        self.listen = nn.GRU(48, width, batch_first=True)
        self.cell = nn.GRUCell(48 + width, width)
        self.query = nn.Linear(width, width)
        self.out = nn.Linear(width, BELLS)

    def forward(self, past, ahead, trust):
        heard, h = self.listen(self.bell(past))
        h, bell = h[0], past[:, -1]
        scores = []
        for t in range(ahead.shape[1]):
            weight = torch.bmm(heard, self.query(h)[:, :, None]).softmax(1)
            context = (weight * heard).sum(1)
            h = self.cell(torch.cat([self.bell(bell), context], 1), h)
            scores.append(self.out(h))
            own = scores[-1].detach().argmax(1)
            bell = torch.where(torch.rand(len(own)) < trust, ahead[:, t], own)
        return torch.stack(scores, 1)


@torch.no_grad()
def accuracy(model, peals):
    model.eval()
    past, ahead = peals[:, :PAST], peals[:, PAST:]
    right = (model(past, ahead, 0.0).argmax(2) == ahead).float().mean().item()
    model.train()
    return right


def main():
    torch.manual_seed(0)
    peals = make_peals()
    train, kept = peals[:-200], peals[-200:]
    model = Ringer()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    step, mark = 0, None
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if now >= SECONDS:
            break
        rows = train[torch.randint(len(train), (BATCH,))]
        past, ahead = rows[:, :PAST], rows[:, PAST:]
        trust = max(0.2, 1 - step / 1500)
        scores = model(past, ahead, trust)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), ahead.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        step += 1
        if step % 200 == 0:
            print(f"step {step} loss {loss.item():.4f} right {accuracy(model, kept):.3f} trust {trust:.2f}")
    print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
