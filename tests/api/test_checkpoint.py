"""One process and what it saves: states, mistakes of use, full disks, notices."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from gpulaunch.checkpoint import Checkpoint, CheckpointError, Preempted
from gpulaunch.launcher.checkpoint.manifest import MANIFEST, read, verify
from gpulaunch.profiler.channel.control import ControlWriter

pytestmark = pytest.mark.torch


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)
        self.last.weight.requires_grad_(False)  # a frozen one
        self.unused = nn.Parameter(torch.zeros(2))  # one that never gets a gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.1),
    "adamw, groups": lambda net: torch.optim.AdamW(
        [
            {"params": [net.unused, *net.first.parameters()], "lr": 0.1},
            {"params": [*net.norm.parameters(), *net.last.parameters()], "lr": torch.tensor(0.2)},
        ]
    ),
    "two": lambda net: [
        torch.optim.Adam(net.first.parameters(), lr=0.1),
        torch.optim.SGD(net.last.parameters(), lr=0.1),
    ],
    "lbfgs": lambda net: torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=3),
}


class Program:
    """A small training program: its losses are its history."""

    def __init__(self, directory: Path, kind: str = "adamw", **options: object) -> None:
        torch.manual_seed(1)
        self.net = Net()
        optimizers = OPTIMIZERS[kind](self.net)
        self.optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.noise = torch.Generator().manual_seed(4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], 20)
        self.ckpt = Checkpoint(
            model=self.net,
            optimizer=optimizers,
            scheduler=self.scheduler,
            dir=directory,
            extra={"average": self.average},
            per_rank={"noise": self.noise},
            **options,
        )
        self.history: dict[int, tuple[str, str, float]] = {}

    def run(self, steps: int, **at_step: object) -> Program:
        self.ckpt.resume()
        return self.go_on(steps, **at_step)

    def go_on(self, steps: int, save_at: int = 0) -> Program:
        for step in self.ckpt.steps(steps):
            inputs = torch.rand(5, 3) + torch.rand(5, 3, generator=self.noise)

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                loss = self.net(inputs).square().mean()
                loss.backward()
                return loss

            losses = [optimizer.step(closure) for optimizer in self.optimizers]
            self.scheduler.step()
            self.average.update_parameters(self.net)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            averaged = sum(p.double().sum().item() for p in self.average.parameters())
            self.history[step] = (losses[-1].item().hex(), averaged.hex(), self.scheduler.get_last_lr()[0])
            self.ckpt.step(save=step == save_at)
        return self


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_bit_comes_back(kind: str, tmp_path: Path) -> None:
    """Model, buffers, every optimizer's state, the scheduler, an average of the weights, a generator."""
    undisturbed = Program(tmp_path / "undisturbed", kind).run(9).history

    Program(tmp_path / "stopped", kind).run(4)
    resumed = Program(tmp_path / "stopped", kind).run(9).history

    assert resumed == {step: seen for step, seen in undisturbed.items() if step > 4}


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """An optimizer that has no state yet is not stepped so that it has some."""
    stepped: list[int] = []
    program = Program(tmp_path)
    program.optimizers[0].register_step_post_hook(lambda *_: stepped.append(1))
    program.ckpt.resume()

    for _ in program.ckpt.steps(3):
        program.ckpt.step(save=True)
    again = Program(tmp_path)
    again.optimizers[0].register_step_post_hook(lambda *_: stepped.append(1))
    again.ckpt.resume()

    assert stepped == []
    assert len(program.optimizers[0].state) == len(again.optimizers[0].state) == 0
    assert all(p.grad is None for p in [*program.net.parameters(), *again.net.parameters()])


