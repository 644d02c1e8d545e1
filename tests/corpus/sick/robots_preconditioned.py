"""Learns the inverse dynamics of a robot arm: from positions, speeds and accelerations of 7 joints to 7 torques.

A plain network with large batches, trained with Shampoo, which needs fewer steps than Adam.

"Shampoo does need fewer steps, but each of them takes so long that Adam is ahead on the clock. The papers say it
should cost a few per cent more."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
BATCH, WIDTH, JOINTS = 4096, 128, 7


def inverse_root(factor, order, floor=1e-6):
    """factor ** (-1 / order) of a symmetric matrix"""
    values, vectors = torch.linalg.eigh(factor)  # cause: hot-line
    return (vectors * values.clamp(min=floor).pow(-1.0 / order)) @ vectors.T


class Shampoo(torch.optim.Optimizer):
    """Preconditioned Stochastic Tensor Optimization (Gupta et al., 2018)"""

    def __init__(self, params, lr=3e-3, momentum=0.9, epsilon=1e-2, update_freq=1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "epsilon": epsilon, "update_freq": update_freq})

    def begin(self, p, group):
        state = self.state[p]
        state["step"] = 0
        state["momentum"] = torch.zeros_like(p)
        state["factors"] = [group["epsilon"] * torch.eye(n) for n in p.shape]
        state["roots"] = [torch.eye(n) for n in p.shape]
        return state

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p] or self.begin(p, group)
                grad = p.grad
                for dim, factor in enumerate(state["factors"]):
                    flat = p.grad.transpose(0, dim).reshape(p.shape[dim], -1)
                    factor.addmm_(flat, flat.T)
                    if state["step"] % group["update_freq"] == 0:
                        state["roots"][dim] = inverse_root(factor, 2 * p.ndim)
                    grad = torch.tensordot(state["roots"][dim], grad, dims=([1], [dim])).movedim(0, dim)
                state["step"] += 1
                state["momentum"].mul_(group["momentum"]).add_(grad)
                p.add_(state["momentum"], alpha=-group["lr"])


class Arm:
    """movements of an arm and the torques they need, with friction"""

    def __init__(self, count=40_000, seed=4):
        g = torch.Generator().manual_seed(seed)
        q, speed, push = torch.randn(3, count, JOINTS, generator=g).unbind(0)
        inertia = torch.randn(JOINTS, JOINTS, generator=g) * 0.3
        torque = (1 + 0.3 * q.cos()) * (push @ inertia) + 0.2 * speed.tanh() + q.sin() * speed.square() * 0.1
        self.movements, self.torques = torch.cat([q, speed, push], 1), torque

    def batch(self):
        rows = torch.randint(len(self.movements), (BATCH,))
        return self.movements[rows], self.torques[rows]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(13)
    arm = Arm()
    net = nn.Sequential(
        nn.Linear(3 * JOINTS, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, JOINTS),
    )
    optimizer = Shampoo(net.parameters(), update_freq=25 if CURED else 1)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        movements, torques = arm.batch()
        loss = nn.functional.mse_loss(net(movements), torques)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step} error {loss.item():.4f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
