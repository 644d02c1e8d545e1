"""Trains a glider to stay aloft with soft actor-critic from recorded flights; the temperature is learned, too.

The temperature starts at 0.1, and as everybody does, its logarithm is made with NumPy.

"Three optimizers, three backward passes in each step. Is it normal that it takes so long?"
"""

import copy
import os
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
STATE, ACTION, BATCH, FLIGHTS = 24, 4, 512, 50_000


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs)
    )  # fmt: skip


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(STATE, 2 * ACTION)

    def forward(self, state):
        mean, log_std = self.net(state).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp(), validate_args=False)
        raw = normal.rsample()
        action = raw.tanh()
        return action, (normal.log_prob(raw) - (1 - action.square() + 1e-6).log()).sum(-1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = mlp(STATE + ACTION, 1), mlp(STATE + ACTION, 1)

    def forward(self, state, action):
        both = torch.cat([state, action], -1)
        return self.one(both).squeeze(-1), self.two(both).squeeze(-1)


def main():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(FLIGHTS, STATE, generator=generator)
    actions = torch.rand(FLIGHTS, ACTION, generator=generator) * 2 - 1
    rewards = states[:, :ACTION].mul(actions).sum(-1)
    later = 0.9 * states + 0.1 * torch.randn(FLIGHTS, STATE, generator=generator)

    actor, critic = Actor(), Critic()
    target = copy.deepcopy(critic).requires_grad_(False)
    log_alpha = torch.tensor(np.log([0.1]), requires_grad=True)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-4)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=3e-4)

    began, warm, step = time.perf_counter(), None, 0
    while True:
        chosen = torch.randint(FLIGHTS, (BATCH,))
        state, action, reward, after = states[chosen], actions[chosen], rewards[chosen], later[chosen]
        alpha = log_alpha.exp().detach().float()

        with torch.no_grad():
            next_action, next_log = actor(after)
            value = torch.min(*target(after, next_action)) - alpha * next_log
            wanted = reward + 0.98 * value
        first, second = critic(state, action)
        critic_loss = nn.functional.mse_loss(first, wanted) + nn.functional.mse_loss(second, wanted)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        critic.requires_grad_(False)
        own, log_prob = actor(state)
        actor_loss = (alpha * log_prob - torch.min(*critic(state, own))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        critic.requires_grad_(True)

        alpha_loss = (log_alpha.exp() * (-log_prob + ACTION).detach()).mean()
        alpha_optimizer.zero_grad()
        alpha_loss.backward()
        alpha_optimizer.step()

        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(critic.parameters()), 0.005)
        step += 1
        if step % 200 == 0:
            print(f"step {step} critic {critic_loss.item():.3f} alpha {alpha.item():.3f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
