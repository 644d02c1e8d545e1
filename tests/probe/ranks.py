"""Training programs to observe, and the nursery that runs them: torch is imported once, each program is a forked rank.

The ranks come into being as gpulaunch's own do: torch is there before the fork, the environment is set after it, then
`arm`. Not a test module: `python ranks.py` reads lines of program, directory, environment; it answers with exit codes.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

import led_loops
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from toy_model import DATA, LOSS, a_model, train


def plain() -> None:
    """12 steps of 8 samples."""
    train(a_model(), DataLoader(DATA, batch_size=8))


def many_batches(batches: int) -> DataLoader[Any]:
    """An epoch of so many batches of 8."""
    sampler = torch.utils.data.RandomSampler(DATA, replacement=True, num_samples=8 * batches)
    return DataLoader(DATA, batch_size=8, sampler=sampler)


def many_steps() -> None:
    """2 000 steps of 8 samples."""
    train(a_model(), many_batches(2_000))


def steps_seen_from_beside() -> None:
    """After each of 60 steps somebody looks at the page, as the agent and the sidecar do."""
    from gpulaunch.profiler.channel import segment
    from gpulaunch.profiler.channel.layout import Region

    path = os.path.join(os.environ["GPULAUNCH_CHANNEL_DIR"], "rank-3.bin")
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    behind = []
    for number, (inputs, targets) in enumerate(many_batches(60), 1):
        assert segment.read(path).region is Region.FORWARD
        loss = LOSS(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        assert segment.read(path).region is Region.STEPPING
        optimizer.step()
        seen = segment.read(path)
        assert (seen.steps_made, seen.region) == (number, Region.OTHER)
        assert sum(seen.phase_ns.values()) == seen.step_ns_total
        behind.append(number - seen.steps)
    assert 0 < max(behind) < 8
    assert behind[:8] == [0] * 8, "what the edges of steps are is not known yet"


def late_steps_seen_from_beside() -> None:
    """Steps that take longer than anybody should wait for their times."""
    from gpulaunch.profiler.channel import segment

    path = os.path.join(os.environ["GPULAUNCH_CHANNEL_DIR"], "rank-3.bin")
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(many_batches(14), 1):
        LOSS(model(inputs), targets).backward()
        if number > 10:
            time.sleep(0.26)
        optimizer.step()
        seen = segment.read(path)
        assert (seen.steps, seen.steps_made) == (number, number) or number <= 10


def scores_with_gradients_on() -> None:
    """Trains, and then looks at batches for more than a second, and never at their gradients."""
    from gpulaunch.profiler.probe.inject import current

    train(a_model(), many_batches(40))
    probe = current()
    assert probe is not None
    assert probe.pivot
    taken_up = notes = 0
    until_s = time.monotonic() + 1.2
    while time.monotonic() < until_s:
        for _ in many_batches(50):
            taken_up += len(probe.machine.notes) < notes
            notes = len(probe.machine.notes)
    assert taken_up >= 2


def observe_one_of(blocks: int) -> None:
    """Have one of so many blocks of steps observed, as if all of them were past the budget."""
    from gpulaunch.profiler.probe.inject import current

    probe = current()
    assert probe is not None
    probe.unobserved.observe_one_of(blocks)


def many_steps_some_unobserved() -> None:
    observe_one_of(4)
    train(a_model(), many_batches(2_000))


def many_steps_past_the_budget() -> None:
    """No time is given to a short program; after every 300 steps the model is looked at."""
    from gpulaunch.profiler.probe import budget, observed

    observed.LOOKS_EVERY_NS = 0
    budget.WINDOW_NS, budget.PATIENCE = 50_000_000, 1
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (inputs, targets) in enumerate(many_batches(2_500), 1):
        LOSS(model(inputs), targets).backward()
        optimizer.step()
        if number % 300 == 0:
            with torch.no_grad():
                for inputs, _ in DataLoader(DATA, batch_size=48):
                    model(inputs)


def many_steps_without_an_optimizer() -> None:
    """Steps end with each backward: the end of one that is not observed would not be seen."""
    observe_one_of(4)
    model = a_model()
    for inputs, targets in many_batches(2_000):
        LOSS(model(inputs), targets).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


class Hooked(torch.optim.Adam):
    """Its base class is hooked as well, once somebody has made one of those: each step is told twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def many_steps_told_twice() -> None:
    observe_one_of(4)
    model = a_model()
    torch.optim.Adam(model.parameters())
    train(model, many_batches(2_000), Hooked(model.parameters()))