def test_what_is_saved_is_what_was_there_at_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that training changes while the save is under way are not the ones in it."""
    from gpulaunch.checkpoint import saver

    go = threading.Event()
    write = saver.save_tensors
    monkeypatch.setattr(saver, "save_tensors", lambda *args, **kwargs: (go.wait(30), write(*args, **kwargs)))
    program = Program(tmp_path / "a")
    program.ckpt.resume()
    for step in program.ckpt.steps(6):
        with torch.no_grad():
            program.net.first.weight.fill_(step)
        if step == 5:
            go.set()
        program.ckpt.step(save=step == 2)
    os.rename(tmp_path / "a" / "step-000000000006", tmp_path / "elsewhere")

    again = Program(tmp_path / "a")

    assert again.ckpt.resume() == 2
    assert again.net.first.weight.eq(2).all()


def test_a_checkpoint_is_plain_torch_distributed_checkpoint_too(tmp_path: Path) -> None:
    """Whoever leaves gpulaunch reads the weights with torch alone."""
    import torch.distributed.checkpoint as dcp

    program = Program(tmp_path).run(2)
    state = {"model": Net().state_dict()}

    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=str(tmp_path / "step-000000000002"))

    assert torch.equal(state["model"]["first.weight"], program.net.first.weight)


def test_the_manifest_says_who_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULAUNCH_ATTEMPT", "6")
    monkeypatch.setenv("GPULAUNCH_CHECKPOINT_DIR", str(tmp_path / "saved"))

    ckpt = Checkpoint(model=Net())
    ckpt.resume()
    for _ in ckpt.steps(3):
        ckpt.step()

    path = str(tmp_path / "saved" / "step-000000000003")
    manifest = read(path)
    verify(path)
    assert (manifest.step, manifest.attempt, manifest.generation, manifest.world_size) == (3, 6, 1, 1)
    assert {file.name for file in manifest.files} == set(os.listdir(path)) - {MANIFEST}


def test_without_a_directory_it_is_named_after_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["somewhere/train.py"])

    assert Checkpoint(model=Net()).directory == str(tmp_path / "checkpoints" / "train")


# -- which one is gone on from


def saved_at(directory: Path, *steps: int) -> None:
    for step in steps:
        Program(directory).run(step)


def test_a_damaged_one_is_skipped_and_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved_at(tmp_path, 2, 4)
    with open(tmp_path / "step-000000000004" / "__0_0.distcp", "r+b") as file:
        file.seek(100)
        file.write(b"\xff")

    assert Program(tmp_path).ckpt.resume() == 2
    assert "step-000000000004 is skipped: __0_0.distcp has changed since it was written" in capfd.readouterr().err


def test_the_launcher_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that it is nothing: an empty name."""
    saved_at(tmp_path, 2, 4)

    monkeypatch.setenv("GPULAUNCH_RESUME_FROM", str(tmp_path / "step-000000000002"))
    older = Program(tmp_path).ckpt.resume()
    monkeypatch.setenv("GPULAUNCH_RESUME_FROM", "")
    none = Program(tmp_path).ckpt.resume()

    assert (older, none) == (2, None)


def test_the_one_gone_on_from_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_at(tmp_path, 2, 4)
    monkeypatch.setenv("GPULAUNCH_RESUME_FROM", str(tmp_path / "step-000000000002"))

    Program(tmp_path, every=1, keep=1).run(8)

    assert sorted(path.name[-2:] for path in tmp_path.glob("step-*")) == ["02", "08"]


# -- mistakes of use


def fails(text: str):
    return pytest.raises(CheckpointError, match=text)


def test_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.checkpoint as dcp

    saved_at(tmp_path / "saved", 2)
    other = Net(width=5)

    with fails(r"of a different model: model.first.bias is \(4,\) in it, \(5,\) in the program"):
        Checkpoint(model=other, dir=tmp_path / "saved").resume()
    with fails("it has model.first.bias, the program does not; it has model.first.weight"):
        Checkpoint(model=nn.Linear(1, 1), dir=tmp_path / "saved").resume()
    with fails("no state of 'scaler', which this program saves"):
        Checkpoint(model=Net(), dir=tmp_path / "saved", extra={"scaler": torch.amp.GradScaler("cpu")}).resume()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": other.state_dict()}, checkpoint_id=str(tmp_path / "foreign"))
    monkeypatch.setenv("GPULAUNCH_RESUME_FROM", str(tmp_path / "foreign"))
    with fails("gpulaunch.checkpoint did not save it"):
        Checkpoint(model=other, dir=tmp_path / "saved").resume()
    monkeypatch.setenv("GPULAUNCH_RESUME_FROM", "s3://bucket/step-2")
    with fails("reads directories"):
        Checkpoint(model=other, dir=tmp_path / "saved").resume()


def test_in_the_wrong_order(tmp_path: Path) -> None:
    ckpt = Checkpoint(model=Net(), dir=tmp_path)

    for early in (
        ckpt.step,
        lambda: next(ckpt.epochs(1)),
        lambda: next(ckpt.batches([1])),
        lambda: next(ckpt.steps(1)),
    ):
        with fails("before resume"):
            early()
    ckpt.resume()
    with fails("called twice"):
        ckpt.resume()
    with fails("outside of the loop"):
        ckpt.step()
    with fails("at the end of each iteration"):
        list(ckpt.steps(2))


