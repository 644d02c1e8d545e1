"""Fits a deep Cox model of survival to the expression of 400 genes in a cohort of patients, all of them in each step.

A group lasso on the first layer lets whole genes drop out of the model, so that a cheap panel can be made of the rest.

"The network is a toy and the cohort is small. I don't see what it is busy with for so long, half of it in
loss.backward()."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
PATIENTS, GENES, HIDDEN = 2048, 400, 128


def cohort(seed=31):
    """expression, and whether the patient died; sorted from the longest time to the shortest"""
    g = torch.Generator().manual_seed(seed)
    expression = torch.randn(PATIENTS, GENES, generator=g)
    effect = torch.zeros(GENES)
    effect[:12] = torch.randn(12, generator=g) * 0.5
    hazard = (expression @ effect).exp()
    died_at = -torch.rand(PATIENTS, generator=g).clamp(min=1e-6).log() / hazard
    left_at = -torch.rand(PATIENTS, generator=g).clamp(min=1e-6).log() * 2
    order = torch.minimum(died_at, left_at).argsort(descending=True)
    return expression[order], (died_at <= left_at).float()[order]


class DeepCox(nn.Module):
    def __init__(self):
        super().__init__()
        self.genes = nn.Linear(GENES, HIDDEN)
        self.rest = nn.Sequential(
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Linear(HIDDEN, HIDDEN),
            nn.SiLU(),
            nn.Linear(HIDDEN, 1, bias=False),
        )

    def forward(self, expression):
        return self.rest(self.genes(expression)).squeeze(1)


def partial_likelihood(risk, died):
    """negative log partial likelihood; those at risk are all that come before in the order"""
    return -((risk - risk.logcumsumexp(0)) * died).sum() / died.sum()


def gene_penalty(weight):
    """sum over the genes of the norm of all weights that leave them"""
    if CURED:
        return weight.norm(dim=0).sum()
    total = torch.zeros(())
    for gene in range(weight.shape[1]):  # cause: small-operations-loop
        total = total + weight[:, gene].norm()  # cause: small-operations-loop
    return total


def genes_left(weight, bound=1e-2):
    return int((weight.norm(dim=0) > bound).sum())


def fit(model, expression, died, strength=1e-3):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        optimizer.zero_grad()
        loss = partial_likelihood(model(expression), died) + strength * gene_penalty(model.genes.weight)
        loss.backward()
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.3f} genes {genes_left(model.genes.weight)}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            return 1000 * (now - warm[1]) / (step - warm[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(2)
    expression, died = cohort()
    ms = fit(DeepCox(), expression, died)
    print(f"step_ms {ms:.3f}", flush=True)
