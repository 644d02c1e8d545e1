"""Programs that move tensors there and back, for test_copies.py; the nursery of ranks.py forks them, see there.

`meta` is the accelerator: what is moved there is really gone; `Remote` stands for what can come back.
Not a test module.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.utils.data import DataLoader

BATCHES = 12
HELD_S = 0.002


class Remote(torch.Tensor):
    """A tensor on the accelerator that still has its values; to ask for them takes a moment."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> Remote:
        made: Remote = torch.Tensor._make_wrapper_subclass(cls, real.shape, dtype=real.dtype, device="meta")
        made.value = real
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("tolist", "numpy"):  # torch itself gives no list and no array of a tensor of another class
            time.sleep(HELD_S)
            return getattr(args[0].value, func.__name__)()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = [each.value if isinstance(each, Remote) else each for each in args]
        time.sleep(HELD_S)
        result = func(*held, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.copy_:
            return args[0]
        stays = isinstance(result, torch.Tensor) and (kwargs or {}).get("device", "meta") != torch.device("cpu")
        return Remote(result) if stays else result

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Remote({self.value})"


class Card(torch.Tensor):
    """A tensor on one of two accelerators, meta:0 and meta:1; from one to the other takes a moment."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor, device: str | torch.device) -> Card:
        made: Card = torch.Tensor._make_wrapper_subclass(cls, real.shape, dtype=real.dtype, device=device)
        made.value = real
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        time.sleep(HELD_S)
        if func.overloadpacket is torch.ops.aten._to_copy:
            return Card(args[0].value.clone(), kwargs["device"])
        assert func.overloadpacket is torch.ops.aten.copy_
        args[0].value.copy_(args[1].value)
        return args[0]


def train_with(each: Callable[[torch.Tensor, torch.Tensor], object], batches: int = BATCHES) -> None:
    """Steps on the CPU; `each` is called with every batch of 8 samples, before the forward."""
    model = ranks.a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in DataLoader(torch.utils.data.Subset(ranks.DATA, range(8 * batches)), batch_size=8):
        each(inputs, targets)
        ranks.LOSS(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def batches_go_over() -> None:
    """Each step 8 x 8 floats (256 bytes), and 8 targets (64 bytes) that are not waited for."""

    def move(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        moved = inputs.to("meta")  # inputs
        assert (moved.device.type, moved.shape, moved.dtype) == ("meta", inputs.shape, inputs.dtype)
        targets.to("meta", non_blocking=True)  # targets

    train_with(move)


def what_goes_over_is_counted_as_it_arrives() -> None:
    """Converted (128 bytes, without blocking), into a tensor that is there (256), by another's device (256)."""
    there = torch.empty(8, 8, device="meta")

    def move(inputs: torch.Tensor, _: torch.Tensor) -> None:
        inputs.to("meta", torch.float16, True, copy=True)  # converted
        there.copy_(other=inputs, non_blocking=True)  # filled
        inputs.to(there)  # like another

    train_with(move)


def what_moves_nothing() -> None:
    """Not one entry: conversions, copies within one device, tensors that are there already, a CPU's values."""
    there = torch.empty(8, 8, device="meta")

    def stay(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        inputs.to(torch.float64).to("cpu").cpu()
        there.to("meta").to(torch.float16)
        there.copy_(torch.empty(8, 8, device="meta"))
        torch.empty(8, 8).copy_(inputs)
        total = inputs.sum()
        assert float(total) == total.item() == total.tolist()
        assert bool(total == total)
        assert len(targets.nonzero()) <= len(targets.numpy())
        nn.Linear(2, 2).to(torch.float64)

    train_with(stay)


def pinned_batches() -> None:
    """A CPU without a GPU cannot pin memory; this class says that it has."""

    class Pinned(torch.Tensor):
        def is_pinned(self, *_: Any) -> bool:  # type: ignore[override]
            return True

    def move(inputs: torch.Tensor, _: torch.Tensor) -> None:
        pinned = inputs.as_subclass(Pinned)
        assert pinned.to("meta", non_blocking=True).device.type == "meta"  # pinned
        pinned.to("meta", torch.float16)  # converted on its way, through memory that is not pinned

    train_with(move)


def values_come_back() -> None:
    """Each way to ask for what is on the accelerator, once a step."""
    loss, losses = Remote(torch.tensor(0.5)), Remote(torch.tensor([0.0, 1.0, 2.0]))
    index = Remote(torch.tensor(2))

    def ask(inputs: torch.Tensor, _: torch.Tensor) -> None:
        assert loss.item() == 0.5  # item
        assert float(loss) == 0.5  # float
        assert int(index) == 2  # int
        assert [10, 11, 12][index] == 12  # index
        assert loss  # bool
        assert losses.tolist() == [0.0, 1.0, 2.0]  # tolist
        assert losses.numpy(force=True).tolist() == [0.0, 1.0, 2.0]  # numpy
        assert losses.cpu().equal(losses.value)  # cpu
        assert losses.to("cpu").equal(losses.value)  # to cpu
        assert torch.empty(3).copy_(losses).equal(losses.value)  # copied back
        assert len(losses.nonzero().value) == 2  # nonzero

    train_with(ask)


def goes_from_one_accelerator_to_the_other() -> None:
    """Each step 3 floats as a new tensor, and 5 into one that is there; what stays on one is none of the ledger's."""
    first, second = Card(torch.ones(3), "meta:0"), Card(torch.zeros(3), "meta:1")
    wide, beside, across = (Card(torch.ones(5), f"meta:{index}") for index in (0, 0, 1))

    def move(*_: torch.Tensor) -> None:
        assert first.to(second.device).device == second.device != first.device  # moved across
        across.copy_(wide)  # filled across
        beside.copy_(wide)
        assert first.to("meta:0") is first

    train_with(move)


def a_model_goes_over() -> None:
    """Two linear layers: 8*16 + 16 + 16*3 + 3 floats, as one."""
    model = ranks.a_model()
    assert model.to("meta") is model  # model
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    ranks.plain()


def builds_on_the_cpu() -> None:
    """A mask that could be made where it is needed, and a batch that could not."""

    def move(inputs: torch.Tensor, _: torch.Tensor) -> None:
        torch.ones(4, 4).to("meta")  # mask
        noise = torch.randn(8, 2)  # noise
        noise = noise.to("meta")  # noise moved
        batch = inputs * 2
        batch.to("meta")  # batch

    train_with(move)


def logs() -> None:
    """`float()` happens inside the standard library."""
    logger = logging.getLogger("of the program")
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    loss = Remote(torch.tensor(0.5))
    train_with(lambda *_: logger.warning("loss %f", loss))  # logged


class Scaler(torch.amp.GradScaler):
    """torch's own; that it finds no infinity is known on the accelerator only."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def _unscale_grads_(self, *_: Any) -> dict[torch.device, torch.Tensor]:
        return {torch.device("meta"): Remote(torch.tensor(0.0))}


def gradients_are_scaled() -> None:
    """A mixed precision step asks once whether gradients are infinite; the program asks something of its own."""
    scaler, scale = Scaler(), Remote(torch.tensor(1.0))
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight])

    def scaled(*_: Any) -> None:
        scaler.scale(weight * 2).backward()
        scaler.step(optimizer)
        scaler._per_optimizer_states.clear()  # `update` would want the values here
        assert scale.item() == 1.0  # asked by the program

    train_with(scaled)


def a_helper_thread_moves() -> None:
    """It prefetches: the copies count, and take nothing of the steps."""

    def move_aside(inputs: torch.Tensor, _: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: (inputs.to("meta"), Remote(torch.ones(())).item()))
        thread.start()
        thread.join()

    train_with(move_aside)


def a_forked_child_moves() -> None:
    def move(inputs: torch.Tensor, _: torch.Tensor) -> None:
        inputs.to("meta")

    train_with(move, 1)
    child = os.fork()
    if child == 0:
        train_with(move)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def exceptions_pass() -> None:
    """What raises has moved nothing; the program gets what it would have got."""
    there = torch.ones(3, device="meta")

    def fail(inputs: torch.Tensor, _: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"[Mm]eta tensors"):
            there.sum().item()
        with pytest.raises(NotImplementedError, match="no data"):
            there.cpu()
        with pytest.raises(RuntimeError, match="a device that is none"):
            inputs.to("a device that is none")
        with pytest.raises(TypeError):
            inputs.item(3)  # type: ignore[call-arg]
        with pytest.raises(RuntimeError):
            torch.empty(3).copy_(torch.empty(4))
        with pytest.raises(RuntimeError) as failed:
            there.sum().item()
        ours = [frame for frame in failed.traceback if "/gpulaunch/" in str(frame.path)]
        assert len(ours) == 1, "the tap"

    train_with(fail)


SEEN: list[str] = []


class Early(torch.Tensor):
    """It was there before the taps, and knows `Tensor.to` by identity."""

    KNOWN = (torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.item)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.KNOWN:
            SEEN.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def classes_with_a_dispatch_of_their_own() -> None:
    """Each call comes to them once, as the function that they know."""

    class Late(torch.Tensor):
        KNOWN = (torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.item)

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in cls.KNOWN:
                SEEN.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    for kind in (Early, Late):
        SEEN.clear()
        tensor = torch.ones(2).as_subclass(kind)
        assert type(tensor.to(torch.float64)) is kind
        assert type(tensor.to("cpu", torch.float64)) is kind
        tensor.sum().item()
        torch.zeros(2).copy_(tensor)
        assert SEEN == ["to", "to", "item", "copy_"], (kind, SEEN)
    lazy = nn.LazyLinear(4).to("meta").to("meta")
    assert lazy.weight.device.type == "meta"
    assert nn.LazyLinear(4).to(torch.float64)(torch.ones(2, 3, dtype=torch.float64)).shape == (2, 4)


def what_torch_looks_like() -> None:
    """What programs ask of the methods is answered as ever."""
    assert pickle.loads(pickle.dumps(torch.Tensor.to)) is torch.Tensor.to
    assert torch.Tensor.item.__name__ == "item"
    assert "dtype" in (torch.Tensor.to.__doc__ or "")
    assert torch.Tensor.to(torch.ones(2), torch.float64).dtype is torch.float64
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"
    torch.set_default_device("meta")
    assert torch.zeros(2).device.type == "meta"
    torch.set_default_device("cpu")
    copied = torch.ones(2, requires_grad=True)
    copied.to(torch.float64).sum().backward()
    assert copied.grad is not None
    for name in ("to", "item", "copy_", "__bool__"):
        method = getattr(torch.Tensor, name)
        assert torch.overrides.is_tensor_method_or_property(method)
        assert torch.overrides.resolve_name(method) == f"torch.Tensor.{name}"


class Fills(nn.Module):
    """Keeps the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        filled: torch.Tensor = self.kept.copy_(inputs)
        return filled + inputs


def is_traced_symbolically() -> None:
    """torch.fx writes a call of a tap down as one of the method."""
    traced = torch.fx.symbolic_trace(Fills())
    assert [node.op for node in traced.graph.nodes] == [
        *("placeholder", "get_attr"),
        *("call_method", "call_function", "output"),
    ]
    assert traced(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


def an_alarm_goes_off() -> None:
    """In the middle of our own work, as it may: what the program's handler raises is for the program."""
    from gpulaunch.profiler.probe import transfers

    class Alarm:
        def rings(self, *_: Any) -> None:
            raise TimeoutError("it takes too long")

    signal.signal(signal.SIGALRM, Alarm().rings)
    caller = transfers.caller
    rang = 0

    def move(inputs: torch.Tensor, _: torch.Tensor) -> None:
        nonlocal rang
        transfers.caller = lambda *_: signal.raise_signal(signal.SIGALRM)
        for ask in (lambda: inputs.to("meta"), lambda: Remote(torch.tensor(2.0)).item()):
            with pytest.raises(TimeoutError, match="it takes too long"):
                ask()
            rang += 1
        transfers.caller = caller
        inputs.to("meta")  # goes on

    train_with(move)
    assert rang == 2 * BATCHES


def comes_out_of_a_pipe() -> None:
    """A program whose text nobody can read a second time: whoever tries waits for ever."""
    path = os.path.join(os.environ["GPULAUNCH_CHANNEL_DIR"], "program")
    os.mkfifo(path)
    code = compile("moved = torch.ones(3).to('meta')", path, "exec")

    def move(*_: Any) -> None:
        exec(code, {"__name__": "__main__", "torch": torch})

    train_with(move)


def the_ledger_breaks() -> None:
    """Our own fault, after 6 steps: training goes on, and so does the rest of the probe."""
    from gpulaunch.profiler.probe import transfers

    steps = 0

    def move(inputs: torch.Tensor, _: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        if steps == 7:
            transfers.caller = None  # type: ignore[assignment]
        assert inputs.to("meta").device.type == "meta"
        assert Remote(torch.tensor(2.0)).item() == 2.0

    train_with(move)


class Event:
    """A CUDA event of a GPU that does everything at once."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ns = 0

    def record(self) -> None:
        self.at_ns = time.monotonic_ns()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end.at_ns - self.at_ns) / 1e6


def a_gpu_is_timed() -> None:
    """36 steps with a stand-in at the boundary of torch.cuda; one in 16 is timed."""
    cuda: Any = torch.cuda
    cuda.is_initialized = lambda: True
    cuda.current_device = lambda: 0
    cuda.is_current_stream_capturing = lambda: False
    cuda.memory_stats_as_nested_dict = lambda: {
        **{f"{name}_bytes": {"all": {"current": 1, "peak": 2}} for name in ("allocated", "reserved", "active")},
        "inactive_split_bytes": {"all": {"current": 3}},
        "num_alloc_retries": 4,
        "num_ooms": 5,
    }
    cuda.host_memory_stats_as_nested_dict = dict
    cuda.get_device_properties = lambda _: type("Properties", (), {"name": "a GPU", "major": 9, "minor": 0})
    cuda.Event = Event

    def move(inputs: torch.Tensor, _: torch.Tensor) -> None:
        inputs.to("meta")  # timed
        inputs.to(torch.float64)

    for _ in range(3):
        train_with(move)


def stand_in_for_a_gpu() -> None:
    """What needs a GPU takes a moment instead; done before the fork, for what is there when the taps are placed."""
    for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream, torch.accelerator):
        owner.synchronize = lambda *_: time.sleep(HELD_S)


def waits_for_the_gpu() -> None:
    """What synchronizes."""

    def wait(*_: Any) -> None:
        torch.cuda.synchronize()  # synchronize
        torch.cuda.Event.synchronize(None)  # type: ignore[arg-type]
        torch.cuda.Stream.synchronize(None)  # type: ignore[arg-type]
        torch.accelerator.synchronize()

    train_with(wait)


def nothing_is_tapped() -> None:
    """A machine without an accelerator: torch is as it was."""
    assert what_is_tapped() == set()
    ranks.plain()


def what_is_tapped() -> set[str]:
    names = ("to", "cuda", "cpu", "copy_", "item", "tolist", "numpy", "nonzero", "pin_memory", "__bool__")
    tapped = {name for name in names if name in vars(torch.Tensor)}
    tapped |= {f"Module.{name}" for name in ("to", "cuda", "cpu") if "tap" in vars(nn.Module)[name].__code__.co_name}
    return tapped


def ledger_taps_come_out() -> None:
    """All of them, and also where one of them could not be placed."""
    from gpulaunch.profiler.probe import copies, inject

    probe: Any = inject.current()
    os.environ["GPULAUNCH_DEVICE_TYPES"] = "meta"
    undo: list[Callable[[], None]] = []
    copies.install(probe, torch, undo)
    assert len(what_is_tapped()) == 13
    while undo:
        undo.pop()()
    assert what_is_tapped() == set()

    synchronize = torch.cuda.synchronize
    del torch.cuda.synchronize
    with pytest.raises(AttributeError, match="synchronize"):
        copies.install(probe, torch, undo)
    while undo:
        undo.pop()()
    torch.cuda.synchronize = synchronize
    assert what_is_tapped() == set()
    ranks.plain()


def a_hundred_thousand_copies() -> None:
    """Not a block of memory stays behind."""
    batch = torch.ones(2)
    blocks: list[int] = []
    for _ in range(5):
        for _ in range(20_000):
            batch.to("meta", non_blocking=True)
        blocks.append(sys.getallocatedblocks())
    assert blocks[-1] - blocks[0] < 100, blocks
    ranks.plain()


if __name__ == "__main__":
    stand_in_for_a_gpu()
    # Somebody has asked what the methods of tensors are before there are taps; the answer is kept.
    torch.overrides.is_tensor_method_or_property(torch.Tensor.add)
    vars(ranks).update({name: thing for name, thing in list(globals().items()) if inspect.isfunction(thing)})
    if len(sys.argv) > 1:
        sys.exit(ranks.run(sys.argv[1]))
    ranks.nursery()
