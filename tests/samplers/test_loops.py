"""Which loops of a program one operation on a whole batch could replace, by their source."""

from __future__ import annotations

import ast

import pytest

from gpulaunch.profiler.samplers.loops import Loop, calls_in, loops_of

TOLD = {
    "a list": "for face in faces:\n    d = (faces - face).square().sum(1)\n    losses.append(d.max() - d.min())",
    "a sum": "for a, b in zip(x, y):\n    loss = loss + (a - b).square().sum()",
    "a sum of several": "for a, b in zip(x, y):\n    loss = loss + overlap(a, b) - 1 + distance(a, b)",
    "an augmented sum": "for a in x:\n    loss += f(a)",
    "numbers": "for x in xs:\n    total += x",
    "a while loop": "while i < n:\n    losses.append(f(x[i]))\n    i += 1",
    "a while loop that counts": "while i < n:\n    losses.append(f(x[i]))\n    i = i + 1",
    "rows": "for i in range(n):\n    out[i] = f(x[i], out[i])",
    "a name that is new in each turn": "for i in range(n):\n    y = x[i]\n    y = g(y)\n    out.append(y)",
    "a condition": "for box in boxes:\n    if box[2] > 0:\n        total += overlap(box, car)",
    "a recurrence for each sample": "for b in batch:\n    h = 0\n    for t in range(9):\n        h = f(h, b[t])",
    "a table for each sample": "for b in batch:\n    d = {}\n    for t in range(9):\n        d[t] = f(d[t - 1], b)",
    "a comprehension": "losses = [f(2 * x) for x in xs]",
    "a generator": "loss = sum(f(x) for x in xs)",
    "two names": "losses = {name: f(x) for name, x in xs.items()}",
    "a method": "for i in range(n):\n    losses.append(self.loss(found[i], meant[i]))",
}
LEFT_OUT = {
    "a recurrence": "for t in range(9):\n    h = tanh(x[t] @ w + h @ u)\n    out.append(h)",
    "a cell": "for t in range(9):\n    h, c = self.cell(x[t], (h, c))",
    "a state of an object": "for t in range(9):\n    self.h = f(self.h, x[t])",
    "layers": "for layer in layers:\n    x = x + layer(x)",
    "layers that are added": "for layer in layers:\n    x += layer(x)",
    "a power": "for each in x:\n    y @= f(each)",
    "a movement": "for _ in range(9):\n    place = place + speed\n    speed = speed + force(place)",
    "a table": "for i in range(1, n):\n    d[i] = minimum(d[i - 1], cost[i])",
    "a list of states": "for t in range(9):\n    states.append(f(states[-1], x[t]))",
    "steps of an inner loop": "for _ in range(3):\n    fast = [p - r * g for p, g in zip(fast, grads)]",
    "parameters": "for p in model.parameters():\n    penalty = penalty + p.square().sum()",
    "groups": "for group in optimizer.param_groups:\n    for p in group['params']:\n        average(p)",
    "parameters in a comprehension": "norms = [f(p) for p in model.parameters()]",
    "what moves a batch": "batch = [each.to(device) for each in batch]",
    "what moves a dictionary": "batch = {name: x.to(device) for name, x in batch.items()}",
    "what collects": "for x in xs:\n    kept.append(x.detach())",
    "steps": "for batch in parts:\n    loss = f(batch) / 4\n    loss.backward()",
}


def loops(program: str) -> dict[int, tuple[int, ...]]:
    """The first lines of the loops around each line."""

    def makes_steps(loop: Loop) -> bool:
        return any(isinstance(call.func, ast.Attribute) and call.func.attr == "backward" for call in calls_in(loop))

    return {
        line: tuple(each.start for each in around) for line, around in loops_of(ast.parse(program), makes_steps).items()
    }


@pytest.mark.parametrize("program", TOLD.values(), ids=TOLD)
def test_a_loop_whose_turns_need_not_each_other_is_told(program: str) -> None:
    first = next(n for n, line in enumerate(program.splitlines(), 1) if "for " in line or "while " in line)

    assert loops(program)[len(program.splitlines())][0] == first


@pytest.mark.parametrize("program", LEFT_OUT.values(), ids=LEFT_OUT)
def test_other_loops_are_left_out(program: str) -> None:
    assert loops(program) == {}


def test_of_loops_in_each_other_the_outermost_is_first_and_a_function_begins_anew() -> None:
    program = (
        "while True:\n  for a in x:\n    for b in f(a):\n      y = [g(c)\n        for c in b]\n  loss.backward()\n"
    )
    made = "for name in names:\n  def f(x):\n    z = g(x)\n    return [h(y) for y in x]\n  made.append(m(f))\n"

    assert loops(program) == {2: (2,), 3: (2, 3), 4: (2, 3, 4), 5: (2, 3, 4)}
    assert loops(made) == {1: (1,), 4: (4,), 5: (1,)}
