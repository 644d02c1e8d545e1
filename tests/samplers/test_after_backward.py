"""What a loop does after its backward pass, without what the step or the next turn needs."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.samplers.after_backward import functions_that_step, lines_after_backward

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
    after = {lines[line - 1].strip() for line in lines_after_backward(ast.parse(source), {})}
    return after - {"pass", ""}


@pytest.mark.parametrize(
    "line",
    [
        "writer.add(grad_norms(model))",
        "norms = [p.grad.norm().item() for p in model.parameters()]",
        "metric.update(model(x), y)",
        "average.update(model)",
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

    assert [lines[line - 1].strip() for line in lines_after_backward(ast.parse(source), {})] == ["save(model)"]


@pytest.mark.parametrize(
    ("above", "below"),
    [
        ("x = memory.sample(32)", "memory.add(play(model))"),
        ("x, y = draw(self.buffer)", "self.buffer.push(play(model))"),
        ("x = weigh(x, weights)", "weights = new_weights(loss)"),
        ("x = bank[rows]", "bank[rows] = model(x)"),
        ("x = agent.draw()", "agent.memory.extend(play(model))"),
        ("aim = teacher(x)", "teacher.follow(model)"),
        ("if stale: points = sample()\n    x = points", "points = resample(points)"),
        ("f(x, memory.sample(32)).backward()", "memory.add(play(model))"),
        ("for env in envs: x = env.look()", "for env in envs: env.advance()"),
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


@pytest.mark.parametrize(
    ("made", "below"),
    [
        ("loader = DataLoader(samples, sampler=harder)", "harder.weigh(loss)"),
        ("harder = Harder(weights)\nloader = DataLoader(samples, batch_sampler=harder)", "weights[rows] = loss"),
        ("batches = cycle(DataLoader(samples, sampler=WeightedRandomSampler(weights)))", "weights[rows] = loss"),
    ],
)
def test_what_a_loader_draws_samples_by_is_needed(made: str, below: str) -> None:
    assert told(below=below, functions=made) == set()
    assert told(below=below) == {below}


@pytest.mark.parametrize(
    ("made", "below"),
    [
        ("loader = DataLoader(samples)\nharder = Harder(loader)", "harder.weigh(loss)"),
        ("loader = DataLoader(samples, sampler=harder, collate_fn=Collate(meter))", "meter.add(loss)"),
        ("loader = DataLoader(torch.rand(9), sampler=torch.randperm(9))", "torch._foreach_lerp_(mean, now, 0.1)"),
        ("first = resume(average, meter)\nstate = State(loader, average, meter)", "average.update(model)"),
    ],
    ids=["it is made of the loader", "what else it is given", "a package", "no loader"],
)
def test_what_it_does_not_is_told_too(made: str, below: str) -> None:
    assert told(below=below, functions=made) == {below}


@pytest.mark.parametrize("of", ["", "nn.utils.", "torch.nn.utils."])
@pytest.mark.parametrize("given", ["project(flat), {}.parameters()", "vec=project(flat), parameters={}.parameters()"])
def test_weights_set_from_one_vector_are_those_of_the_next_step(of: str, given: str) -> None:
    line = f"{of}vector_to_parameters({given})"

    assert told(below=line.format("model")) == set()
    assert told(below=line.format("average")) == {line.format("average")}
    function = f"def keep(net, flat):\n    {line.format('net')}\n"
    assert told(below="keep(model, flat)", functions=function) == set()
    assert told(below="keep(average, flat)", functions=function) == {"keep(average, flat)"}


@pytest.mark.parametrize(
    ("below", "needed"),
    [
        ("error = td(x); rank = error.abs(); memory.update(rank)", {"error = td(x)", "rank = error.abs()"}),
        ("flux = f(x); show(flux); field = field - flux", {"flux = f(x)"}),
        ("gap = distance(model); show(gap)\n    if gap < eps: break", set()),
    ],
)
def test_so_is_what_it_takes_to_set_that(below: str, needed: set[str]) -> None:
    source = textwrap.dedent(LOOP).format(
        above="x = blend(memory.draw(), field)", between="pass", below=below.replace("; ", "\n    ")
    )
    lines = source.splitlines()
    after = {lines[line - 1].strip() for line in lines_after_backward(ast.parse(source), {})}
    assignments = {line.strip() for line in lines[-4:] if "=" in line and "if" not in line}

    assert assignments - after - {"field = field - flux"} == needed


def test_what_ends_a_loop_is_needed() -> None:
    source = "while error(net) > eps:\n  net(x).backward()\n  if late(): break\n  save(net)"

    assert lines_after_backward(ast.parse(source), {}) == {4}


def test_of_a_while_loop_nothing_is_set_by_its_turns() -> None:
    source = "while True:\n  x = memory.draw()\n  model(x).backward()\n  memory.add(play())\n  show(x)"

    assert lines_after_backward(ast.parse(source), {}) == {5}


@pytest.mark.parametrize(
    ("collects", "is_needed"),
    [
        ("    store.add(play(agent))", True),
        ("    store.rows[3] = play(agent)", True),
        ("    store.rows.append(play(agent))", True),
        ("    store[3] = play(agent)", True),
        ("    store.rows = play(agent)", True),
        ("    print(store.size())", False),
        ("    store.count += 1", False),
    ],
)
def test_what_a_function_of_the_file_puts_into_what_the_next_turn_reads_is_needed(
    collects: str, *, is_needed: bool
) -> None:
    loop = "while True:\n  x = memory.draw()\n  model(x).backward()\n  collect(model, memory)"
    source = f"def collect(agent, store):\n{collects}\n{loop}"

    assert lines_after_backward(ast.parse(source), {}) == (set() if is_needed else {6})


TRAINER = """
class Trainer:
    def draw(self):
        return self.memory.sample(32)

    def play(self):
        self.remember(act(self.net))

    def remember(self, seen):
        self.memory.add(seen)

    def one(self, x):
        loss = self.net(x).mean()
        loss.backward()
        self.optimizer.step()
        {below}
        return error

    def run(self):
        while True:
            self.one(self.draw())
