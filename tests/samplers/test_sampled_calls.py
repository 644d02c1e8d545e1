"""The call that a stack is in: the innermost line of the program, and what it calls."""

from __future__ import annotations

import copy
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.record.line_calls import KEEPS_LOGITS
from gpulaunch.profiler.samplers.sampled_calls import (
    Call,
    below_fetch,
    call_of,
    converting_lists,
    in_callback,
    in_sampler,
    is_outside_compute,
    lines_of_program,
    spans_steps,
    trains_elsewhere,
)
from gpulaunch.profiler.stack import Frame

PYTHON = "/opt/conda/lib/python3.12"
PACKAGES = f"{PYTHON}/site-packages"
MAIN = Frame("main", "/home/me/train.py", 90)
TRAIN = Frame("train", "/home/me/train.py", 61)
DEEPCOPY = Frame("deepcopy", f"{PYTHON}/copy.py", 136)
TENSOR = Frame("Tensor.__deepcopy__", f"{PACKAGES}/torch/_tensor.py", 120)
MODULE = Frame("Module._call_impl", f"{PACKAGES}/torch/nn/modules/module.py", 1790)
LAYER = Frame("Block.forward", "/home/me/model.py", 12)
METRIC = f"{PACKAGES}/torchmetrics/metric.py"
AUROC = f"{PACKAGES}/torchmetrics/classification/auroc.py"
FIT = Frame("Trainer.fit", f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", 560)


def called(*frames: Frame) -> Call:
    """The call of a stack, its outermost frame first."""
    call = call_of(frames[::-1])
    assert call is not None
    return call


@pytest.mark.parametrize(
    ("below", "name", "origin"),
    [
        ((DEEPCOPY, DEEPCOPY, TENSOR), "copy.deepcopy", "python"),
        ((Frame("dump", f"{PYTHON}/json/__init__.py", 179),), "json.dump", "python"),
        ((Frame("Random.shuffle", "/usr/lib/python3.11/random.py", 357),), "random.shuffle", "python"),
        (
            (Frame("_find_and_load", "<frozen importlib._bootstrap>", 1176),),
            "importlib._bootstrap._find_and_load",
            "python",
        ),
        (
            (
                Frame("validate_params.<locals>.decorator.<locals>.wrapper", f"{PACKAGES}/sklearn/utils/_param.py", 2),
                Frame("f1_score", f"{PACKAGES}/sklearn/metrics/_classification.py", 1),
            ),
            "sklearn.metrics.f1_score",
            "package",
        ),
        (
            (
                Frame("ContextDecorator.__call__.<locals>.inner", f"{PYTHON}/contextlib.py", 81),
                Frame("Engine.save", f"{PACKAGES}/deepspeed/runtime/engine.py", 3),
            ),
            "deepspeed.runtime.engine.save",
            "package",
        ),
        (
            (Frame("Queue.get", f"{PYTHON}/queue.py", 171), Frame("Condition.wait", f"{PYTHON}/threading.py", 355)),
            "queue.get",
            "python",
        ),
        ((Frame("Event.wait", f"{PYTHON}/threading.py", 655),), "threading.wait", "python"),
        ((MODULE,), "torch.nn.modules.module._call_impl", "torch"),
        (
            (
                Frame("Metric._wrap_compute.<locals>.wrapped_func", METRIC, 699),
                Frame("BinaryAUROC.compute", AUROC, 125),
                TENSOR,
            ),
            "torchmetrics.BinaryAUROC.compute",
            "package",
        ),
        ((Frame("wrapped_func", METRIC, 560), Frame("update", AUROC, 90)), "torchmetrics.Metric.update", "package"),
        (
            (Frame("MetricCollection.update", f"{PACKAGES}/torchmetrics/collections.py", 300),),
            "torchmetrics.MetricCollection.update",
            "package",
        ),
        ((Frame("wrapped_func", METRIC, 560),), "torchmetrics.Metric.compute", "package"),
        ((Frame("empty_cache", f"{PACKAGES}/torch/cuda/memory.py", 1),), "torch.cuda.memory.empty_cache", "torch"),
        ((Frame("tap", "/src/gpulaunch/profiler/gpulaunch/profiler/probe/taps.py", 1),), "", "program"),
        ((), "", "program"),
    ],
)
def test_a_call_has_the_name_that_a_program_knows(below: tuple[Frame, ...], name: str, origin: str) -> None:
    call = called(MAIN, TRAIN, *below)

    assert (call.file, call.line, call.name, call.origin) == (TRAIN.file, TRAIN.line, name, origin)


def test_a_stack_without_the_program_has_no_call() -> None:
    assert call_of([DEEPCOPY]) is None
    assert call_of([]) is None


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ((MAIN, TRAIN, Frame("rearrange", f"{PACKAGES}/einops/einops.py", 600)), False),  # a loss or a layer, maybe
        ((MAIN, TRAIN, Frame("step", f"{PACKAGES}/gymnasium/vector/sync_vector_env.py", 9)), False),
        ((MAIN, TRAIN, MODULE, LAYER), False),
        ((MAIN, TRAIN, MODULE, LAYER, Frame("resize", f"{PACKAGES}/cv2/__init__.py", 3)), True),
        ((MAIN, TRAIN, MODULE, LAYER, DEEPCOPY), True),
        ((MAIN, TRAIN, Frame("PreTrainedTokenizer.encode", f"{PACKAGES}/transformers/tokenization_utils.py", 3)), True),
        ((MAIN, TRAIN, Frame("call", "/tmp/torchinductor_me/ab/cab.py", 88)), False),
    ],
)
def test_packages_that_may_compute_with_tensors_are_not_told(frames: tuple[Frame, ...], told: bool) -> None:
    assert is_outside_compute(called(*frames), "other") is told


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_an_operation_of_the_programs_own_computes_is_a_part_of_the_model(phase: str) -> None:
    apply = Frame("BackwardCFunction.apply", f"{PACKAGES}/torch/autograd/function.py", 315)
    solve = Frame("Solve.forward", "/home/me/model.py", 12)
    splu = Frame("splu", f"{PACKAGES}/scipy/sparse/linalg/_dsolve/linsolve.py", 438)

    assert not is_outside_compute(called(TRAIN, MODULE, LAYER, apply, solve, splu), phase)
    assert is_outside_compute(called(TRAIN, apply, solve, MODULE, LAYER, splu), phase)


