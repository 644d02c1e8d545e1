"""Programs that move tensors and ask for values in compiled code; what the compiler did goes to stdout as JSON.

Not a test module: `python compiled_moves.py [RANK]`; with RANK it is armed as that rank when all imports are done. The
backend takes the graph as it is: what it holds is what would be compiled.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

GRAPHS: list[list[str]] = []


def backend(module: torch.fx.GraphModule, _: Any) -> Any:
    GRAPHS.append([f"{node.op} {getattr(node.target, '__name__', node.target)}" for node in module.graph.nodes])
    return module.forward


def moves_inside() -> list[Any]:
    @torch.compile(backend=backend, fullgraph=True)
    def step(inputs: torch.Tensor) -> torch.Tensor:
        there = inputs.to("meta")
        there.copy_(inputs)
        return there + inputs.to(there)

    return [list(step(torch.ones(2, size)).shape) for size in (3, 3, 5)]


def converts_inside() -> list[Any]:
    @torch.compile(backend=backend, fullgraph=True)
    def step(inputs: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(inputs).copy_(inputs.to(torch.float64).to("cpu").cpu())
        return total + inputs

    return [float(step(torch.full((3,), float(size))).sum()) for size in range(3)]


def moves_inside_with_a_default_device() -> list[Any]:
    """A mode of torch's own is then asked about each call, by identity of the function."""
    torch.set_default_device("cpu")

    @torch.compile(backend=backend, fullgraph=True)
    def step(inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(torch.float64) + torch.zeros(3).copy_(inputs) + torch.Tensor.to(inputs, torch.float64)

    try:
        return [float(step(torch.full((3,), float(size))).sum()) for size in range(3)]
    finally:
        torch.set_default_device(None)


def waits_inside() -> list[Any]:
    @torch.compile(backend=backend)
    def step(inputs: torch.Tensor) -> Any:
        total = inputs.sum()
        if total > 4:
            total = total * 2
        places = torch.nonzero(inputs)
        return total.item() + float(total) + len(places) + len(inputs.nonzero()) + inputs.tolist()[0]

    return [step(torch.full((3,), float(size))) for size in range(1, 4)]


def training_moves() -> list[Any]:
    """The usual: the batch is moved outside the compiled model, and the loss is asked for outside too."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(20):
        batch = torch.randn(8, 4)
        batch.to("meta")
        loss = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def an_epoch_inside() -> list[Any]:
    """All of it: the compiler breaks the graph at the dataloader, and goes on in what that and the rest call."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8)

    def move(batch: torch.Tensor) -> str:
        return str(batch.to("meta").device)

    @torch.compile(backend=backend)
    def epoch() -> list[Any]:
        results: list[Any] = []
        for batch in loader:
            results.append(move(batch))
            loss = model(batch.cpu()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.item())
            results.append(sorted(map(torch.Tensor.item, batch[0])))
        return results

    return [epoch() for _ in range(2)]


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        from gpulaunch.profiler.probe.inject import arm

        os.environ["RANK"] = sys.argv[1]
        arm()
    seen: dict[str, Any] = {}
    programs = (
        *(moves_inside, converts_inside, moves_inside_with_a_default_device),
        *(waits_inside, training_moves, an_epoch_inside),
    )
    for program in programs:
        torch._dynamo.reset()
        clear_compilation_metrics()
        counters.clear()
        GRAPHS.clear()
        results = program()
        seen[program.__name__] = {
            "results": results,
            "graphs": list(GRAPHS),
            "graph_breaks": dict(counters["graph_break"]),
            "compilations": [[frame.co_name, str(frame.compile_id)] for frame in get_compilation_metrics()],
        }
    print(json.dumps(seen))


main()
