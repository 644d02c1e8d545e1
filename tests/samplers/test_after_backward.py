"""What a loop does after its backward pass, without what the step or the next turn needs."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.samplers.after_backward import lines_after_backward

LOOP = """
import torch
for x, y in loader:
    {above}
    loss = criterion(model(x), y)
    loss.backward()
    {between}
    optimizer.step()
    {below}
"""
PUT = """
def put(parameters, flat):
    for p in parameters:
        p.grad = flat[: p.numel()].view_as(p)
"""


def told(above: str = "pass", between: str = "pass", below: str = "pass", functions: str = "") -> set[str]:
    """The lines that are told of a loop; each part is one statement."""
    source = functions + textwrap.dedent(LOOP).format(above=above, between=between, below=below)
    lines = source.splitlines()
    after = {lines[line - 1].strip() for line in lines_after_backward(ast.parse(source), set())}
    return after - {"pass", ""}


@pytest.mark.parametrize(
    "line",
    [
        "writer.add(grad_norms(model))",
        "norms = [p.grad.norm().item() for p in model.parameters()]",
        "metric.update(model(x), y)",
        "model.average()",
        "torch.save(model.state_dict(), path)",
        "p.grad = None",
    ],
)
def test_what_no_step_needs_is_told_between_backward_and_step_and_after_it(line: str) -> None:
    assert told(between=line) == {line}
    assert told(below=line) == {line}


@pytest.mark.parametrize(
    "line",
    [
        "put(model.parameters(), surgery(slopes))",
        "p.grad = noisy(p.grad)",
        "p.grad[0] = 0",
        "p.grad += decay(p)",
        "p.grad.mul_(scale(p))",
        "adaptive_clip_grad(model.parameters())",
    ],
)
def test_what_changes_gradients_before_the_step_is_needed(line: str) -> None:
    assert told(between=line, functions=PUT) == set()
    assert told(below=line, functions=PUT) == {line}


def test_so_is_what_an_inner_loop_collects_of_them() -> None:
    source = PUT + textwrap.dedent("""
        for x in loader:
            for at in range(3):
                losses[at].backward()
                slopes.append(flat(model))
            put(model.parameters(), surgery(slopes))
            optimizer.step()
            save(model)
    """)
    lines = source.splitlines()

    assert [lines[line - 1].strip() for line in lines_after_backward(ast.parse(source), set())] == ["save(model)"]


@pytest.mark.parametrize(
    ("above", "below"),
    [
        ("x = memory.sample(32)", "memory.add(play(model))"),
        ("x, y = draw(self.buffer)", "self.buffer.push(play(model))"),
        ("x = weigh(x, weights)", "weights = new_weights(loss)"),
    ],
)
def test_what_the_next_turn_reads_is_needed(above: str, below: str) -> None:
    assert told(above, below=below) == set()
    assert told(below=below) == {below}


@pytest.mark.parametrize(
    ("above", "below"),
    [
        ("teacher(x)", "teacher.average(model)"),
        ("tracker.start()", "tracker.log(loss)"),
        ("x = torch.flip(x)", "torch.save(x, path)"),
        ("x = self.noise(x)", "self.log(x)"),
        ("x = x + 1", "x = x.cpu().numpy()"),
    ],
    ids=["a model", "what both are called for", "a module", "an object of its own", "what the turn sets first"],
)
def test_what_it_does_not_is_told(above: str, below: str) -> None:
    assert told(above, below=below) == {below}


def test_of_a_while_loop_nothing_is_set_by_its_turns() -> None:
    source = "while True:\n  x = memory.draw()\n  model(x).backward()\n  memory.add(play())\n  show(x)"

    assert lines_after_backward(ast.parse(source), set()) == {5}


@pytest.mark.parametrize(
    ("collects", "is_needed"),
    [
        ("    store.add(play(agent))", True),
        ("    store.rows[3] = play(agent)", True),
        ("    store.rows.append(play(agent))", True),
        ("    store[3] = play(agent)", True),
        ("    store.rows = play(agent)", True),
        ("    print(store.size())", False),
    ],
)
def test_what_a_function_of_the_file_puts_into_what_the_next_turn_reads_is_needed(
    collects: str, *, is_needed: bool
) -> None:
    loop = "while True:\n  x = memory.draw()\n  model(x).backward()\n  collect(model, memory)"
    source = f"def collect(agent, store):\n{collects}\n{loop}"

    assert lines_after_backward(ast.parse(source), set()) == (set() if is_needed else {6})