def test_what_another_process_answers_is_waited_for() -> None:
    answer = Frame("Connection.recv", f"{PYTHON}/multiprocessing/connection.py", 249)
    queue = Frame("Queue.get", f"{PYTHON}/multiprocessing/queues.py", 103)

    assert not is_outside_compute(called(TRAIN, answer), "other")
    assert is_outside_compute(called(TRAIN, queue), "other")


@pytest.mark.parametrize(
    ("below", "told_in"),
    [
        ((DEEPCOPY, TENSOR), {"forward", "backward", "optimizer", "other", "unsettled", "validation"}),
        ((MODULE,), set()),
        ((Frame("clip_grad_norm_", f"{PACKAGES}/accelerate/accelerator.py", 1), TENSOR), set()),
        (
            (Frame("f1_score", f"{PACKAGES}/sklearn/metrics/_classification.py", 1),),
            {"forward", "backward", "optimizer", "other", "unsettled", "validation"},
        ),
        (
            (Frame("empty_cache", f"{PACKAGES}/torch/cuda/memory.py", 1),),
            {"forward", "backward", "optimizer", "other", "unsettled", "validation"},
        ),
        (
            (Frame("wrapped_func", METRIC, 699), Frame("BinaryAUROC.compute", AUROC, 125), TENSOR),
            {"forward", "backward", "optimizer", "other", "unsettled", "validation"},
        ),
        ((MODULE, Frame("Metric.forward", METRIC, 300), Frame("wrapped_func", METRIC, 560)), set()),
        ((Frame("ssim", f"{PACKAGES}/torchmetrics/functional/image/ssim.py", 9),), set()),
        ((), set()),
    ],
)
def test_the_models_own_compute_is_not_told(below: tuple[Frame, ...], told_in: set[str]) -> None:
    phases = ("data_wait", "h2d", "forward", "backward", "comm", "optimizer", "sync", "checkpoint", "compile", "gc")
    call = called(MAIN, TRAIN, *below)

    told = {each for each in (*phases, "validation", "other", "unsettled", "startup") if is_outside_compute(call, each)}

    assert told == told_in


