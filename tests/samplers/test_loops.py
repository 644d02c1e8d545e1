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
    "a count": "for x in xs:\n    losses[n] = f(x)\n    n = n + 1",
    "rows": "for i in range(n):\n    out[i] = f(x[i], out[i])",
    "a name that is new in each turn": "for i in range(n):\n    y = x[i]\n    y = g(y)\n    out.append(y)",
    "a condition": "for box in boxes:\n    if box[2] > 0:\n        total += overlap(box, car)",
    "a recurrence for each sample": "for b in batch:\n    h = 0\n    for t in range(9):\n        h = f(h, b[t])",
    "a table for each sample": "for b in batch:\n    d = {}\n    for t in range(9):\n        d[t] = f(d[t - 1], b)",
    "a comprehension": "losses = [f(2 * x) for x in xs]",
    "a generator": "loss = sum(f(x) for x in xs)",
    "two names": "losses = {name: f(x) for name, x in xs}",
    "what its branches set": "for x in xs:\n    if x > 0:\n        y = f(x)\n    else:\n        y = 0\n    s = s + y",
    "rows in place": "for i, x in enumerate(xs):\n    out[i].copy_(f(x, out[i]))",
    "columns": "for i, x in enumerate(xs):\n    out[:, i] = f(x, out[:, i])",
    "a name that is changed in its turn": "for x in xs:\n    y = f(x)\n    y.clamp_(0)\n    losses.append(y)",
    "a part that is new in each turn": "for x in xs:\n    s = {}\n    s['h'] = f(x)\n    losses.append(g(s['h']))",
    "a sum by key": "for x in xs:\n    total['loss'] += f(x)",
    "many turns": "for i in range(0, n, 2):\n    losses.append(f(x[i]))",
    "a row on one line": "y = stack([f(x) for x in xs]) + sum(self.g(x) for x in xs)",
    "parts that begin where others end": "for n in sizes:\n    losses.append(f(x[start : start + n]))\n    start += n",
    "parts of listed sizes": "for i in rows:\n    n = sizes[i]\n    out.append(f(x[s : s + n]))\n    s += n",
    "parts and their ends": "for n in sizes:\n    end = start + n\n    losses.append(f(x[start:end]))\n    start = end",
    "a method": "for i in range(n):\n    losses.append(self.loss(found[i], meant[i]))",
}
LEFT_OUT = {
    "a recurrence": "for t in range(9):\n    h = tanh(x[t] @ w + h @ u)\n    out.append(h)",
    "a cell": "for t in range(9):\n    h, c = self.cell(x[t], (h, c))",
    "a state of an object": "for t in range(9):\n    self.h = f(self.h, x[t])",
    "an object that goes on": "for wind in winds:\n    boat.sail(wind)\n    out.append(boat.place * wind)",
    "layers": "for layer in layers:\n    x = x + layer(x)",
    "layers that are added": "for layer in layers:\n    x += layer(x)",
    "a power": "for each in x:\n    y @= f(each)",
    "a movement": "for _ in range(9):\n    place = place + speed\n    speed = speed + force(place)",
    "a decoder": "for t in range(n):\n    s = table[token] @ w\n    b = s.argmax()\n    out.append(s)\n    token = b",
    "a pointer": "for t in range(n):\n    b = (x[t][i] + c).argmax()\n    out.append(b)\n    i = b",
    "a walk": "for t in range(n):\n    move = policy(grid[pos])\n    pos += move",
    "a state that is an index": "for x in xs:\n    y = memory[h] * x\n    new = y + x\n    h = new\n    out.append(y)",
    "a chain": "for _ in xs:\n    out.append(f(x[i]))\n    i = after[i]",
    "a time": "for n in sizes:\n    t = t + n\n    h = f(h, x[t])",
    "a position that is computed with": "for n in sizes:\n    t = t + n\n    out.append(g(x[t], t))",
    "a table": "for i in range(1, n):\n    d[i] = minimum(d[i - 1], cost[i])",
    "a list of states": "for t in range(9):\n    states.append(f(states[-1], x[t]))",
    "steps of an inner loop": "for _ in range(3):\n    fast = [p - r * g for p, g in zip(fast, grads)]",
    "parameters": "for p in model.parameters():\n    penalty = penalty + p.square().sum()",
    "groups": "for group in optimizer.param_groups:\n    for p in group['params']:\n        average(p)",
    "parameters in a comprehension": "norms = [f(p) for p in model.parameters()]",
    "what moves a batch": "batch = [each.to(device) for each in batch]",
    "what moves a dictionary": "batch = {name: x.to(device) for name, x in batch.items()}",
    "what collects": "for x in xs:\n    kept.append(x.detach())",
    "a while loop": "while i < n:\n    losses.append(f(x[i]))\n    i += 1",
    "a while loop that ends by its state": "while (h := step(h)) is not None:\n    out.append(g(h))",
    "batches": "def batches():\n    for i in order:\n        rows = [f(x) for x in data[i]]\n        yield stack(rows)",
    "batches of another": "def batches():\n    for i in order:\n        yield from f(i)",
    "batches of a task": "async def batches():\n    for i in order:\n        await put(f(i))",
    "a generator that is gone through": "for x in (f(y) for y in ys):\n    kept.append(x)",
    "a generator that is kept": "batches = prefetch(f(y) for y in ys)",
    "a state by key": "for t in steps:\n    state['h'] = tanh(x[t] @ w + state['h'] @ u)",
    "a state by key, in two lines": "for t in steps:\n    y = f(x[t], state['h'])\n    state['h'] = y",
    "a state in a slot": "for t in steps:\n    h[0] = f(h[0])",
    "a sum of itself in a slot": "for t in steps:\n    h[0] += f(h[0])",
    "a state of a part": "for t in steps:\n    h[:n] = f(x[t, :n], h[:n])",
    "states of layers": "for t in steps:\n    y = x[t]\n    for l in layers:\n        y = hs[l] = f(y, hs[l])",
    "a state and a result": "for t in steps:\n    d['h'], y = cell(x[t], d['h'])\n    out.append(y)",
    "a matrix that mirrors itself": "for i in rows:\n    for j in x[i]:\n        d[i, j] = f(d[j, i])",
    "a state that begins in the loop": "for t in steps:\n    if t == 0:\n        h = f(x)\n    h = g(h, x[t])",
    "a state of some turns": "for t in steps:\n    if ok[t]:\n        h = f(x[t])\n    out.append(g(h, x[t]))",
    "a decaying sum": "for t in steps:\n    mem = beta * mem + f(x[t])",
    "a state that is changed": "for t in steps:\n    mem.mul_(beta).add_(x[t])",
    "a state that is changed as an attribute": "for t in steps:\n    self.mem.copy_(f(x[t], 1))",
    "a state that is given": "for t in steps:\n    torch.add(h, x[t], out=h)",
    "keys so far": "for t in steps:\n    keys.append(f(x[t]))\n    out.append(g(x[t], torch.stack(keys)))",
    "a state in an object": "for t in steps:\n    state.h, y = step(state, x[t])",
    "a state that a method reads": "for t in steps:\n    self.h = self.cell(x[t])",
    "a state in a comprehension": "out = [h := f(h, x) for x in xs]",
    "things that are listed": "for size in (1, 2, 4):\n    losses.append(f(pool(x, size)))",
    "things that are listed beside others": "losses = [w * f(y) for y, w in zip(ys, [1.0, 0.4])]",
    "a small number of turns": "for i in range(8):\n    heads.append(f(x[i]))",
    "a dictionary": "for name, x in outputs.items():\n    total = total + f(x)",
    "values": "loss = sum(f(x) for x in losses.values())",
    "a loop that is too long to be read": "for x in xs:\n    y = " + " + ".join(["f(x)"] * 600),
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


@pytest.mark.parametrize(
    "line",
    [
        "loss = torch.stack(list(map(component, ys, means))).sum()",
        "loss = sum(map(lambda y: (y - 1) ** 2, ys))",
        "both = [*map(self.score, ys)]",
        "loss = functools.reduce(torch.logaddexp, parts)",
        "loss = reduce(torch.add, map(component, ys))",
        "loss = reduce(operator.add, (f(y) for y in ys))",
    ],
)
def test_map_and_reduce_are_loops(line: str) -> None:
    assert set(loops(line)) == {1}


@pytest.mark.parametrize(
    "line",
    [
        "lengths = torch.tensor([0, *map(len, ids)])",
        "print(*map(str, losses))",
        "batches = map(prepare, loader)",
        "for batch in map(prepare, loader):\n    kept.append(batch)",
        "y = functools.reduce(lambda h, layer: layer(h), self.layers, x)",
        "y = reduce(torch.matmul, matrices)",
        "norm = sum(map(square, model.parameters()))",
        "loss = sum(map(head, (a, b, c)))",
        "total = reduce(torch.add, losses.values())",
        "values = list(map(float, line.split()))",
    ],
)
def test_so_are_not_those_that_hand_out_convert_need_an_order_or_go_through_a_few_things(line: str) -> None:
    assert loops(line) == {}
