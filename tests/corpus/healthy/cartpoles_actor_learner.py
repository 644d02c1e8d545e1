# ranks: 2
"""Trains an actor-critic that balances poles; the second process simulates, the first one acts and learns.

All sixteen poles are simulated together: one message with what is seen, one with what is to be done. The next one
depends on it.

"Sixteen messages for one update! But the simulator needs an action before it can go on."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
POLES, HORIZON, STOP = 16, 8, 9


def simulate():
    state = 0.05 * torch.randn(POLES, 4)
    seen = torch.zeros(POLES, 6)  # the state, the reward, and whether it has fallen
    action = torch.zeros(POLES)
    while True:
        seen[:, :4] = state
        dist.send(seen, 0)
        dist.recv(action, 0)
        if action[0] == STOP:
            return
        force = 20 * action - 10
        x, speed, angle, turning = state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        push = (force + 0.05 * turning.square() * sin) / 1.1
        bend = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        moved = push - 0.05 * bend * cos / 1.1
        state = torch.stack([x + 0.02 * speed, speed + 0.02 * moved, angle + 0.02 * turning, turning + 0.02 * bend], 1)
        fallen = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)
        seen[:, 4], seen[:, 5] = 1.0, fallen.float()
        state = torch.where(fallen[:, None], 0.05 * torch.randn(POLES, 4), state)


def learn():
    body = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
    policy, value = nn.Linear(128, 2), nn.Linear(128, 1)
    parts = nn.ModuleList([body, policy, value])
    optimizer = torch.optim.Adam(parts.parameters(), lr=1e-3)
    seen = torch.zeros(POLES, 6)
    dist.recv(seen, 1)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        states, actions, rewards, fallen = [], [], [], []
        for _ in range(HORIZON):
            states.append(seen[:, :4].clone())
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=policy(body(states[-1]))).sample()
            dist.send(action.float(), 1)
            dist.recv(seen, 1)
            actions.append(action)
            rewards.append(seen[:, 4].clone())
            fallen.append(seen[:, 5].clone())
        with torch.no_grad():
            ahead = value(body(seen[:, :4])).squeeze(1)
        returns = []
        for reward, over in zip(reversed(rewards), reversed(fallen), strict=True):
            ahead = reward + 0.99 * ahead * (1 - over)
            returns.append(ahead)
        returns.reverse()
        hidden = body(torch.cat(states))
        judged, target = value(hidden).squeeze(1), torch.cat(returns)
        chances = torch.distributions.Categorical(logits=policy(hidden))
        gain = (target - judged).detach()
        loss = -(gain * chances.log_prob(torch.cat(actions))).mean() + 0.5 * (target - judged).square().mean()
        loss = loss - 0.01 * chances.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS and step > warm[0]:
            break
    dist.send(torch.full((POLES,), float(STOP)), 1)
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    if dist.get_rank() == 0:
        learn()
    else:
        simulate()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