def test_a_call_in_which_the_model_runs_spans_steps() -> None:
    assert spans_steps(called(MAIN, TRAIN, FIT, MODULE), "forward")
    assert not spans_steps(called(MAIN, TRAIN, FIT, MODULE), "other")
    assert not spans_steps(called(MAIN, TRAIN, FIT), "forward")
    assert not spans_steps(called(MAIN, TRAIN, DEEPCOPY), "forward")


def test_what_records_the_stack_of_every_operation_is_told_where_the_model_is_called() -> None:
    """`set_detect_anomaly`: each operation of the model has a line of its own."""
    records = (
        Frame("format_stack", f"{PACKAGES}/torch/fx/traceback.py", 503),
        Frame("format_list", f"{PYTHON}/traceback.py", 41),
    )

    for stack in ((MAIN, TRAIN, MODULE, LAYER, *records), (MAIN, TRAIN, *records)):
        call = called(*stack)
        assert (call.file, call.line, call.name) == (TRAIN.file, TRAIN.line, "torch.autograd.set_detect_anomaly")
        assert is_outside_compute(call, "forward")


def test_ddp_that_sends_buffers_before_forward_is_told_where_the_model_is_called() -> None:
    ddp = f"{PACKAGES}/torch/nn/parallel/distributed.py"
    forward = Frame("DistributedDataParallel.forward", ddp, 1600)
    sends = (
        Frame("DistributedDataParallel._pre_forward", ddp, 1500),
        Frame("DistributedDataParallel._sync_buffers", ddp, 2100),
        Frame("DistributedDataParallel._distributed_broadcast_coalesced", ddp, 2200),
    )

    call = called(MAIN, TRAIN, MODULE, forward, *sends)

    assert (call.line, call.name) == (TRAIN.line, "torch.nn.parallel.DistributedDataParallel._sync_buffers")
    assert is_outside_compute(call, "forward")
    assert not is_outside_compute(called(MAIN, TRAIN, MODULE, forward, MODULE), "forward")


def test_the_programs_lines_tell_what_they_call() -> None:
    update = Frame("Average.update", "/home/me/average.py", 12)

    assert lines_of_program([DEEPCOPY, update, TRAIN, FIT, MAIN]) == [
        Call(MAIN.file, MAIN.line, "train"),
        Call(TRAIN.file, TRAIN.line, "update"),
        Call(update.file, update.line),
    ]


NEXT_INDEX = Frame("_BaseDataLoaderIter._next_index", f"{PACKAGES}/torch/utils/data/dataloader.py", 720)
BATCHES = Frame("BatchSampler.__iter__", f"{PACKAGES}/torch/utils/data/sampler.py", 330)
SHUFFLED = Frame("Shuffled.__iter__", "/home/me/data.py", 44)
SHUFFLE = Frame("Random.shuffle", f"{PYTHON}/random.py", 357)


@pytest.mark.parametrize(
    ("stack", "told"),
    [
        ((MAIN, TRAIN, NEXT_INDEX, BATCHES, SHUFFLED, SHUFFLE), True),
        ((MAIN, TRAIN, BATCHES, SHUFFLED), True),
        ((MAIN, TRAIN, NEXT_INDEX, BATCHES), False),  # torch's own sampler
        ((MAIN, TRAIN, SHUFFLED, SHUFFLE), False),
        ((), False),
    ],
)
def test_a_sampler_of_the_program_is_told_from_its_dataset(stack: tuple[Frame, ...], told: bool) -> None:
    assert in_sampler(stack[::-1]) is told


HOOK = Frame("Average.on_train_batch_end", "/home/me/average.py", 20)


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ((MAIN, FIT, HOOK, TENSOR), HOOK.line),
        ((MAIN, FIT, HOOK, Frame("update", "/home/me/average.py", 9), TENSOR), HOOK.line),
        ((MAIN, HOOK, TENSOR), None),  # a loop of the program may call its steps so
        ((MAIN, FIT, Frame("Model.training_step", "/home/me/model.py", 9), TENSOR), None),
        ((MAIN, FIT, Frame("Model.on_", "/home/me/model.py", 9)), None),
        ((HOOK,), None),
        ((), None),
    ],
)
def test_a_callback_of_a_trainer_is_no_part_of_the_model(stack: tuple[Frame, ...], line: int | None) -> None:
    found = in_callback(stack[::-1])

    assert (found and (found[0].file, found[0].line, found[1])) == (line and (HOOK.file, line, HOOK.name))


