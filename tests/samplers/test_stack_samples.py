"""Which line of the program the samples of a stack are counted for."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpulaunch.profiler.daemon.stack_samples import StackSamples
from gpulaunch.profiler.record import RankPlace
from gpulaunch.profiler.record.line_calls import DRAWS_ORDER, RECOMPUTED
from gpulaunch.profiler.samplers.source_lines import SourceLines
from gpulaunch.profiler.stack import Frame

PACKAGES = "/home/me/venv/lib/python3.11/site-packages"
PROGRAM = """\
import torch
torch.autograd.set_detect_anomaly(True)
def residual(points):
    u = net(points)
    return grad(u)
while True:
    residual(x).backward()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(PROGRAM)
    return str(tmp_path / "train.py")


def told_on_third_line(tmp_path: Path, source: str) -> Mapping[tuple[int, str], int]:
    """The lines that are told for a sample on the third line of a program."""
    program = tmp_path / "train.py"
    program.write_text(f"{source}\n")
    samples = StackSamples(Path("/"))
    samples.add(RankPlace(rank=0, local_rank=0, pid=os.getpid()), "forward", [Frame("f", str(program), 3)])
    return samples.tally.calling


def test_anomaly_mode_is_counted_for_the_line_that_switches_it_on(program: str) -> None:
    """Its cost is at every operation: lines of the model would each have too few samples."""
    samples = StackSamples(Path("/"))
    place = RankPlace(rank=0, local_rank=0, pid=os.getpid())
    records = Frame("format_stack", f"{PACKAGES}/torch/fx/traceback.py", 503)
    for phase, line in (("forward", 4), ("backward", 5), ("forward", 5)):
        samples.add(place, phase, [records, Frame("residual", program, line), Frame("<module>", program, 7)])

    assert samples.tally.calling == {(0, f"{program}:2"): 3}
    assert set(samples.tally.calls.values()) == {"torch.autograd.set_detect_anomaly"}


def test_what_gathers_a_state_from_all_ranks_is_a_call_of_its_line_whatever_it_waits_for(program: str) -> None:
    """Below it are collectives: torch.distributed.checkpoint gathers sharded tensors."""
    samples = StackSamples(Path("/"))
    gathers = Frame("get_model_state_dict", f"{PACKAGES}/torch/distributed/checkpoint/state_dict.py", 1150)
    waits = Frame("all_gather_into_tensor", f"{PACKAGES}/torch/distributed/distributed_c10d.py", 4100)
    place = RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for phase in ("checkpoint", "comm", "other"):
        samples.add(place, phase, [waits, gathers, Frame("<module>", program, 4)])
    logs = Frame("wrapper", f"{PACKAGES}/torch/distributed/c10d_logger.py", 83)
    sends = Frame("all_gather_object", f"{PACKAGES}/torch/distributed/distributed_c10d.py", 3500)
    samples.add(place, "comm", [waits, sends, logs, Frame("<module>", program, 2)])

    assert samples.tally.calling == {(0, f"{program}:4"): 3, (0, f"{program}:2"): 1}
    assert samples.tally.calls[0, f"{program}:2"] == "torch.distributed.distributed_c10d.all_gather_object"


