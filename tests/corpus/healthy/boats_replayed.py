"""Trains boats to keep their course with DDPG; after each update all boats sail on with the policy of now.

The memory was filled by chance before the loop.

"Sailing takes as long as learning. Is that what one has to expect?"
"""

import copy
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
BOATS, LEGS, PLACES, BATCH = 128, 4, 40_000, 256


class Boats:
    def __init__(self):
        self.course, self.turn, self.wind = torch.randn(BOATS), torch.zeros(BOATS), torch.randn(BOATS)

    def seen(self):
        return torch.stack([self.course.sin(), self.course.cos(), self.turn, self.wind], 1)

    def sail(self, rudder):
        self.wind = 0.95 * self.wind + 0.3 * torch.randn(BOATS)
        self.turn = 0.8 * self.turn + 0.3 * rudder[:, 0] + 0.1 * self.wind * self.course.cos()
        self.course = self.course + 0.2 * self.turn
        return self.course.cos() - 0.05 * rudder[:, 0].square()


class Memory:
    def __init__(self):
        self.rows, self.count = torch.zeros(PLACES, 10), 0

    def add(self, rows):
        at = torch.arange(self.count, self.count + len(rows)) % PLACES
        self.rows[at] = rows
        self.count += len(rows)

    def draw(self):
        rows = self.rows[torch.randint(min(self.count, PLACES), (BATCH,))]
        return rows[:, :4], rows[:, 4:5], rows[:, 5:9], rows[:, 9]


@torch.no_grad()
def sail(boats, actor, legs=LEGS):
    rows = []
    for _ in range(legs):
        seen = boats.seen()
        rudder = (actor(seen) + 0.1 * torch.randn(BOATS, 1)).clamp(-1, 1)
        reward = boats.sail(rudder)
        rows.append(torch.cat([seen, rudder, boats.seen(), reward[:, None]], 1))
    return torch.cat(rows)


def net(inputs, *last):
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1), *last)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    boats, memory = Boats(), Memory()
    actor, critic = net(4, nn.Tanh()), net(5)
    actor_then, critic_then = copy.deepcopy(actor), copy.deepcopy(critic)
    live, slow = [*actor.parameters(), *critic.parameters()], [*actor_then.parameters(), *critic_then.parameters()]
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    memory.add(sail(boats, actor, legs=20))
    began, warm, step = time.perf_counter(), None, 0
    while True:
        seen, rudder, then, reward = memory.draw()
        with torch.no_grad():
            wanted = reward + 0.97 * critic_then(torch.cat([then, actor_then(then)], 1))[:, 0]
        critic_loss = nn.functional.mse_loss(critic(torch.cat([seen, rudder], 1))[:, 0], wanted)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        actor_loss = -critic(torch.cat([seen, actor(seen)], 1)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(slow, live, 0.005)
        memory.add(sail(boats, actor))
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
