"""What a loop computes in every turn, although nothing that it depends on changes."""

from __future__ import annotations

import ast

import pytest

from gpulaunch.profiler.samplers.known_models import Models
from gpulaunch.profiler.samplers.loop_invariants import invariants_of_loops

PPO = """
def old_log_prob(policy, obs, act):
    with torch.no_grad():
        mean = policy(obs)[0]
        return Normal_log_prob(mean, act)

def Normal_log_prob(mean, act):
    return -((act - mean) ** 2).sum(-1)

class Policy(nn.Module):
    def __init__(self):
        self.mean = nn.Linear(8, 2)
    def forward(self, obs):
        return torch.tanh(self.mean(obs)), 1

def main():
    policy = Policy()
    old = copy.deepcopy(policy)
    opt = torch.optim.Adam(policy.parameters())
    while True:
        old.load_state_dict(policy.state_dict())
        obs, act = collect(policy)
        for rows in torch.randperm(len(obs)).split(64):
            before = old_log_prob(old, obs, act)
            loss = (old_log_prob(policy, obs, act) - before).mean()
            loss.backward()
            opt.step()
"""
FORWARD = """
class Reader(nn.Module):
    def __init__(self):
        self.width, self.turn = 8, nn.Linear(8, 8)
        self.to_keys = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, heard, h):
        for at in range(9):
            keys = self.to_keys(heard)
            h = torch.tanh(self.turn(h) + keys)
        return h
"""


def told(source: str) -> dict[str, bool]:
    imports = "import copy, torch\nimport numpy as np\nfrom torch import nn\nimport torch.nn.functional as F\n"
    lines = (imports + source).splitlines()
    tree = ast.parse(imports + source)
    return {lines[line - 1].strip(): each for line, each in invariants_of_loops(tree, Models(tree)).items()}


@pytest.mark.parametrize(
    ("source", "line", "has_gradients"),
    [
        (PPO, "before = old_log_prob(old, obs, act)", False),
        (FORWARD, "keys = self.to_keys(heard)", True),
    ],
    ids=["in a function, of a copy of the policy", "a layer in a loop of forward"],
)
def test_what_nothing_in_the_loop_changes_is_told(source: str, line: str, has_gradients: bool) -> None:
    assert told(source) == {line: has_gradients}


@pytest.mark.parametrize(
    ("source", "was", "now"),
    [
        (PPO, "opt.step()", "opt.step()\n            old.load_state_dict(policy.state_dict())"),
        (PPO, "opt.step()", "opt.step()\n            for p, q in zip(old.parameters(), w): p.data.lerp_(q, 0.1)"),
        (PPO, "old = copy.deepcopy(policy)", "old = policy"),
        (PPO, "Adam(policy.parameters())", "Adam([*policy.parameters(), *old.parameters()])"),
        (PPO, "before = old_log_prob(old, obs, act)", "before = old_log_prob(old, obs[rows], act)"),
        (PPO, "loss.backward()", "loss.backward()\n            obs = obs + 1"),
        (PPO, "loss.backward()", "loss.backward()\n            obs[rows] += 1"),
        (PPO, "loss.backward()", "loss.backward()\n            seen.fill(obs)"),
        (PPO, "loss.backward()", "loss.backward()\n            before.add_(1)"),
        (PPO, "with torch.no_grad():", "with torch.enable_grad():"),
        (PPO, "return torch.tanh", "obs = F.dropout(obs)\n        return torch.tanh"),
        (PPO, "mean = policy(obs)[0]", "mean = policy(obs)[0] + torch.randn(2)"),
        (PPO, "mean = policy(obs)[0]", "mean = policy.act(obs)"),
        (PPO, "mean = policy(obs)[0]", "seen.append(obs)\n        mean = policy(obs)[0]"),
        (FORWARD, "nn.Tanh()", "nn.Dropout(0.1)"),
        (FORWARD, "nn.Tanh()", "nn.BatchNorm1d(8)"),
        (FORWARD, "nn.Tanh()", "Memory(8)"),
        (FORWARD, "h = torch.tanh", "heard = h = torch.tanh"),
        (FORWARD, "self.to_keys(heard)", "self.to_keys(heard[at])"),
        (FORWARD, "self.to_keys(heard)", "F.gumbel_softmax(heard)"),
        (FORWARD, "self.to_keys(heard)", "heard.clone()"),
        (FORWARD, "self.to_keys(heard)", "norm(heard)"),
        (FORWARD, "h = torch.tanh(", "all_keys.append(keys)\n            h = torch.tanh(keys + "),
        (FORWARD, "h = torch.tanh(", "order.shuffle(heard)\n            h = torch.tanh("),
        (FORWARD, "h = torch.tanh(", "np.add.at(heard, at, 1)\n            h = torch.tanh("),
        (FORWARD, "h = torch.tanh(", "if at: break\n            h = torch.tanh("),
        (FORWARD, "h = torch.tanh(", "with perturbed(self, at): h = self.turn(h)\n            h = torch.tanh("),
        (FORWARD, "h = torch.tanh(", "heard[0] = 1\n            h = torch.tanh("),
        (FORWARD, "h = torch.tanh(", "h += at * h\n            h = torch.tanh("),
        (FORWARD, "keys = self", "if at == 0: keys = self"),
        (FORWARD, "self.turn(h) + keys", "self.turn(h)"),
        (PPO, "opt = ", "slow = list(old.parameters())\n    opt = "),
        (PPO, "opt.step()", "opt.step()\n            soft_update(old, policy)"),
        (PPO, "obs, act = collect(policy)", "obs, act = collect(policy)\n        act = obs[0]"),
        (PPO, "obs, act = collect(policy)", "obs, act = collect(policy)\n        opt = Adam([act])"),
    ],
)
def test_what_a_turn_changes_or_draws_is_not_told(source: str, was: str, now: str) -> None:
    assert was in source
    assert told(source.replace(was, now)) == {}