"""


@pytest.mark.parametrize(
    ("below", "is_needed"),
    [
        ("self.average.update(self.net)", False),
        ("self.losses.append(loss.item())", False),
        ("self.memory.add(act(self.net))", True),
        ("self.play()", True),
        ("error = weigh(loss)", True),
    ],
    ids=["an average", "a log", "what is drawn from", "a method that adds to it", "what is returned"],
)
def test_a_function_that_a_loop_calls_for_each_step_has_lines_after_its_backward_pass(
    below: str, *, is_needed: bool
) -> None:
    tree = ast.parse(source := TRAINER.format(below=below))
    lines = source.splitlines()

    found = {lines[line - 1].strip() for line in lines_after_backward(tree, functions_that_step(tree))}

    assert found - {""} == (set() if is_needed else {below})


def test_a_function_that_no_loop_of_the_file_calls_has_none_as_its_caller_is_not_known() -> None:
    tree = ast.parse(TRAINER.format(below="self.average.update(self.net)").replace("self.one(", "other("))

    assert lines_after_backward(tree, functions_that_step(tree)) == set()


PROJECTS = """
def evaluate(model):
    model.eval()
    return model(held)

def retract(weight):
    weight.data.copy_(torch.linalg.qr(weight)[0])
"""


@pytest.mark.parametrize(
    ("below", "is_needed"),
    [
        ("for p in model.parameters(): p.data.clamp_(-1, 1)", True),
        ("for at, p in enumerate(model.parameters()): p.mul_(masks[at])", True),
        ("for p, old in zip(model.parameters(), before): p.data = mix(p, old)", True),
        ("for p in model.parameters(): p -= rate * p.grad", True),
        ("torch._foreach_clamp_min_(list(model.parameters()), 0)", True),
        ("nn.init.orthogonal_(model.head.weight)", True),
        ("model.head.weight[0] = 0", True),
        ("model.normalize()", True),
        ("retract(weight=model.weight)", True),
        ("retract(average.weight)", False),
        ("for mine, p in zip(average.parameters(), model.parameters()): mine.lerp_(p, 0.1)", False),
        ("shown = [p.detach().clone().abs_().mean() for p in model.parameters()]", False),
        ("show(model.weight)", False),
        ("score = evaluate(model)", False),
    ],
)
def test_what_changes_the_weights_of_the_model_is_needed(below: str, *, is_needed: bool) -> None:
    assert told(below=below, functions=PROJECTS) == (set() if is_needed else {below})
