"""Caption decoder: LSTM cell with attention and scheduled sampling, word by word.

"I validate on 8 batches every 400 steps and write a checkpoint then. Some say
validation should run in another process, is it worth the trouble?"
"""

import os
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
VOCAB, LEN, REGIONS, D = 1500, 14, 25, 160


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, D)
        self.key = nn.Linear(64, D)
        self.value = nn.Linear(64, D)
        self.cell = nn.LSTMCell(2 * D, D)
        self.out = nn.Linear(D, VOCAB)

    def forward(self, regions, words, own=0.0):
        k, v = self.key(regions), self.value(regions)
        h = v.mean(1)
        c = torch.zeros_like(h)
        token = words[:, 0]
        logits = []
        for t in range(LEN - 1):
            w = torch.softmax((k * h.unsqueeze(1)).sum(-1) / D**0.5, dim=1)
            seen = (w.unsqueeze(-1) * v).sum(1)
            h, c = self.cell(torch.cat([self.emb(token), seen], 1), (h, c))
            y = self.out(h)
            logits.append(y)
            token = torch.where(torch.rand(len(h)) < own, y.detach().argmax(1), words[:, t + 1])
        return torch.stack(logits, 1)


class Pictures:
    def __init__(self, n=4000):
        g = torch.Generator().manual_seed(1)
        kind = torch.randint(0, 60, (n,), generator=g)
        self.regions = torch.randn(60, 1, 64, generator=g)[kind] + torch.randn(n, REGIONS, 64, generator=g)
        self.words = torch.randint(0, VOCAB, (60, LEN), generator=g)[kind]
        flip = torch.rand(n, LEN, generator=g) < 0.1
        self.words = torch.where(flip, torch.randint(0, VOCAB, (n, LEN), generator=g), self.words)

    def draw(self, lo, hi, b=48):
        i = torch.randint(lo, hi, (b,))
        return self.regions[i], self.words[i]


def xent(logits, words):
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


@torch.inference_mode()
def validate(model, pics):
    model.eval()
    total = sum(xent(model(*b), b[1]).item() for b in (pics.draw(3600, 4000) for _ in range(8)))
    model.train()
    return total / 8


def main():
    torch.manual_seed(0)
    pics, model = Pictures(), Decoder()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1000, 0.7)
    folder = tempfile.mkdtemp()
    t0, n, mark = time.time(), 0, None
    while time.time() - t0 < SECONDS:
        regions, words = pics.draw(0, 3600)
        loss = xent(model(regions, words, own=min(0.25, n / 4000)), words)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        sched.step()
        n += 1
        if mark is None and time.time() - t0 > 2:
            mark = time.time(), n
        if n % 400 == 0:
            print(f"{n} train {loss.item():.3f} val {validate(model, pics):.3f}")
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "n": n}, os.path.join(folder, "last.pt"))
    print(f"step_ms {(time.time() - mark[0]) / (n - mark[1]) * 1000:.3f}")


if __name__ == "__main__":
    main()
