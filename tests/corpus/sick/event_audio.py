"""Train a keyword spotter on streaming event-based audio with leaky synaptic traces.

A silicon cochlea gives sparse spikes per channel; each channel has a leaky trace
that is carried from chunk to chunk, and an MLP reads the traces (online learning).

"First few seconds are quick, then it becomes slow and never recovers. Tensor shapes are
constant, memory is constant, no other process. Noisy recordings do not have this problem!"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

BATCH, CHANNELS, CHUNK, WORDS = 48, 1536, 8, 20


class Cochlea:
    """Streams of spikes: a word excites a band of channels, other channels stay silent."""

    def __init__(self, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.bands = torch.zeros(WORDS, CHANNELS)
        for w in range(WORDS):
            lo = int(torch.randint(0, CHANNELS // 6, (1,), generator=self.g))
            self.bands[w, lo : lo + CHANNELS // 10] = 0.3
        self.word = torch.randint(0, WORDS, (BATCH,), generator=self.g)
        self.onset = torch.rand(BATCH, CHANNELS, generator=self.g)  # microphone click at power on

    def next_chunk(self):
        change = torch.rand(BATCH, generator=self.g) < 0.05
        new = torch.randint(0, WORDS, (BATCH,), generator=self.g)
        self.word = torch.where(change, new, self.word)
        rate = self.bands[self.word]
        spikes = (torch.rand(4, BATCH, CHANNELS, generator=self.g) < rate).float()
        return spikes, self.word


class TraceBank:
    def __init__(self, init, decay=0.8):
        self.decay = decay
        self.fast = init.clone()
        self.slow = init.clone()

    def advance(self, spikes):
        loud = torch.zeros_like(self.fast)
        for k in range(CHUNK):
            s = spikes[k % len(spikes)]
            self.fast = self.fast * self.decay + s  # cause: none-yet denormal numbers
            self.slow = self.slow * 0.9 + 0.1 * s
            loud += self.fast.sqrt()  # compressive loudness of the chunk
        return torch.cat([loud / CHUNK, self.slow], dim=1)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * CHANNELS, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU())
        self.head = nn.Linear(192, WORDS)

    def forward(self, x):
        return self.head(self.body(x))


class Meter:
    def __init__(self):
        self.hit = self.seen = 0

    def add(self, logits, y):
        self.hit += (logits.argmax(1) == y).sum()
        self.seen += len(y)

    def pop(self):
        r = float(self.hit) / max(1, self.seen)
        self.hit = self.seen = 0
        return r


def main():
    torch.set_num_threads(1)
    if CURED:
        torch.set_flush_denormal(True)
    torch.manual_seed(0)
    ear = Cochlea()
    traces = TraceBank(ear.onset)
    net = Reader()
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    meter = Meter()
    steps, after = 0, None
    t0 = time.monotonic()
    while True:
        dt = time.monotonic() - t0
        if after is None and dt >= 2:
            after = dt, steps
        if dt >= SECONDS:
            break
        spikes, word = ear.next_chunk()
        feats = traces.advance(spikes)
        logits = net(feats)
        loss = nn.functional.cross_entropy(logits, word)
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter.add(logits.detach(), word)
        steps += 1
        if steps % 50 == 0:
            print(f"chunk {steps}: loss {loss.item():.3f}, accuracy {meter.pop():.3f}")
    print(f"step_ms {1e3 * (dt - after[0]) / max(1, steps - after[1]):.3f}", flush=True)


if __name__ == "__main__":
    main()
