"""More programs for `ranks`: whoever leads the loop, and what lies inside its steps."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from toy_model import DATA, LOSS, a_model, train


def tells_its_own_time() -> None:
    """12 steps of about 100 ms, and what they took by the program's own clock."""
    from gpulaunch import mark

    model, loader = a_model(), iter(DataLoader(DATA, batch_size=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began_ns = time.monotonic_ns()
    for inputs, targets in loader:
        loss = LOSS(model(inputs), targets)
        time.sleep(0.05)
        loss.backward()
        time.sleep(0.05)
        optimizer.step()
        ended_ns = time.monotonic_ns()
    mark.note(str(ended_ns - began_ns))


def gan() -> None:
    """12 steps of two optimizers."""
    generator, critic = a_model(), nn.Linear(3, 1)
    fools = torch.optim.Adam(generator.parameters())
    judges = torch.optim.Adam(critic.parameters())
    for inputs, _ in DataLoader(DATA, batch_size=8):
        judges.zero_grad()
        critic(generator(inputs).detach()).mean().backward()
        judges.step()
        fools.zero_grad()
        (-critic(generator(inputs)).mean()).backward()
        fools.step()


def amp_skips_steps() -> None:
    """9 steps and 3 that GradScaler leaves out, for gradients that are not finite."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for index, (inputs, targets) in enumerate(DataLoader(DATA, batch_size=8)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = LOSS(model(inputs), targets)
        if index % 4 == 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def no_optimizer() -> None:
    """100 steps whose parameters are updated by hand."""
    model = a_model()
    for _ in range(100):
        LOSS(model(torch.randn(8, 8)), torch.zeros(8, dtype=torch.long)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def compiled(backend: str) -> None:
    """24 steps, the first of which compiles."""
    model = torch.compile(a_model(), backend=backend)
    train(model, DataLoader(DATA, batch_size=8), epochs=2)


def compiled_eager() -> None:
    compiled("eager")


def compiled_inductor() -> None:
    compiled("inductor")


def collects_garbage() -> None:
    """12 steps, each with a collection of 10 ms in its forward."""

    class Slow:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(0.01)

    model, loader = a_model(), DataLoader(DATA, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in loader:
        loss = LOSS(model(inputs), targets)
        Slow()
        gc.collect()
        loss.backward()
        optimizer.step()


class SlowToSave:
    """A part of a model's state that takes 10 ms to be written."""

    def __reduce__(self) -> tuple[type[SlowToSave], tuple[()]]:
        time.sleep(0.01)
        return SlowToSave, ()


def saves_now_and_then() -> None:
    """12 steps; 2 saves of at least 10 ms on the training thread, and one on another."""
    model, loader = a_model(), DataLoader(DATA, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, (inputs, targets) in enumerate(loader):
        if index in (4, 8):
            torch.save([model.state_dict(), SlowToSave()], io.BytesIO())
        if index == 9:
            thread = threading.Thread(target=torch.save, args=(SlowToSave(), io.BytesIO()))
            thread.start()
            thread.join()
        LOSS(model(inputs), targets).backward()
        optimizer.step()


def saves_distributed() -> None:
    """12 steps, two of which save by torch.distributed.checkpoint, once behind the loop's back."""
    import torch.distributed.checkpoint as dcp

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model, loader = a_model(), DataLoader(DATA, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    behind: Any = None
    for index, (inputs, targets) in enumerate(loader):
        if index == 4:
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"{os.environ['GPULAUNCH_CHANNEL_DIR']}/saved")
        if index == 8:
            to = f"{os.environ['GPULAUNCH_CHANNEL_DIR']}/saved-behind"
            behind = dcp.async_save({"model": model.state_dict()}, checkpoint_id=to)
        LOSS(model(inputs), targets).backward()
        optimizer.step()
    behind.result()


def with_a_peer(of_rank: Callable[[], None], of_peer: Callable[[], None]) -> None:
    """Run as two ranks of a job, of which the second is forked and not observed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"{os.environ['GPULAUNCH_CHANNEL_DIR']}/store"
    child = os.fork()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, 2), rank=int(child == 0), world_size=2
    )
    if child == 0:
        code = 1
        try:
            of_peer()
            code = 0
        finally:
            os._exit(code)
    of_rank()
    assert os.waitpid(child, 0)[1] == 0


def waits_for_others() -> None:
    """12 steps; in each the other rank is 10 ms late, by turns to a blocking collective and to one that is awaited."""

    def late() -> None:
        value = torch.zeros(4)
        for _ in range(12):
            torch.distributed.barrier()
            time.sleep(0.01)
            torch.distributed.all_reduce(value)

    def waiting() -> None:
        model, value = a_model(), torch.zeros(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(12):
            LOSS(model(torch.randn(8, 8)), torch.zeros(8, dtype=torch.long)).backward()
            torch.distributed.barrier()
            work = torch.distributed.all_reduce(value, async_op=bool(index % 2))
            if work is not None:
                work.wait()
            optimizer.step()

    with_a_peer(waiting, late)


def ddp_waits_for_others() -> None:
    """80 steps of DDP whose other rank comes 20 ms later to each backward. The flight recorder is asked each second,
    were a first look at it, in which this rank had lost its core, ever so dear."""
    from gpulaunch.profiler.probe import recorder

    recorder.PAUSE_PER_QUERY = 0  # type: ignore[misc]

    def loop(late_s: float) -> None:
        model = nn.parallel.DistributedDataParallel(a_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(80):
            loss = LOSS(model(torch.randn(8, 8)), torch.zeros(8, dtype=torch.long))
            time.sleep(late_s)
            loss.backward()
            optimizer.step()

    with_a_peer(lambda: loop(0.0), lambda: loop(0.02))


def ddp_accumulates() -> None:
    """120 steps of three backward passes, which all reduce the gradients, and then the program does so again. The log
    has one iteration in a hundred, so it is read more often than it need be."""
    from gpulaunch.profiler.probe import observed

    observed.LOOKS_EVERY_NS = 20_000_000  # type: ignore[misc]

    def loop() -> None:
        model = nn.parallel.DistributedDataParallel(a_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(120):
            for _ in range(3):
                LOSS(model(torch.randn(8, 8)), torch.zeros(8, dtype=torch.long)).backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)
            optimizer.step()
            time.sleep(0.005)

    with_a_peer(loop, loop)


def ddp_searches() -> None:
    """250 steps with find_unused_parameters=True, in which both ranks use all parameters; or the other rank leaves a
    layer out in each fiftieth step, if SKIPS is set."""
    from gpulaunch.profiler.probe import observed

    observed.LOOKS_EVERY_NS = 20_000_000  # type: ignore[misc]

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, skips: bool) -> torch.Tensor:
            return self.body(x) if skips else self.head(self.body(x))

    def loop(*, skips_some: bool = False) -> None:
        model = nn.parallel.DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(250):
            skips = skips_some and step % 50 == 10
            LOSS(model(torch.randn(8, 8), skips=skips), torch.zeros(8, dtype=torch.long)).backward()
            optimizer.step()
            time.sleep(0.001)

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where torch warns that the first search was in vain
    with_a_peer(loop, functools.partial(loop, skips_some=bool(os.environ["SKIPS"])))


def taps_come_out() -> None:
    """A second set of taps on top of this rank's own is put in and taken out: torch is as it was before."""
    import torch._dynamo

    from gpulaunch.profiler.probe import inject
    from gpulaunch.profiler.probe.hooks import Hooks

    c10d, handler = torch.distributed.distributed_c10d, torch._dynamo.callback.callback_handler
    owners = (
        *((torch, "save"), (torch.serialization, "save"), (torch.distributed, "all_reduce"), (c10d, "all_reduce")),
        *((c10d, "barrier"), (c10d.Work, "wait"), (nn.parallel.DistributedDataParallel, "__init__")),
        *((torch.autograd, "_engine_run_backward"), (torch.autograd.graph, "_engine_run_backward")),
        (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
    )

    def taps() -> list[object]:
        return [vars(owner)[name] for owner, name in owners]

    def callbacks() -> tuple[int, int, int]:
        return len(gc.callbacks), len(handler.start_callbacks), len(handler.end_callbacks)

    probe: Any = inject.current()
    before = taps(), callbacks()
    hooks = Hooks(probe, torch)
    hooks.install()
    assert not any(one is other for one, other in zip(taps(), before[0], strict=True))
    assert callbacks() == tuple(count + 1 for count in before[1])
    hooks.remove()
    assert (taps(), callbacks()) == before


class Broken:
    """Cannot be saved."""

    def __reduce__(self) -> str:
        raise KeyError("not to be saved")


def taps_are_not_noticed() -> None:
    """What is tapped looks, calls and fails as it does without a tap."""
    assert torch.save is torch.serialization.save
    assert torch.distributed.all_reduce is torch.distributed.distributed_c10d.all_reduce
    for tapped in (torch.save, torch.distributed.all_reduce, nn.parallel.DistributedDataParallel.__init__):
        assert inspect.signature(tapped) == inspect.signature(inspect.unwrap(tapped))
        assert tapped.__doc__ == inspect.unwrap(tapped).__doc__
    assert pickle.loads(pickle.dumps((torch.save, torch.distributed.barrier)))[0] is torch.save

    model, loader = a_model(), DataLoader(DATA, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, loader, optimizer)
    with pytest.raises(KeyError, match="not to be saved"):
        torch.save(Broken(), io.BytesIO())
    with pytest.raises(ValueError, match="process group has not been initialized"):
        torch.distributed.all_reduce(torch.zeros(1))
    train(model, loader, optimizer)