def test_a_tensor_that_is_printed_computes_nothing_of_the_model() -> None:
    printed = called(MAIN, TRAIN, Frame("Tensor.__repr__", f"{PACKAGES}/torch/_tensor.py", 568))

    assert is_outside_compute(printed, "other")


FETCH = Frame("_MapDatasetFetcher.fetch", f"{PACKAGES}/torch/utils/data/_utils/fetch.py", 52)
ITEM = Frame("Images.__getitem__", "/home/me/data.py", 30)


def test_a_main_thread_that_waits_while_another_one_trains_is_noticed() -> None:
    """The phase is that of the thread that trains."""
    join = Frame("Thread.join", f"{PYTHON}/threading.py", 1112)

    assert trains_elsewhere("backward", [join, MAIN])
    assert not trains_elsewhere("forward", [join, MAIN])
    assert not trains_elsewhere("backward", [MODULE, TRAIN, MAIN])


def test_of_a_worker_what_is_below_its_fetch_is_the_programs() -> None:
    decode = Frame("decode", "/home/me/data.py", 12)

    assert below_fetch([DEEPCOPY, decode, ITEM, FETCH, MAIN]) == [DEEPCOPY, decode, ITEM]
    assert below_fetch([Frame("Queue.get", f"{PYTHON}/multiprocessing/queues.py", 113), MAIN]) is None
    assert below_fetch([FETCH, MAIN]) == []


COLLATE = f"{PACKAGES}/torch/utils/data/_utils/collate.py"
TRANSFORMERS = f"{PACKAGES}/transformers/data/data_collator.py"


@pytest.mark.parametrize(
    ("fetch", "is_told"),
    [
        ((Frame("collate_float_fn", COLLATE, 9), Frame("collate", COLLATE, 7)), True),
        ((Frame("collate.<locals>.<listcomp>", COLLATE, 8), Frame("collate", COLLATE, 7)), True),
        ((Frame("torch_default_data_collator", TRANSFORMERS, 153),), True),
        ((Frame("torch_default_data_collator", TRANSFORMERS, 149),), False),
        ((Frame("collate_tensor_fn", COLLATE, 9), Frame("collate", COLLATE, 7)), False),
        ((Frame("collate", "/home/me/collate.py", 7),), False),
        ((), False),
    ],
    ids=["numbers", "their lists", "of transformers", "tensors of transformers", "tensors", "the program's", "none"],
)
def test_what_makes_a_batch_of_lists_is_known(fetch: tuple[Frame, ...], is_told: bool) -> None:
    assert converting_lists(fetch, lambda _, line: "torch.tensor" * (line == 153)) == (fetch[0] if is_told else None)


def test_an_evaluation_that_keeps_all_logits_is_told_at_the_line_that_trains() -> None:
    """Though that line has all steps."""
    trainer = Frame("Trainer.train", f"{PACKAGES}/transformers/trainer.py", 1576)
    keeps = Frame("nested_concat", f"{PACKAGES}/transformers/trainer_pt_utils.py", 128)

    call = called(MAIN, trainer, keeps, TENSOR)

    assert (call.line, call.name) == (MAIN.line, KEEPS_LOGITS)
    assert is_outside_compute(call, "forward")
    assert not spans_steps(call, "forward")


def test_this_python_is_known() -> None:
    """Wherever it is installed."""
    for function, name in ((copy.deepcopy, "copy.deepcopy"), (json.dump, "json.dump")):
        if f"python{sys.version_info.major}.{sys.version_info.minor}" in function.__code__.co_filename:
            frame = Frame(function.__code__.co_qualname, function.__code__.co_filename, 1)
            assert called(TRAIN, frame).name == name


@given(st.lists(st.builds(Frame, st.text(), st.text(), st.integers())))
def test_any_stack_is_read(frames: list[Frame]) -> None:
    call = call_of(frames)
    lines_of_program(frames)
    in_sampler(frames)
    in_callback(frames)
    if call is not None:
        is_outside_compute(call, "other")
