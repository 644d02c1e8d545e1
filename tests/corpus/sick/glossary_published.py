"""Classifies museum captions over pretrained word vectors; the weights are published for a demo.

"I cut the vectors down to the few thousand words that occur, so that the published model stays small. Publishing is
slow all the same, and colleagues ask why the demo downloads so much."
"""

import hashlib
import io
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
VOCABULARY, USED, WIDTH, WORDS, ROOMS = 300_000, 4_000, 100, 40, 8


def pretrained_vectors():
    """The vectors of the whole language, the most frequent words first."""
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5


class CaptionNet(nn.Module):
    def __init__(self, vectors):
        super().__init__()
        used = vectors[:USED]
        self.register_buffer("vectors", used.clone() if CURED else used)
        self.conv = nn.Conv1d(WIDTH, 128, 3, padding=1)
        self.head = nn.Linear(128, ROOMS)

    def forward(self, words):
        x = nn.functional.embedding(words, self.vectors).transpose(1, 2)
        return self.head(torch.relu(self.conv(x)).amax(2))


class Shelf:
    """Where the demo looks for models: keeps the last two with their checksums."""

    def __init__(self):
        self.models = {}

    def publish(self, model, step):
        state = {"step": step, "model": model.state_dict()}
        body = io.BytesIO()
        torch.save(state, body)  # cause: checkpoint-stall
        digest = hashlib.sha256(body.getbuffer()).hexdigest()
        self.models[step] = digest, body
        while len(self.models) > 2:
            del self.models[min(self.models)]


def captions(count=6_400, seed=1):
    g = torch.Generator().manual_seed(seed)
    rooms = torch.randint(ROOMS, (count,), generator=g)
    words = torch.randint(ROOMS, USED, (count, WORDS), generator=g)
    words[:, 5:8] = rooms[:, None]
    return TensorDataset(words, rooms)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CaptionNet(pretrained_vectors())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(captions(), batch_size=128, shuffle=True, drop_last=True)
    shelf = Shelf()
    began, warm, step, now = time.perf_counter(), None, 0, 0.0
    while now - began < SECONDS:
        for words, rooms in loader:
            loss = nn.functional.cross_entropy(model(words), rooms)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                shelf.publish(model, step)
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