def many_optimizers() -> None:
    """A new one every 90 steps."""
    observe_one_of(4)
    model = a_model()
    for number, (inputs, targets) in enumerate(many_batches(2_000)):
        if number % 90 == 0:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        LOSS(model(inputs), targets).backward()
        optimizer.step()


def many_steps_left() -> None:
    """The loop is left in the middle of unobserved steps, and the program ends."""
    observe_one_of(4)
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(many_batches(2_000), 1):
        LOSS(model(inputs), targets).backward()
        optimizer.step()
        if number == 268:
            break


def interrupted() -> None:
    """A handler of the program's raises every half millisecond, wherever the program is; each time it is heard of."""
    raised = caught = ignored = 0
    where: list[str] = []

    def in_a_finalizer(_: object) -> None:
        nonlocal ignored
        ignored += 1

    def ring(_: int, frame: FrameType | None) -> None:
        nonlocal raised
        raised += 1
        where[:] = traceback.format_stack(frame)
        raise TimeoutError

    gc.disable()
    sys.unraisablehook = in_a_finalizer  # there an exception has nowhere to go
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, DataLoader(DATA, batch_size=8), optimizer)  # torch imports what it needs, and swallows what goes wrong
    signal.signal(signal.SIGALRM, ring)
    while raised < 500:
        torch.set_grad_enabled(True)  # which an optimizer that was interrupted has switched off
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)  # once
            for _ in range(50):
                for inputs, targets in DataLoader(DATA, batch_size=8):
                    optimizer.zero_grad()
                    LOSS(model(inputs), targets).backward()
                    optimizer.step()
        except TimeoutError:
            caught += 1
        assert caught + ignored == raised, f"swallowed here:\n{''.join(where)}"


def many_steps_marked() -> None:
    """The user says where steps end."""
    from gpulaunch import mark

    observe_one_of(4)
    model = a_model()
    for inputs, targets in many_batches(2_000):
        LOSS(model(inputs), targets).backward()
        mark.step()


def many_steps_and_evaluations() -> None:
    """After every 11 steps the model is looked at, and every 50 it is saved."""
    observe_one_of(4)
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (inputs, targets) in enumerate(many_batches(2_000), 1):
        LOSS(model(inputs), targets).backward()
        optimizer.step()
        if number % 11 == 0:
            with torch.no_grad():
                for inputs, _ in DataLoader(DATA, batch_size=48):
                    time.sleep(0.001)
                    model(inputs)
        if number % 50 == 0:
            torch.save(model.state_dict(), os.devnull)


def fork_workers() -> None:
    train(a_model(), DataLoader(DATA, batch_size=8, num_workers=2, multiprocessing_context="fork"))


def spawn_workers() -> None:
    """Spawned workers import torch in the rank's environment, and so call `arm`."""
    train(a_model(), DataLoader(DATA, batch_size=8, num_workers=2, multiprocessing_context="spawn"))


def late_batch() -> None:
    """The third batch is late: the fourth is there, and waits for it while the loop asks for it."""
    may_go_on = multiprocessing.get_context("fork").Event()

    class Late(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 2:
                may_go_on.wait(60)
            return torch.zeros(4)

    loader = DataLoader(
        Late(), batch_size=1, num_workers=2, multiprocessing_context="fork", prefetch_factor=3, timeout=2
    )
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    time.sleep(0.02)  # the queue is read at most once in 10 ms
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)  # receives the fourth, which it cannot hand out
    threading.Timer(0.3, may_go_on.set).start()  # when the next has been asked for, or there is nothing that waits
    next(iterator)


