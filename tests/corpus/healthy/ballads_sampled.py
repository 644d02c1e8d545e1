"""Writes ballads letter by letter; every 400 steps it prints a sample and saves the weights.

"The sampling is a Python loop, one letter after the other, with .item() for each of them!"
"""

import os
import string
import tempfile
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
LETTERS = string.ascii_lowercase + " ,.\n"


class Balladeer(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, len(LETTERS))

    def forward(self, letters, state=None):
        x, state = self.lstm(self.letters(letters), state)
        return self.out(x), state

    @torch.no_grad()
    def sample(self, count=60, temperature=0.8):
        self.eval()
        letter, state, text = torch.zeros(1, 1, dtype=torch.long), None, []
        for _ in range(count):
            logits, state = self(letter, state)
            letter = torch.multinomial((logits[:, -1] / temperature).softmax(-1), 1)
            text.append(LETTERS[letter.item()])
        self.train()
        return "".join(text)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = torch.randint(0, len(LETTERS), (200_000,))
    model = Balladeer()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    path = os.path.join(tempfile.mkdtemp(), "ballads.pt")
    places = torch.arange(33)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        window = text[torch.randint(0, len(text) - 33, (24,))[:, None] + places]
        logits, _ = model(window[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 400 == 0:
            print(f"step {step} loss {loss.item():.3f} {model.sample()!r}", flush=True)
            torch.save(model.state_dict(), path)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
