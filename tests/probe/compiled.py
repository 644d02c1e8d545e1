"""Programs that use torch.compile, run one after the other; what the compiler did goes to stdout as JSON.

Not a test module: `python compiled.py BACKEND`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1]
LOSS = nn.CrossEntropyLoss()


class Program:
    """A model, its data and its optimizer, the same for each program."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.loader = DataLoader(TensorDataset(torch.randn(640, 8), torch.randint(0, 3, (640,))), batch_size=8)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, loss_of: Callable[..., torch.Tensor]) -> list[float]:
        losses = []
        for inputs, targets in self.loader:
            loss = loss_of(inputs, targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def fullgraph_model() -> list[float]:
    program = Program()
    model = torch.compile(program.model, backend=BACKEND, fullgraph=True)
    return program.train(lambda inputs, targets: LOSS(model(inputs), targets))


def fullgraph_loss() -> list[float]:
    program = Program()

    @torch.compile(backend=BACKEND, fullgraph=True)
    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = LOSS(program.model(inputs), targets)
        return loss

    return program.train(loss_of)


def fullgraph_collective() -> list[float]:
    """A collective inside: the compiler has one of its own for it, and knows which by the function."""
    program = Program()

    @torch.compile(backend=BACKEND, fullgraph=True)
    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = LOSS(program.model(inputs), targets)
        shared = loss.detach().clone()
        torch.distributed.all_reduce(shared)
        return loss + 0 * shared

    return program.train(loss_of)


def whole_step() -> list[float]:
    """Backward and optimizer inside: the compiler breaks the graph there, and goes on in what they call."""
    program = Program()

    @torch.compile(backend=BACKEND)
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = LOSS(program.model(inputs), targets)
        program.optimizer.zero_grad()
        loss.backward()
        program.optimizer.step()
        return loss

    return [step(inputs, targets).item() for inputs, targets in program.loader]


def whole_epoch() -> list[float]:
    """The dataloader inside as well."""
    program = Program()
    return torch.compile(program.train, backend=BACKEND)(lambda inputs, targets: LOSS(program.model(inputs), targets))


def main() -> None:
    torch.set_num_threads(1)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    seen: dict[str, Any] = {}
    for program in (fullgraph_model, fullgraph_loss, fullgraph_collective, whole_step, whole_epoch):
        torch._dynamo.reset()
        clear_compilation_metrics()
        counters.clear()
        losses = program()
        seen[program.__name__] = {
            "losses": losses,
            "graph_breaks": dict(counters["graph_break"]),
            "graphs": counters["stats"]["unique_graphs"],
            "compilations": [[frame.co_name, str(frame.compile_id)] for frame in get_compilation_metrics()],
        }
    print(json.dumps(seen))


main()
