"""Predicts hail from radar cells that lie as objects in the bucket of the weather service.

"The bucket is in our own building, the link shows a few per cent of its bandwidth, and the admins measured half a
millisecond for an object. I wait far longer than that for a batch of twelve."
"""

import os
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SIDE = 64
HANDSHAKE, ROUND_TRIP = 0.003, 0.0005  # what the network costs, in seconds


class Session:
    """A connection to the bucket (the network is played by waiting)."""

    def __init__(self, objects):
        time.sleep(HANDSHAKE)
        self.objects = objects

    def get(self, key):
        time.sleep(ROUND_TRIP)
        return self.objects[key]

    def close(self):
        self.objects = None


class RadarBucket:
    def __init__(self, objects):
        self.objects = objects
        self.keys = sorted(objects)
        self.session = Session(objects) if CURED else None

    def read(self, key):
        if self.session is not None:
            return self.session.get(key)
        session = Session(
            self.objects
        )  # cause: none-yet a connection is made for every sample, outside of a DataLoader
        try:
            return session.get(key)
        finally:
            session.close()

    def cell(self, key):
        body = self.read(key)
        echo = np.frombuffer(body, dtype=np.uint8, count=SIDE * SIDE, offset=1).reshape(1, SIDE, SIDE)
        return echo.astype(np.float32) / 255, body[0]

    def batch(self, keys):
        echoes, hail = zip(*(self.cell(key) for key in keys), strict=False)
        return torch.from_numpy(np.stack(echoes)), torch.tensor(hail)


def weather(count=1500, seed=2):
    rng = np.random.default_rng(seed)
    objects = {}
    for number in range(count):
        hail = number % 2
        echo = rng.integers(0, 150 + 100 * hail, SIDE * SIDE, dtype=np.uint8)
        objects[f"cells/{number:05d}.bin"] = bytes([hail]) + echo.tobytes()
    return objects


class HailTrainer:
    def __init__(self, bucket, batch_size=12):
        self.bucket, self.batch_size = bucket, batch_size
        self.rng = np.random.default_rng(0)
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self):
        keys = [self.bucket.keys[i] for i in self.rng.integers(0, len(self.bucket.keys), self.batch_size)]
        echoes, hail = self.bucket.batch(keys)
        loss = nn.functional.cross_entropy(self.model(echoes), hail)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def fit(self, seconds):
        began, warm, steps = time.perf_counter(), None, 0
        while True:
            self.step()
            steps += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = steps, now
            if now - began > seconds:
                return 1000 * (now - warm[1]) / (steps - warm[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = HailTrainer(RadarBucket(weather()))
    print(f"step_ms {trainer.fit(SECONDS):.3f}", flush=True)
