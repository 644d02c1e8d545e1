"""Guesses whether a reader takes a book, from big tables with sparse gradients and a network above them.

"Two optimizers, one of them for sparse gradients only, and a coalesce in each step. Is one plain Adam not quicker?"
"""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
BOOKS, FIELDS, SIZES, HISTORY, WIDTH, BATCH, ROWS = 60_000, 4, 20_000, 6, 32, 512, 200_000


class Guess(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = nn.Embedding(FIELDS * SIZES, WIDTH, sparse=True)
        self.book = nn.Embedding(BOOKS, WIDTH, sparse=True)
        for table in (self.field, self.book):
            nn.init.normal_(table.weight, std=0.05)
        self.top = nn.Sequential(
            nn.Linear((FIELDS + 2) * WIDTH, 768), nn.ReLU(inplace=True), nn.Linear(768, 384), nn.ReLU(inplace=True),
            nn.Linear(384, 128), nn.ReLU(inplace=True), nn.Linear(128, 1),
        )  # fmt: skip

    def forward(self, fields, books):
        """books: the one offered, then the last six taken; all of one table, so that it is asked once."""
        rows = self.book(books)
        return self.top(torch.cat((self.field(fields).flatten(1), rows[:, 0], rows[:, 1:].mean(1)), 1)).squeeze(1)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Few books are read by many: ids by a power law. Fields share one table, each with its own part of it.
    fields = (torch.rand(ROWS, FIELDS).pow(3) * SIZES).long() + torch.arange(FIELDS) * SIZES
    books = (torch.rand(ROWS, 1 + HISTORY).pow(3) * BOOKS).long()
    taken = (torch.rand(ROWS) < 0.2 + 0.6 * ((fields[:, 0] + books[:, 0]) % 2)).float()
    model = Guess()
    tables = torch.optim.SparseAdam([model.field.weight, model.book.weight], lr=1e-3)
    rest = torch.optim.AdamW(model.top.parameters(), lr=1e-3, fused=True)
    began, mark, step, total = time.perf_counter(), None, 0, torch.zeros(())
    while True:
        order = torch.randperm(ROWS)
        for some in order[: ROWS // BATCH * BATCH].view(-1, BATCH):
            loss = F.binary_cross_entropy_with_logits(model(fields[some], books[some]), taken[some])
            tables.zero_grad()
            rest.zero_grad()
            loss.backward()
            tables.step()
            rest.step()
            total += loss.detach()
            step += 1
            if step % 200 == 0:
                print(f"{step}: {total.item() / 200:.4f}", flush=True)
                total.zero_()
            now = time.perf_counter()
            if mark is None and now - began > 2:
                mark = step, now
            if now - began > SECONDS:
                print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)
                return


if __name__ == "__main__":
    main()