def test_collectives_that_need_each_other_are_noted_by_their_line(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("for _ in range(3):\n    mass = share.sum(0)\n    all_reduce(mass)\n    share /= mass\n")
    samples = StackSamples(Path("/"))
    waits = Frame("all_reduce", f"{PACKAGES}/torch/distributed/distributed_c10d.py", 3000)
    for line in (2, 3):
        place = RankPlace(rank=line, local_rank=0, pid=os.getpid())
        samples.add(place, "comm", [waits, Frame("<module>", str(program), line)])

    assert samples.tally.chained == {f"{program}:3"}


def test_predictions_that_are_gathered_belong_in_the_validation(program: str) -> None:
    samples = StackSamples(Path("/"))
    waits = Frame("all_gather_into_tensor", f"{PACKAGES}/torch/distributed/distributed_c10d.py", 4100)
    gathers = Frame("Accelerator.gather_for_metrics", f"{PACKAGES}/accelerate/accelerator.py", 3000)
    place = RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for phase, line in (("validation", 4), ("comm", 4), ("backward", 1), ("comm", 2)):
        below = [] if phase == "backward" else [waits, gathers]
        samples.add(place, phase, [*below, Frame("<module>", program, line)])

    assert samples.tally.calling == {(0, f"{program}:2"): 1}
    assert set(samples.tally.calls.values()) == {"accelerate.accelerator.gather_for_metrics"}


def test_a_tensor_gathered_whole_is_a_call_of_its_line_except_in_the_model(program: str) -> None:
    """There its layers may be shared among ranks, and need it."""
    samples = StackSamples(Path("/"))
    waits = Frame("wait_tensor", f"{PACKAGES}/torch/distributed/_functional_collectives.py", 142)
    gathers = Frame("DTensor.full_tensor", f"{PACKAGES}/torch/distributed/tensor/_api.py", 774)
    model = Frame("Module._call_impl", f"{PACKAGES}/torch/nn/modules/module.py", 1790)
    place = RankPlace(rank=0, local_rank=0, pid=os.getpid())
    samples.add(place, "comm", [waits, gathers, Frame("<module>", program, 4)])
    samples.add(place, "comm", [waits, gathers, Frame("forward", program, 2), model, Frame("<module>", program, 4)])

    assert samples.tally.calling == {(0, f"{program}:4"): 1}
    assert set(samples.tally.calls.values()) == {"torch.distributed.tensor.full_tensor"}


def test_an_order_that_is_drawn_anew_is_a_call_of_the_line_that_asks_for_a_batch(program: str) -> None:
    """`next(iter(loader))`. A fetch below is none, and in a loop over the loader the order is hardly ever drawn."""
    samples = StackSamples(Path("/"))
    draws = Frame("RandomSampler.__iter__", f"{PACKAGES}/torch/utils/data/sampler.py", 194)
    fetches = Frame("_MapDatasetFetcher.fetch", f"{PACKAGES}/torch/utils/data/_utils/fetch.py", 54)
    asks = Frame("_BaseDataLoaderIter.__next__", f"{PACKAGES}/torch/utils/data/dataloader.py", 725)
    place = RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for inside in (draws, draws, fetches):
        samples.add(place, "data_wait", [inside, asks, Frame("<module>", program, 4)])
    samples.add(place, "forward", [draws, asks, Frame("<module>", program, 4)])  # as the epoch begins
    samples.add(place, "optimizer", [draws, asks, Frame("<module>", program, 4)])

    assert samples.tally.calling == {(0, f"{program}:4"): 3}
    assert samples.tally.indexing == {0: 2}
    assert set(samples.tally.calls.values()) == {DRAWS_ORDER}


def test_the_line_that_calls_backward_is_known(program: str) -> None:
    samples = StackSamples(Path("/"))
    torch = Frame("_engine_run_backward", f"{PACKAGES}/torch/autograd/graph.py", 800)
    place = RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for phase in ("backward", "backward", "forward"):
        samples.add(place, phase, [torch, Frame("<module>", program, 7)])

    assert samples.tally.backward == {(0, f"{program}:7"): 2}
    assert samples.tally.calling == {}


def test_what_works_on_tensors_below_backward_is_counted_for_the_line_of_the_loop(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("while True:\n    loss.backward()\n    optimizer.step()\n    accuracy(model)\n    step += 1\n")
    layer = Frame("Linear.forward", f"{PACKAGES}/torch/nn/modules/linear.py", 130)
    accuracy = Frame("accuracy", str(tmp_path / "metrics.py"), 3)
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for phase, line in (("other", 4), ("forward", 4), ("other", 3), ("optimizer", 3)):
        samples.add(place, phase, [layer, accuracy, Frame("<module>", str(program), line)])

    assert samples.tally.calling == {(0, f"{program}:4"): 1}
    assert samples.tally.calls == {(0, f"{program}:4"): "accuracy"}


def test_a_sampler_of_the_program_is_counted_apart_from_the_wait_for_data(tmp_path: Path) -> None:
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    program = str(tmp_path / "train.py")
    asks = Frame("_BaseDataLoaderIter._next_index", f"{PACKAGES}/torch/utils/data/dataloader.py", 720)
    shuffle = Frame("Random.shuffle", "/usr/lib/python3.11/random.py", 357)
    fetch = Frame("_MapDatasetFetcher.fetch", f"{PACKAGES}/torch/utils/data/_utils/fetch.py", 52)
    for inner in (asks, asks, fetch):
        stack = [shuffle, Frame("Shuffled.__iter__", program, 30), inner, Frame("<module>", program, 60)]
        samples.add(place, "data_wait", stack)

    assert samples.tally.calling == {(0, f"{program}:30"): 2}
    assert samples.tally.indexing == {0: 2}


def test_what_trainers_do_around_a_save_is_counted_apart_and_lines_of_the_program_stay_lines(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import os\nwhile True:\n    loss.backward()\n    os.replace(new, newest)\n    log(loss)\n")
    fit = Frame("Trainer.fit", f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", 600)
    saves = Frame(
        "ModelCheckpoint._save_checkpoint", f"{PACKAGES}/lightning/pytorch/callbacks/model_checkpoint.py", 600
    )
    removes = Frame("_remove", f"{PACKAGES}/fsspec/implementations/local.py", 205)
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for phase, stack in (
        ("other", [Frame("save_checkpoint", str(program), 4), Frame("<module>", str(program), 9)]),
        ("other", [removes, saves, fit, Frame("<module>", str(program), 9)]),
        ("checkpoint", [saves, fit, Frame("<module>", str(program), 9)]),  # is measured
        ("other", [fit, Frame("<module>", str(program), 9)]),
    ):
        samples.add(place, phase, stack)

    assert samples.tally.saving == {0: 1}
    assert samples.tally.calling == {(0, f"{program}:4"): 1}
    assert samples.tally.samples == {0: 4}


def test_workers_that_wait_for_a_lock_are_counted(tmp_path: Path) -> None:
    program = tmp_path / "data.py"
    program.write_text("import fcntl\n\ndef read(i):\n    fcntl.flock(file, fcntl.LOCK_EX)\n    return decode(i)\n")
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    fetch = Frame("_MapDatasetFetcher.fetch", f"{PACKAGES}/torch/utils/data/_utils/fetch.py", 52)
    waits = Frame("SemLock.__enter__", "/usr/lib/python3.11/multiprocessing/synchronize.py", 98)
    for stack in (
        [Frame("read", str(program), 4)],
        [waits, Frame("read", str(program), 5)],
        [Frame("read", str(program), 5)],
    ):
        samples.add_worker(place, [*stack, Frame("Data.__getitem__", str(program), 9), fetch])

    assert (samples.tally.locked, samples.tally.fetches) == ({0: 2}, {0: 3})


LOOPS = """\
class Loss(nn.Module):
    def forward(self, found, meant):
        losses = [self.of_photo(*pair)
                  for pair in zip(found, meant)]
        return torch.stack(losses).mean()
    def of_photo(self, boxes, cars):
        total = 0
        for box, car in zip(boxes, cars):
            total = total + overlap(box, car)
        return total
class Model(nn.Module):
    def forward(self, x):
        outs = []
        for layer, part in zip(self.branches, x):
            outs.append(layer(part) * 2)
        return outs
def step(batch):
    parts = list(batch)
    for part in parts:
        update(loss(model(part), part))
while True:
    step(next(batches))
"""
MODULE = Frame("Module._call_impl", f"{PACKAGES}/torch/nn/modules/module.py", 1786)
LINEAR = Frame("Linear.forward", f"{PACKAGES}/torch/nn/modules/linear.py", 130)
GRAD_MODE = Frame("no_grad.__exit__", f"{PACKAGES}/torch/autograd/grad_mode.py", 90)
BACKWARD = Frame("_engine_run_backward", f"{PACKAGES}/torch/autograd/graph.py", 800)


@pytest.fixture
def looping(tmp_path: Path) -> tuple[StackSamples, RankPlace, str]:
    (tmp_path / "loops.py").write_text(LOOPS)
    return StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid()), str(tmp_path / "loops.py")


def test_samples_in_a_loop_of_a_step_are_counted_for_the_outermost_whatever_it_calls(looping) -> None:
    samples, place, program = looping
    step = [Frame("step", program, 20), Frame("<module>", program, 22)]
    forward = [Frame("Loss.forward", program, 3), MODULE, *step]
    inner = [Frame("Loss.of_photo", program, 9), Frame("Loss.forward.<listcomp>", program, 3), *forward]
    overlap = Frame("overlap", f"{program}x", 4)
    for _ in range(2):
        samples.add(place, "backward", [GRAD_MODE, *inner])
        samples.add(place, "backward", [BACKWARD, Frame("update", f"{program}x", 9), *step])
    for phase, stack in (
        *(("forward", [overlap, *inner]), ("forward", inner), ("forward", inner[1:]), ("forward", step)),
        *(("validation", inner), ("optimizer", inner)),
    ):
        samples.add(place, phase, stack)

    assert samples.tally.looping == {(0, f"{program}:3"): 3}
    assert samples.tally.loop_ends == {(0, f"{program}:3"): 4}
    assert samples.tally.before_backward == {0: 4}


@pytest.mark.parametrize(("layers", "told"), [(1, True), (2, False)])
def test_a_loop_over_layers_is_known_by_the_modules_that_it_calls(looping, layers: int, told: bool) -> None:
    samples, place, program = looping
    line = [Frame("Model.forward", program, 15), MODULE, Frame("<module>", program, 22)]
    for stack in [line] * 4 + [[LINEAR, MODULE, *line]] * layers:
        samples.add(place, "forward", stack)

    assert (samples.tally.looping == {(0, f"{program}:14"): 4}) is told
    assert bool(samples.tally.looping) is told


def test_a_loss_of_torch_is_no_layer_nor_is_a_module_that_is_not_known(looping) -> None:
    samples, place, program = looping
    loss = Frame("MSELoss.forward", f"{PACKAGES}/torch/nn/modules/loss.py", 628)
    for _ in range(4):
        samples.add(place, "forward", [loss, MODULE, Frame("Model.forward", program, 15), MODULE])
        samples.add(place, "forward", [MODULE, Frame("Model.forward", program, 15), MODULE])

    assert samples.tally.looping == {(0, f"{program}:14"): 8}


def test_a_loop_that_is_computed_again_in_backward_makes_no_steps(looping) -> None:
    """A checkpoint runs its part of forward there."""
    samples, place, program = looping
    again = Frame("Loss.of_photo", program, 9)
    for _ in range(2):
        samples.add(place, "backward", [again, MODULE, BACKWARD, Frame("step", program, 20)])
    samples.add(place, "forward", [again])
    samples.add(place, "forward", [Frame("step", program, 20)])

    assert samples.tally.looping == {(0, f"{program}:8"): 1}


@pytest.mark.parametrize(
    ("phase", "line", "above", "held", "told"),
    [
        ("other", 2, "", [True] * 24, True),
        ("forward", 2, "", [True] * 24, True),
        ("other", 2, "", [True] * 23, False),
        ("other", 2, "", [True] * 20 + [False] + [True] * 20, False),
        ("other", 2, "", [True] * 60 + [False] + [True] * 40, True),
        ("other", 2, "", [True] * 20 + [False] + [True] * 50, True),
        ("other", 2, "", [True] * 40 + [False] * 2 + [True] * 60, False),
        ("other", 2, "", [None] * 30, False),
        ("other", 2, "torch/nn/modules/module.py", [True] * 30, False),
        ("other", 2, "torch/autograd/function.py", [True] * 30, False),
        ("other", 2, "torch/_inductor/output_code.py", [True] * 30, False),
        ("backward", 2, "", [True] * 30, False),
        ("other", 3, "", [True] * 30, False),
        ("other", 4, "", [True] * 30, False),
        ("other", 5, "", [True] * 30, False),
    ],
    ids=[
        *("Python", "before backward", "few samples", "tensors", "another thread took it", "one of 71", "two of 102"),
        *("not known", "in the model"),
        *("in an operation of the program's", "in generated code", "in backward", "collects on purpose"),
        *("an operation of a package", "has a name of its own"),
    ],
)
def test_a_line_that_always_holds_the_gil_computes_without_tensors(
    tmp_path: Path, phase: str, line: int, above: str, held: list[bool | None], told: bool
) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import gc, knn, zlib\nscores = [score(each) for each in seen if each.age]\n"
        "gc.collect()\nloss = knn.loss(x, y)\nzlib.compress(x)\n"
    )
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    inside = [Frame("call", f"{PACKAGES}/{above}", 581)] if above else []
    for holds_gil in held:
        stack = [Frame("rank", str(program), line), *inside, Frame("<module>", str(tmp_path / "main.py"), 9)]
        samples.add(place, phase, stack, holds_gil)

    assert samples.tally.holding_gil == ({(0, f"{program}:2")} if told else set())
    assert not told or samples.tally.innermost == {(0, f"{program}:2", ""): len(held)}
    assert samples.tally.samples == {0: len(held)}


def test_an_innermost_line_is_counted_with_the_one_that_calls_it_after_backward(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("while True:\n    loss.backward()\n    note(x)\ndef note(x):\n    seen.insert(0, x)\n")
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for _ in range(25):
        stack = [Frame("note", str(program), 5), Frame("<module>", str(program), 3)]
        samples.add(place, "other", stack, True)

    assert samples.tally.calling == {(0, f"{program}:3"): 25}
    assert samples.tally.innermost == {(0, f"{program}:5", f"{program}:3"): 25}
    assert samples.tally.holding_gil == {(0, f"{program}:5")}


def test_what_saves_is_no_line_of_python(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("def save_checkpoint():\n    for each in state: out.append(each)\n")
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for _ in range(30):
        samples.add(place, "other", [Frame("save_checkpoint", str(program), 2)], True)

    assert (samples.tally.saving, samples.tally.innermost) == ({0: 30}, {})


def test_what_belongs_to_one_function_after_a_step_is_known(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "def average(model):\n    new = copy.deepcopy(model)\n    return mix(new)\n\n"
        "while True:\n    loss.backward()\n    average(model)\n    json.dump(seen, file)\n"
    )
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    copies = Frame("deepcopy", "/usr/lib/python3.11/copy.py", 118)
    dumps = Frame("dump", "/usr/lib/python3.11/json/__init__.py", 179)
    called = [Frame("<module>", str(program), 7)]
    copying, mixing = (Frame("average", str(program), line) for line in (2, 3))
    for frames in ([copies, copying, *called], [mixing, *called], [dumps, Frame("<module>", str(program), 8)]):
        samples.add(place, "other", frames)

    loop = f"{program}:7"
    assert samples.tally.after_step == {(0, f"{program}:2"): loop, (0, loop): loop, (0, f"{program}:8"): f"{program}:8"}


def test_a_method_of_a_callback_may_be_decorated(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("class Average(Callback):\n    @torch.no_grad()\n    def on_step_end(self):\n        mix()\n")
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    stack = [
        Frame("Average.on_step_end", str(program), 4),
        Frame("context_decorator.<locals>.decorate_context", f"{PACKAGES}/torch/utils/_contextlib.py", 124),
        Frame("CallbackHandler.call_event", f"{PACKAGES}/transformers/trainer_callback.py", 554),
        Frame("<module>", str(program), 9),
    ]
    samples.add(place, "other", stack)

    assert samples.tally.after_step == {(0, f"{program}:4"): "Average.on_step_end"}


def test_in_forward_a_function_in_c_counts_if_it_cannot_be_a_part_of_the_model(tmp_path: Path) -> None:
    """With a dataloader, forward is all from the batch to backward."""
    program = tmp_path / "train.py"
    program.write_text(
        "import json, fused_attention\n\nids = tokenizer.encode_batch(texts)\nseen = json.loads(text)\n"
        "loss = fused_attention.forward(q, k)\nloss.backward()\n"
    )
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for line in (3, 4, 5):
        samples.add(place, "forward", [Frame("<module>", str(program), line)])

    assert samples.tally.calling == {(0, f"{program}:3"): 1, (0, f"{program}:4"): 1}


def test_a_metric_in_or_after_the_validation_is_where_it_belongs(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("while True:\n    loss.backward()\n    score = f1_score(y, found)\n")
    metric = Frame("f1_score", f"{PACKAGES}/sklearn/metrics/_classification.py", 1)
    line = Frame("<module>", str(program), 3)
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    counts: list[int] = []
    for phase in ("other", "validation", "other", "backward", "other"):
        samples.add(place, phase, [line] if phase == "backward" else [metric, line])
        counts.append(sum(samples.tally.calling.values()))

    assert counts == [1, 1, 1, 1, 2]


def test_what_is_the_same_in_every_step_is_counted_for_the_outermost_line_that_shows_it(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import torch\ndef table(n):\n    return torch.arange(n).cos()\ndef forward(x):\n    return net(x) + table(9)\n"
    )
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    calls, table = Frame("forward", str(program), 5), Frame("table", str(program), 3)
    for phase, stack in (("forward", [table, calls]), ("forward", [calls]), ("backward", [table, calls])):
        samples.add(place, phase, stack)

    assert samples.tally.calling == {(0, f"{program}:5"): 1}
    assert samples.tally.calls == {(0, f"{program}:5"): "the same in every step"}


def test_without_workers_the_training_thread_fetches(tmp_path: Path) -> None:
    program = str(tmp_path / "train.py")
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    fetch = Frame("_MapDatasetFetcher.fetch", f"{PACKAGES}/torch/utils/data/_utils/fetch.py", 54)
    reads = Frame("NpzFile.__getitem__", f"{PACKAGES}/numpy/lib/npyio.py", 250)
    stack = [reads, Frame("Skies.__getitem__", program, 40), fetch, Frame("main", program, 60)]
    for phase in ("data_wait", "validation"):
        samples.add(place, phase, stack)

    assert (samples.tally.fetches, samples.tally.fetching) == ({0: 1}, {(0, f"{program}:40"): 1})
    assert samples.tally.calls[0, f"{program}:40"] == "numpy.lib.npyio.__getitem__"


def test_a_one_hot_matrix_is_told_where_its_line_is_what_computes(tmp_path: Path) -> None:
    """`net` may be anything: its time is not that of the matrix."""
    program = tmp_path / "train.py"
    program.write_text(
        "def forward(words):\n"
        "    vectors = project(F.one_hot(words, 9000).float())\n"
        "    scores = net(vectors)\n"
        "    return F.one_hot(words, 9000)\n"
        "    joined = project(torch.cat([scores, F.one_hot(kinds, 9).float()], 1))\n"
    )
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    calls = Frame("Module._call_impl", f"{PACKAGES}/torch/nn/modules/module.py", 1790)
    linear = Frame("Linear.forward", f"{PACKAGES}/torch/nn/modules/linear.py", 130)
    several = Frame("Sequential.forward", f"{PACKAGES}/torch/nn/modules/container.py", 250)
    for line, below in (
        (2, []),
        (2, [linear, calls]),
        (2, [linear, calls, several, calls]),
        (3, []),
        (4, []),
        (5, [linear, calls]),
    ):
        samples.add(place, "forward", [*below, Frame("forward", str(program), line)])

    assert samples.tally.calling == {(0, f"{program}:2"): 2}
    assert samples.tally.calls == {(0, f"{program}:2"): "one_hot"}
    samples.add(place, "forward", [linear, calls, Frame("forward", str(program), 2)])
    assert samples.tally.calls == {(0, f"{program}:2"): "product with one_hot"}


def test_a_loop_that_takes_tensors_apart_is_told_where_it_only_moves_elements(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "def assign(boxes, target):\n"
        "    for b in range(boxes.shape[0]):\n"
        "        near = boxes[b] @ boxes[b].T\n"
        "        for j, kind in enumerate(kinds[b]):\n"
        "            x = boxes[b, j, 0].item() * GRID\n"
        "            col = int(x)\n"
        "            target[b, col, 1:] = math.log(x) - col\n"
        "            target[b, col] = near[j] * x\n"
        "            fits(boxes[b], x)\n"
        "    return [score.item() for score in target]\n"
    )
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for line in range(1, 11):
        samples.add(place, "forward", [Frame("assign", str(program), line)])

    assert samples.tally.calling == {(0, f"{program}:2"): 3, (0, f"{program}:10"): 1}
    assert set(samples.tally.calls.values()) == {"element"}


@pytest.mark.parametrize(
    "loop",
    [
        "while i < n:\n    score = peaks[i].item()\n    kept[i] = float(score > 0.5)\n    i += 1",
        "while i >= 0:\n    score = peaks[i].item()\n    kept[i] = score\n    i -= 1",
    ],
)
def test_a_loop_may_count_by_itself(tmp_path: Path, loop: str) -> None:
    assert told_on_third_line(tmp_path, loop) == {(0, f"{tmp_path}/train.py:1"): 1}


_AGAIN = [
    "out = net(x)\nwith torch.no_grad():\n    right = (net(x).argmax(1) == y).sum()",
    "loss = ce(self(x), y)\nself.log('loss', loss)\nself.log('acc', (self(x).argmax(1) == y).float().mean())",
    "with no_grad():\n    pass\n    acc = accuracy(self.net(x), y)\nwith autocast():\n    loss = ce(self.net(x), y)",
]
_ONCE = [
    "out = net(x)\nwith torch.no_grad():\n    target = net(x).softmax(1)",  # a Pi model
    "out = net(x)\nx, y = next(batches)\nright = (net(x).argmax(1) == y).sum()",
    "out = net(x)\nnet.eval()\nright = (net(x).argmax(1) == y).sum()",
    "old = net(x)\nwith torch.no_grad():\n    right = (teacher(x).argmax(1) == y).sum()",
    "if warm:\n    out = net(x)\nright = (net(x).argmax(1) == y).sum()",
    "def step(x):\n    return net(x)\nright = (net(x).argmax(1) == y).sum()",
]


@pytest.mark.parametrize(
    ("source", "is_told"), [*((each, True) for each in _AGAIN), *((each, False) for each in _ONCE)]
)
def test_a_forward_pass_only_for_a_metric_is_told(tmp_path: Path, source: str, *, is_told: bool) -> None:
    program = tmp_path / "train.py"
    program.write_text("def step(self, x, y):\n" + textwrap.indent(f"{source}\n", "    "))
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    calls = Frame("Module._call_impl", f"{PACKAGES}/torch/nn/modules/module.py", 1790)
    linear = Frame("Linear.forward", f"{PACKAGES}/torch/nn/modules/linear.py", 130)
    for line in range(1, 7):
        samples.add(place, "forward", [linear, calls, Frame("step", str(program), line)])
        samples.add(place, "forward", [Frame("step", str(program), line)])

    assert samples.tally.calling == ({(0, f"{program}:4"): 1} if is_told else {})
    assert set(samples.tally.calls.values()) <= {"forward again"}


def test_no_source_of_a_package_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's are long: to read one takes 0.1 s, a quarter of what all samples of a short run may take."""
    asked: set[str] = set()

    def line_in_vain(_: SourceLines, call: str, file: str, line: int) -> int:
        asked.add(file)
        return 0

    monkeypatch.setattr(SourceLines, "line_in_vain", line_in_vain)
    program = str(tmp_path / "train.py")
    place = RankPlace(rank=0, local_rank=0, pid=os.getpid())
    samples = StackSamples(Path("/"))
    samples.add(place, "forward", [Frame("<module>", program, 3)])
    assert asked == {program}
    for file in ("torch/_ops.py", "torch/utils/data/sampler.py", "lightning/fabric/fabric.py"):
        for phase in ("data_wait", "forward", "backward", "other", "optimizer", "validation", "comm", "unsettled"):
            samples.add(place, phase, [Frame("run", f"{PACKAGES}/{file}", 8), Frame("<module>", program, 3)])

    assert asked <= {program}


@pytest.mark.parametrize(
    "loop",
    [
        "for t in steps:\n    a = alphas[t].item()\n    x = (x - (1 - a) / (1 - a) ** 0.5 * eps) / a**0.5",
        "for i in range(n):\n    dt = (ts[i + 1] - ts[i]).item()\n    y = y + dt / 2 * (k1 + k2)",
        "for block, gate in zip(blocks, gates):\n    g = gate.item()\n    x = x + g * block(x)",
        "for e, n in enumerate(counts):\n    n = n.item()\n    out[index[e]] += weight[e][:, None] * y",
        "for p, r in zip(params, ratios):\n    trust = r.item()\n    p.data -= lr * trust * p.grad",
        "for t in range(n):\n    done = mask[t].item()\n    alpha = torch.max(alpha[:, :, None] + trans, 1)[0]",
        "for t, a in enumerate(actions):\n    a = a.item()\n    obs, reward = env.step(a)",
        "for c in range(3):\n    m = 0\n    x[:, c] = (x[:, c] - means[c].item()) / stds[c].item()",
        "for i, (x, y) in enumerate(loader):\n    temp = temps[i].item()\n    x = (x / 255.0 - mean) / std",
        "for i, (x, y) in enumerate(loader):\n    temp = temps[i].item()\n    x = x / 255.0",
        "while t < n:\n    a = alphas[t].item()\n    x = a * x + (1 - a) * net(x)\n    t += 1",
        "for i in range(n):\n    a = alphas[i].item()\n    h *= 0.9",
        "for i in range(n):\n    ret[i] = rows[i].item()\n    h += 1",
        "for name, norm in norms:\n    pass\n    total += norm.square().sum(0).item()",
    ],
)
def test_a_loop_that_computes_with_tensors_may_take_elements_too(tmp_path: Path, loop: str) -> None:
    """Its third line is what takes the time."""
    assert told_on_third_line(tmp_path, loop) == {}


@pytest.mark.parametrize(
    ("name", "caller", "is_told"),
    [
        ("Probe.hook", "torch/nn/modules/module.py", True),
        ("Probe.forward", "torch/nn/modules/module.py", False),
        ("Probe.hook", "torch/nn/functional.py", False),
    ],
    ids=["a hook", "a module", "called by something else"],
)
def test_a_hook_that_only_observes_is_told(tmp_path: Path, name: str, caller: str, *, is_told: bool) -> None:
    program = tmp_path / "train.py"
    program.write_text("def hook(module, inputs, output):\n    seen[module] = output.detach().std()\n")
    samples = StackSamples(Path("/"))
    place = RankPlace(rank=0, local_rank=0, pid=os.getpid())
    below = Frame("std", f"{PACKAGES}/torch/_tensor.py", 900)
    calls = Frame("Module._call_impl", f"{PACKAGES}/{caller}", 1800)
    samples.add(place, "forward", [below, Frame(name, str(program), 2), calls, Frame("<module>", str(program), 9)])

    assert (samples.tally.calls.get((0, f"{program}:2")) == "observes") is is_told


BACKWARD = Frame("_engine_run_backward", f"{PACKAGES}/torch/autograd/graph.py", 841)
AGAIN = [Frame("unpack_hook", f"{PACKAGES}/torch/utils/checkpoint.py", 1120), BACKWARD]


@pytest.mark.parametrize(
    ("within", "line", "call"),
    [
        ([Frame("Linear.forward", f"{PACKAGES}/torch/nn/modules/linear.py", 130)], 7, RECOMPUTED),
        ([Frame("dumps", "/usr/lib/python3.11/json/__init__.py", 230)], 3, "json.dumps"),
    ],
    ids=["", "its line is told of by itself"],
)
def test_what_a_checkpoint_computes_again_is_told_where_backward_is_called(
    tmp_path: Path, within: list[Frame], line: int, call: str
) -> None:
    program = str(tmp_path / "train.py")
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    samples.add(place, "backward", [*within, Frame("Block.forward", program, 3), *AGAIN, Frame("<module>", program, 7)])
    samples.add(place, "backward", [BACKWARD, Frame("<module>", program, 7)])

    assert (samples.tally.calling, samples.tally.samples) == ({(0, f"{program}:{line}"): 1}, {0: 2})
    assert samples.tally.calls == {(0, f"{program}:{line}"): call}


def test_so_it_is_in_a_trainer_that_is_called_once(tmp_path: Path) -> None:
    program = str(tmp_path / "train.py")
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    trainer = [Frame("Trainer.train", f"{PACKAGES}/transformers/trainer.py", 1576), Frame("<module>", program, 7)]
    layer = Frame("Linear.forward", f"{PACKAGES}/torch/nn/modules/linear.py", 130)
    samples.add(place, "forward", [layer, *trainer])
    samples.add(place, "backward", [layer, *AGAIN, *trainer])

    assert samples.tally.calling == {(0, f"{program}:7"): 1}
    assert samples.tally.calls[0, f"{program}:7"] == RECOMPUTED
