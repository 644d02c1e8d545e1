"""Marks drugs, doses and times in prescriptions with a BiLSTM and a conditional random field on top of it.

The partition function goes through a prescription word by word, for the whole batch.

"nn.LSTM is one call, but my CRF is a loop of forty small ones, forward and backward."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
WORDS, TAGS, LENGTH, BATCH = 2500, 9, 40, 24


class Crf(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.begin, self.end = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.zeros(tags))
        self.change = nn.Parameter(0.01 * torch.randn(tags, tags))

    def forward(self, scores, tags):
        """The negative log-likelihood of the tags; all rows of a batch have the same length."""
        return (self.all_paths(scores) - self.path(scores, tags)).mean()

    def path(self, scores, tags):
        own = scores.gather(2, tags[..., None]).sum((1, 2))
        return own + self.begin[tags[:, 0]] + self.end[tags[:, -1]] + self.change[tags[:, :-1], tags[:, 1:]].sum(1)

    def all_paths(self, scores):
        steps = scores.unbind(1)
        alpha = self.begin + steps[0]
        for score in steps[1:]:
            alpha = torch.logsumexp(alpha[:, :, None] + self.change, 1) + score
        return torch.logsumexp(alpha + self.end, 1)


class Tagger(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.word = nn.Embedding(WORDS, width)
        self.read = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.score = nn.Linear(2 * width, TAGS)
        self.crf = Crf(TAGS)

    def forward(self, words, tags):
        return self.crf(self.score(self.read(self.word(words))[0]), tags)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    words = torch.randint(0, WORDS, (3000, LENGTH))
    tags = (words + words.roll(1, 1) // 7) % TAGS
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 5000)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(len(words), (BATCH,))
        loss = model(words[rows], tags[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        step += 1
        if step % 100 == 0:
            print(f"{step} loss {loss.item():.3f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
