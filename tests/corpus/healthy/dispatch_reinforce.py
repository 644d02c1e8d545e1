"""REINFORCE for dispatching jobs to machines; the discrete-event simulation is plain Python and is the work.
Author's remark: "half of the time is the simulator, as it should be"."""

import collections
import heapq
import os
import random
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))


class Workshop:
    """Four machines with set-up times and breakdowns; an action says which machine takes the arriving job."""

    SPEED = (1.0, 1.2, 0.8, 1.5)
    ONE_HOT = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.reset()

    def reset(self):
        self.now, self.events, self.serial = 0.0, [], 0
        self.queues = [collections.deque() for _ in self.SPEED]
        self.load = [0.0] * 4
        self.busy = [None] * 4
        self.kind = [0] * 4
        self.down = [False] * 4
        self.finished = []
        self.job = self.new_job()
        return self.observe()

    def new_job(self):
        return self.rng.randrange(3), self.rng.expovariate(0.4), self.now

    def push(self, delay, what, machine):
        self.serial += 1
        heapq.heappush(self.events, (self.now + delay, self.serial, what, machine))

    def begin(self, m):
        if self.busy[m] is None and self.queues[m] and not self.down[m]:
            kind, size, born = self.queues[m].popleft()
            self.load[m] -= size
            setup = 0.0 if kind == self.kind[m] else 0.6
            self.kind[m], self.busy[m] = kind, born
            self.push(setup + size / self.SPEED[m], "end", m)
            if self.rng.random() < 0.03:
                self.push(0.1, "break", m)

    def step(self, action):
        self.queues[action].append(self.job)
        self.load[action] += self.job[1]
        self.begin(action)
        done_before = len(self.finished)
        self.push(self.rng.expovariate(0.9), "arrive", -1)
        while True:
            self.now, _, what, m = heapq.heappop(self.events)
            if what == "arrive":
                break
            if what == "end":
                self.finished.append(self.now - self.busy[m])
                self.busy[m] = None
            elif what == "break":
                self.down[m] = True
                self.push(self.rng.uniform(0.5, 2.0), "repair", m)
            else:
                self.down[m] = False
            self.begin(m)
        self.job = self.new_job()
        waiting = sum(map(len, self.queues))
        return self.observe(), -0.1 * waiting + 0.2 * (len(self.finished) - done_before)

    def observe(self):
        obs = [self.job[1] / 3.0, *self.ONE_HOT[self.job[0]]]
        for m in range(4):
            obs += [
                len(self.queues[m]) / 5,
                self.load[m] / 10,
                float(self.busy[m] is not None),
                float(self.down[m]),
                float(self.kind[m] == self.job[0]),
            ]
        return obs


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shops = [Workshop(s) for s in range(64)]
    policy = nn.Sequential(nn.Linear(24, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
    opt = torch.optim.Adam(policy.parameters(), lr=3e-4)
    obs = torch.tensor([s.reset() for s in shops])
    start, warm, updates, gain = time.perf_counter(), None, 0, 0.0
    while True:
        seen, taken, rewards = [], [], []
        for _ in range(16):
            with torch.no_grad():
                action = torch.multinomial(policy(obs).softmax(-1), 1).squeeze(1)
            results = [s.step(a) for s, a in zip(shops, action.tolist(), strict=True)]
            seen.append(obs)
            taken.append(action)
            obs = torch.tensor([r[0] for r in results])
            rewards.append(torch.tensor([r[1] for r in results]))
        ret, total = [], torch.zeros(len(shops))
        for r in reversed(rewards):
            total = r + 0.97 * total
            ret.insert(0, total)
        ret = torch.cat(ret)
        logp = policy(torch.cat(seen)).log_softmax(-1).gather(1, torch.cat(taken).unsqueeze(1)).squeeze(1)
        loss = -(logp * (ret - ret.mean()) / (ret.std() + 1e-6)).mean() + 0.01 * (logp.exp() * logp).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        gain = 0.95 * gain + 0.05 * ret.mean().item()
        updates += 1
        if updates % 50 == 0:
            for s in shops:
                s.finished.clear()
            print(f"update {updates} return {gain:.3f}")
        now = time.perf_counter()
        if warm is None and now - start > 2:
            warm = (now, updates)
        if now - start > SECONDS:
            print(f"step_ms {(now - warm[0]) * 1e3 / (updates - warm[1]):.3f}", flush=True)
            return


if __name__ == "__main__":
    main()