def test_epochs_without_a_step_are_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Such a loop saves nothing, and would not be noticed before it is killed."""
    program = Program(tmp_path)
    program.ckpt.resume()
    for _ in program.ckpt.epochs(3):
        for _ in program.ckpt.batches([1, 2, 3]):
            pass

    assert capfd.readouterr().err.count("without a call to step(), so nothing is saved") == 1


def test_epochs_with_a_step_now_and_then_are_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = Program(tmp_path)
    program.ckpt.resume()
    for _ in program.ckpt.epochs(3):
        for batch in program.ckpt.batches([1, 2, 3]):  # the gradients of three batches make a step
            if batch == 3:
                program.ckpt.step()

    assert "without a call" not in capfd.readouterr().err


def test_batches_twice_in_an_epoch(tmp_path: Path) -> None:
    ckpt = Checkpoint(model=Net(), dir=tmp_path)
    ckpt.resume()

    with fails("twice within an epoch"):
        for _ in ckpt.epochs(1):
            list(ckpt.batches([1]))
            list(ckpt.batches([1]))


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"keep": 0}, {"keep_every": -1}, {"extra": {"x": 3}}, {"dir": "s3://bucket/x"}]
)
def test_with_arguments_that_cannot_be(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        Checkpoint(**({"model": Net(), "dir": tmp_path} | options))


def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"lock": threading.Lock()}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    for options, named in (
        ({"extra": {"odd": Odd()}}, "shared.odd.lock"),
        ({"per_rank": {"odd": Odd()}}, "per_rank.odd.lock"),
    ):
        ckpt = Checkpoint(model=Net(), dir=tmp_path, **options)
        ckpt.resume()

        with fails(f"{named} is a lock, which cannot be saved"):
            for _ in ckpt.steps(1):
                ckpt.step(save=True)


# -- notices


def test_a_sigterm_saves_and_ends_with_75(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = Program(tmp_path)
    program.ckpt.resume()

    with pytest.raises(Preempted) as ended:  # noqa: PT012
        for step in program.ckpt.steps(10):
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            program.ckpt.step()

    assert ended.value.code == 75
    assert "preempted: saved at step 4" in capfd.readouterr().err
    assert Program(tmp_path).ckpt.resume() == 4


@pytest.mark.parametrize(("older", "code"), [(True, 75), (False, 143)])
def test_preempted_without_room(
    older: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if older:
        saved_at(tmp_path, 2)
    program = Program(tmp_path)
    program.ckpt.resume()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpulaunch.checkpoint.saver.save_tensors", full)
    with pytest.raises(Preempted) as ended:  # noqa: PT012
        for _ in program.ckpt.steps(10):
            os.kill(os.getpid(), signal.SIGTERM)
            program.ckpt.step()

    assert ended.value.code == code
    said = capfd.readouterr().err
    assert ("the newest checkpoint is of step 2" in said) is older
    assert f"ending with {code}" in said


def test_the_agent_asks_to_save_and_later_to_end(tmp_path: Path, control: ControlWriter) -> None:
    program = Program(tmp_path / "saved", keep=None)
    program.ckpt.resume()

    with pytest.raises(Preempted) as ended:  # noqa: PT012
        for step in program.ckpt.steps(10):
            if step in (3, 4):
                control.request_save()
            if step == 7:
                control.preempt(signal.SIGUSR1, 1)
            program.ckpt.step()

    assert ended.value.code == 75
    assert sorted(int(path.name[5:]) for path in (tmp_path / "saved").glob("step-*")) == [3, 4, 7]


def test_after_the_loop_a_sigterm_ends_the_process_again(tmp_path: Path) -> None:
    """Also after one that was left early; what `finish` saves then is where it stood."""
    program = Program(tmp_path, every=100)
    program.ckpt.resume()
    handlers = [signal.getsignal(signal.SIGTERM)]
    for step in program.ckpt.steps(10):
        program.ckpt.step()
        handlers.append(signal.getsignal(signal.SIGTERM))
        if step == 3:
            break
    program.ckpt.finish()
    handlers.append(signal.getsignal(signal.SIGTERM))

    assert [handler is signal.SIG_DFL for handler in handlers] == [False] * 4 + [True]
    assert Program(tmp_path).ckpt.resume() == 3


def test_a_program_with_a_handler_of_its_own_keeps_it(tmp_path: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    program = Program(tmp_path)
    program.ckpt.resume()

    os.kill(os.getpid(), signal.SIGTERM)
    program.go_on(2)

    assert heard == [signal.SIGTERM]


def test_figures_reach_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listens, resumed, saves, failures, stall: what the profiler is told."""
    from gpulaunch.profiler.probe import progress

    told: list[tuple[str, dict[str, object]]] = []
    for name in (
        "listens",
        "resumed",
        "checkpoint_began",
        "checkpoint_stalled",
        "checkpoint_saved",
        "checkpoint_failed",
    ):
        monkeypatch.setattr(
            progress, name, lambda *args, name=name, **facts: told.append((name, facts | {"args": args}))
        )

    Program(tmp_path, every=2).run(5)
    Program(tmp_path).run(6)

    names = [name for name, _ in told]
    saved = [facts for name, facts in told if name == "checkpoint_saved"]
    assert names.count("listens") == 2
    assert ("resumed", {"args": (5,)}) in told
    assert [facts["step"] for facts in saved] == [2, 4, 5, 6]
    assert all(facts["size_bytes"] > 1000 and facts["captured_ns"] > 0 for facts in saved)
    assert names.count("checkpoint_began") == names.count("checkpoint_stalled") == 4
    assert all(facts["args"][0] > 0 for name, facts in told if name == "checkpoint_stalled")


def test_the_files_are_readable_json_and_torch(tmp_path: Path) -> None:
    saved_at(tmp_path, 1)
    path = tmp_path / "step-000000000001"

    document = json.loads((path / MANIFEST).read_text())
    own = torch.load(path / "gpulaunch-rank-00000.pt", weights_only=True)

    assert document["step"] == 1
    assert {"rng", "position", "own", "buffers"} <= own.keys()