def ddp() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    train(nn.parallel.DistributedDataParallel(a_model()), DataLoader(DATA, batch_size=8))


def accumulation_and_validation() -> None:
    """6 steps of 2 micro-steps; a validation pass of 12 batches in between."""
    model, loader = a_model(), DataLoader(DATA, batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters())
    for index, (inputs, targets) in enumerate(loader):
        (LOSS(model(inputs), targets) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
        if index == 5:
            with torch.no_grad():
                for validation_inputs, _ in loader:
                    model(validation_inputs)


def checkpoint_and_penalty() -> None:
    """Autograd within autograd, and a gradient within the forward: 5 steps, 5 micro-steps."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        inputs = torch.randn(8, 8, requires_grad=True)
        outputs = torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=True)
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        (outputs.sum() + slope.pow(2).sum()).backward()
        optimizer.step()


def lbfgs() -> None:
    """3 steps, each with many evaluations."""
    model = a_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    inputs, targets = DATA[:]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = LOSS(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def dataset_raises() -> None:
    """An exception of the user's goes through the tap as it is; the loop goes on and 12 more steps are counted."""

    class Broken(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> torch.Tensor:
            raise KeyError("sample 0 is broken")

    with pytest.raises(KeyError, match="sample 0 is broken"):
        next(iter(DataLoader(Broken())))
    plain()


def two_threads() -> None:
    """Two loops at once: the first one counts, the other's 12 steps do not."""
    plain()
    thread = threading.Thread(target=plain)
    thread.start()
    thread.join()


def trains_elsewhere_later() -> None:
    """One step to see whether it works, and the rest of it in a thread, while this one waits; some are bare there."""
    train(a_model(), many_batches(1))
    time.sleep(2.5)
    thread = threading.Thread(target=train, args=(a_model(), many_batches(600)))
    thread.start()
    thread.join()


def each_epoch_in_a_thread() -> None:
    """A thread for each epoch, and time for its first steps to be missed: the one before has ended."""
    for _ in range(3):
        thread = threading.Thread(target=train, args=(a_model(), many_batches(200)))
        thread.start()
        thread.join()
        time.sleep(0.1)


class StepsElsewhere(torch.autograd.Function):
    """For longer than a thread may be quiet, another one steps while this one is in its backward, as on a GPU."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        optimizer = torch.optim.SGD(a_model().parameters(), lr=0.1)

        def step() -> None:
            time.sleep(2.2)
            optimizer.step()
            optimizer.step()

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        return gradient


def hooks_step_elsewhere() -> None:
    """A step whose backward has another thread step optimizers, and 11 without."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(many_batches(12)):
        scores = model(inputs)
        LOSS(StepsElsewhere.apply(scores) if not number else scores, targets).backward()
        optimizer.step()


def trains_elsewhere_from_a_bare_step_on() -> None:
    """The thread that trains stops within a bare block; another goes on with the same optimizer."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def steps(number: int) -> None:
        for inputs, targets in many_batches(number):
            LOSS(model(inputs), targets).backward()
            optimizer.step()

    steps(268)
    time.sleep(2.5)
    thread = threading.Thread(target=steps, args=(300,))
    thread.start()
    thread.join()


def helper_thread_reads_for_long() -> None:
    """A background prefetcher reads ahead all the time; its queue is what the main thread waits for."""
    batches: queue.Queue[Any] = queue.Queue(4)

    def read() -> None:
        for batch in many_batches(200):
            batches.put(batch)
        batches.put(None)

    thread = threading.Thread(target=read)
    thread.start()
    train(a_model(), iter(batches.get, None))
    thread.join()


def helper_thread_reads() -> None:
    """A background prefetcher reads the loader; the main thread trains."""
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.extend(DataLoader(DATA, batch_size=8)))
    thread.start()
    thread.join()
    train(a_model(), batches)


def forked_child_trains() -> None:
    """24 steps here; what a child that the user forks does is not the rank's."""
    model, loader = a_model(), DataLoader(DATA, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, loader, optimizer)
    child = os.fork()
    if child == 0:
        plain()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    train(model, loader, optimizer)


def subprocess_trains() -> None:
    """12 steps here; a program that the rank starts has its environment, and is not the rank."""
    plain()
    subprocess.run([sys.executable, __file__, "plain"], check=True)


def armed_again() -> None:
    """Calling `arm` once more, as a second import of torch would, changes nothing."""
    from gpulaunch.profiler.probe.inject import arm

    arm()
    plain()


def looks_where_it_is() -> None:
    """Two steps and a validation batch that read their own page wherever user code runs."""
    from gpulaunch.profiler.channel import segment

    path = f"{os.environ['GPULAUNCH_CHANNEL_DIR']}/rank-{os.environ['RANK']}.bin"
    seen: list[str] = []

    def look(*_: Any) -> None:
        at = segment.read(path)
        assert 0 <= time.monotonic_ns() - at.last_edge_ns < 60 * 10**9
        seen.append(at.region.name)

    class Looking(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            look()
            return torch.ones(8)

    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in DataLoader(Looking(), batch_size=1):
        outputs = model(inputs)
        look()
        outputs.register_hook(look)
        outputs.sum().backward()
        look()
        optimizer.step(look)  # as its closure
        look()
    with torch.no_grad():
        next(iter(DataLoader(Looking(), batch_size=1)))
        look()
    step = ["LOADER", "FORWARD", "BACKWARD", "STEPPING", "OPTIMIZER", "OTHER"]
    assert seen == [*step, *step, "LOADER", "VALIDATION"], seen


def saves_and_resumes() -> None:
    """What gpulaunch.checkpoint tells of itself."""
    from gpulaunch.profiler.probe import progress

    progress.listens()
    progress.resumed(40)
    plain()
    progress.checkpoint_began()
    progress.checkpoint_saved(step=52, captured_ns=time.monotonic_ns(), stall_ns=7_000, size_bytes=100)


def marks() -> None:
    """4 steps as the user sees them, each with 10 ms of reading by hand."""
    from gpulaunch import mark

    model = a_model()
    for index in range(4):
        with mark.phase("data_wait"):
            time.sleep(0.01)
        LOSS(model(torch.randn(8, 8)), torch.zeros(8, dtype=torch.long)).backward()
        mark.note(f"step {index}")
        mark.step()


def looks_in_vain() -> None:
    """A batch that cannot be looked into: samples are not counted, everything else is."""

    class Stubborn(list[Any]):
        def __iter__(self) -> Any:
            raise RuntimeError("do not look")

    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(DATA, batch_size=8, collate_fn=Stubborn):
        inputs, targets = (torch.stack([batch[index][part] for index in range(8)]) for part in (0, 1))
        LOSS(model(inputs), targets).backward()
        optimizer.step()


def probe_breaks() -> None:
    """Our own fault, after 6 steps: training goes on."""
    from gpulaunch.profiler.probe import inject

    model, loader = a_model(), DataLoader(DATA, batch_size=16)
    train(model, loader)
    probe: Any = inject.current()
    probe.machine.totals = None
    train(model, loader)


def run(program: str) -> int:
    """Run a program as the rank that the environment names; its exit code."""
    from gpulaunch.profiler.probe.inject import arm

    try:
        torch.set_num_threads(1)  # not before the fork: several autograd threads may then find no thread pool
        arm()
        (globals() | vars(led_loops))[program]()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def nursery() -> None:
    for line in sys.stdin:
        program, directory, extra = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            out = os.open(f"{directory}/out", os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ.update(RANK="3", LOCAL_RANK="1", GPULAUNCH_CHANNEL_DIR=directory)
            os.environ.update(pair.split("=", 1) for pair in extra.split())
            code = run(program)
            atexit._run_exitfuncs()  # a rank ends so too: what multiprocessing holds is let go
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run(sys.argv[1]))
    nursery()
