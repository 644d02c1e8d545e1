"""Train a double DQN with prioritized replay on a toy vectorised control task.

The environment is a batch of point masses with numpy dynamics; the buffer is a set of
preallocated numpy arrays.

"At the beginning of a run with an empty buffer I get great throughput. With the big buffer
from my last run preloaded it is several times slower although the batch size is the same."
"""

import os
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
OBS, ACT = 24, 9


class PointMasses:
    def __init__(self, n, rng):
        self.n, self.rng = n, rng
        self.state = rng.normal(size=(n, OBS)).astype(np.float32)
        self.mix = (0.1 * rng.normal(size=(ACT, OBS))).astype(np.float32)

    def step(self, a):
        s = self.state
        nxt = 0.97 * s + self.mix[a] + 0.02 * self.rng.normal(size=s.shape).astype(np.float32)
        r = -np.abs(nxt[:, :4]).sum(1)
        done = r < -12
        nxt[done] = self.rng.normal(size=(done.sum(), OBS))
        self.state = nxt.astype(np.float32)
        return s, r.astype(np.float32), self.state.copy(), done.astype(np.float32)


class SumTree:
    def __init__(self, cap):
        self.size = 1 << (cap - 1).bit_length()
        self.t = np.zeros(2 * self.size)

    def set(self, idx, p):
        i = np.unique(idx + self.size)
        self.t[idx + self.size] = p
        while i[0] > 1:
            i = np.unique(i >> 1)
            self.t[i] = self.t[2 * i] + self.t[2 * i + 1]

    def draw(self, u):
        i = np.ones(len(u), dtype=np.int64)
        u = u * self.t[1]
        while i[0] < self.size:
            left = self.t[2 * i]
            right = u >= left
            u = np.where(right, u - left, u)
            i = 2 * i + right
        return i - self.size


class PrioritizedReplay:
    def __init__(self, cap, rng, alpha=0.6):
        self.cap, self.rng, self.alpha, self.pos = cap, rng, alpha, 0
        self.s = rng.standard_normal((cap, OBS), dtype=np.float32)
        self.s2 = 0.97 * self.s
        self.a = rng.integers(0, ACT, cap)
        self.r = -np.abs(self.s2[:, :4]).sum(1)
        self.d = np.zeros(cap, np.float32)
        self.prio = rng.random(cap) + 0.1
        self.tree = SumTree(cap)
        self.tree.t[self.tree.size : self.tree.size + cap] = self.prio
        for lo in 2 ** np.arange(int(np.log2(self.tree.size)) - 1, -1, -1):
            self.tree.t[lo : 2 * lo] = self.tree.t[2 * lo : 4 * lo].reshape(-1, 2).sum(1)

    def add(self, s, a, r, s2, d):
        i = (self.pos + np.arange(len(a))) % self.cap
        self.s[i], self.a[i], self.r[i], self.s2[i], self.d[i] = s, a, r, s2, d
        self.update(i, np.ones(len(a)))
        self.pos = (self.pos + len(a)) % self.cap

    def update(self, i, td):
        self.prio[i] = (np.abs(td) + 1e-3) ** self.alpha
        if CURED:
            self.tree.set(i, self.prio[i])

    def sample(self, n):
        if CURED:
            i = np.minimum(self.tree.draw(self.rng.random(n)), self.cap - 1)
            p = self.prio[i] / self.tree.t[1]
        else:
            probs = self.prio / self.prio.sum()
            i = self.rng.choice(self.cap, n, p=probs)  # cause: hot-line
            p = probs[i]
        w = (self.cap * p) ** -0.4
        batch = [torch.from_numpy(x[i]) for x in (self.s, self.a, self.r, self.s2, self.d)]
        return i, torch.from_numpy((w / w.max()).astype(np.float32)), batch


def qnet():
    return nn.Sequential(nn.Linear(OBS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, ACT))


def main():
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    env, buf = PointMasses(16, rng), PrioritizedReplay(800_000, rng)
    q, target = qnet(), qnet()
    target.load_state_dict(q.state_dict())
    opt = torch.optim.Adam(q.parameters(), lr=3e-4)
    updates, t0, tm = 0, time.time(), None
    while (el := time.time() - t0) < SECONDS:
        if tm is None and el >= 2:
            tm, um = time.time(), updates
        with torch.no_grad():
            a = q(torch.from_numpy(env.state)).argmax(1).numpy()
        a = np.where(rng.random(16) < 0.1, rng.integers(0, ACT, 16), a)
        s, r, s2, d = env.step(a)
        buf.add(s, a, r, s2, d)
        i, w, (s, a, r, s2, d) = buf.sample(256)
        with torch.no_grad():
            best = q(s2).argmax(1, keepdim=True)
            y = r + 0.99 * (1 - d) * target(s2).gather(1, best).squeeze(1)
        td = q(s).gather(1, a[:, None]).squeeze(1) - y
        loss = (w * nn.functional.huber_loss(td, torch.zeros_like(td), reduction="none")).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        buf.update(i, td.detach().numpy())
        updates += 1
        if updates % 250 == 0:
            target.load_state_dict(q.state_dict())
            print(f"updates {updates} loss {loss.item():.4f}")
    print(f"step_ms {(time.time() - tm) / max(1, updates - um) * 1e3:.3f}", flush=True)


main()
