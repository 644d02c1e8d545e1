"""Steers submersibles by dreams: a recurrent model of the sea is learned, and an actor learns in what it imagines.

"A step rolls the model out twice, moment by moment, and a third of the time is in tiny calls of a GRU cell."
"""

import os
import time

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

SECONDS = float(os.environ.get("SECONDS", "22"))
SEEN, PUSH, STATE, BATCH, LENGTH, DREAM = 12, 3, 64, 24, 12, 8


class Sea(nn.Module):
    """What comes next depends on a sample of what is now, so that moments follow each other."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(16 + PUSH, STATE)
        self.prior = nn.Linear(STATE, 32)
        self.posterior = nn.Sequential(nn.Linear(STATE + SEEN, 64), nn.ELU(), nn.Linear(64, 32))
        self.decode = nn.Sequential(nn.Linear(STATE + 16, 64), nn.ELU(), nn.Linear(64, SEEN + 1))

    @staticmethod
    def spread(parameters):
        mean, deviation = parameters.chunk(2, -1)
        return Normal(mean, F.softplus(deviation) + 0.1)

    def watch(self, seen, pushes):
        h, z = seen.new_zeros(len(seen), STATE), seen.new_zeros(len(seen), 16)
        states, samples, posteriors = [], [], []
        for now, push in zip(seen.unbind(1), pushes.unbind(1), strict=True):
            h = self.cell(torch.cat([z, push], 1), h)
            parameters = self.posterior(torch.cat([h, now], 1))
            z = self.spread(parameters).rsample()
            states.append(h), samples.append(z), posteriors.append(parameters)
        h, z = torch.stack(states, 1), torch.stack(samples, 1)
        return h, z, self.spread(torch.stack(posteriors, 1)), self.spread(self.prior(h))

    def dream(self, actor, h, z):
        whole = []
        for _ in range(DREAM):
            push = torch.tanh(actor(torch.cat([h, z], 1)))
            h = self.cell(torch.cat([z, push], 1), h)
            z = self.spread(self.prior(h)).rsample()
            whole.append(torch.cat([h, z], 1))
        return torch.stack(whole)


class Dreamer:
    def __init__(self):
        self.sea = Sea()
        self.actor = nn.Sequential(nn.Linear(STATE + 16, 64), nn.ELU(), nn.Linear(64, PUSH))
        self.critic = nn.Sequential(nn.Linear(STATE + 16, 64), nn.ELU(), nn.Linear(64, 1))
        self.of_sea = torch.optim.Adam(self.sea.parameters(), lr=6e-4)
        self.of_actor = torch.optim.Adam(self.actor.parameters(), lr=1e-4)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), lr=1e-4)
        current = torch.randn(SEEN, SEEN) / SEEN**0.5
        self.pushes = torch.randn(600, LENGTH, PUSH)
        seen = [torch.randn(600, SEEN)]
        for push in self.pushes.unbind(1):
            seen.append(torch.tanh(seen[-1] @ current + push.repeat(1, SEEN // PUSH)))
        self.seen = torch.stack(seen[1:], 1)
        self.reward = -self.seen[..., 0].square()

    def train_step(self):
        rows = torch.randint(len(self.seen), (BATCH,))
        seen, reward = self.seen[rows], self.reward[rows]
        h, z, posterior, prior = self.sea.watch(seen, self.pushes[rows])
        guess = self.sea.decode(torch.cat([h, z], 2))
        divergence = torch.distributions.kl_divergence(posterior, prior).sum(2).clamp(min=1).mean()
        loss = F.mse_loss(guess[..., :-1], seen) + F.mse_loss(guess[..., -1], reward) + 0.1 * divergence
        self.of_sea.zero_grad()
        loss.backward()
        self.of_sea.step()

        self.sea.requires_grad_(False)
        self.critic.requires_grad_(False)
        dreamt = self.sea.dream(self.actor, h.detach().flatten(0, 1), z.detach().flatten(0, 1))
        rewards = self.sea.decode(dreamt)[..., -1]
        worth = self.critic(dreamt)[..., 0]
        returns = [worth[-1]]
        for moment in reversed(range(DREAM - 1)):
            returns.append(rewards[moment] + 0.97 * (0.05 * worth[moment + 1] + 0.95 * returns[-1]))
        returns = torch.stack(returns[::-1])
        self.of_actor.zero_grad()
        (-returns.mean()).backward()
        self.of_actor.step()
        self.sea.requires_grad_(True)
        self.critic.requires_grad_(True)

        critic_loss = F.mse_loss(self.critic(dreamt.detach())[..., 0], returns.detach())
        self.of_critic.zero_grad()
        critic_loss.backward()
        self.of_critic.step()
        return loss.detach()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Normal.set_default_validate_args(False)
    dreamer = Dreamer()
    began, warm, step = time.perf_counter(), None, 0
    while True:
        loss = dreamer.train_step()
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
