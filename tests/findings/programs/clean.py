"""Programs without a fault, by name: nothing is to be found in them."""

import argparse
import logging
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from pace import Training
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

SECONDS = 15.0
LONG_SECONDS = 90.0


class Decoded(Dataset):
    """A sample takes 2 ms, most of it waiting."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((8,), float(index % 7))


class Stream(IterableDataset):
    """Samples come one after another, each worker has every second one; an epoch has 400."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        for index in range(worker.id, 400, worker.num_workers):
            time.sleep(0.002)
            yield torch.full((8,), float(index % 7))


class Mapped(Dataset):
    """Rows of a file that is mapped into memory: what was read stays in the page cache."""

    def __init__(self, path: str) -> None:
        self.rows = torch.from_file(path, shared=False, size=ROWS * ROW).view(ROWS, ROW)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index, :8] + self.rows[index].sum()


class Cached(Dataset):
    """Rows of 100 kB, kept when they have been made: a quarter of a gigabyte after one epoch, and then no more."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 2560

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.kept:
            self.kept[index] = torch.full((25_000,), float(index % 7))
        return self.kept[index][:8]


ROWS, ROW = 8192, 1 << 14


def in_memory() -> None:
    """Everything is in memory, and no worker is needed."""
    Training().run((x for (x,) in endless(DataLoader(TensorDataset(torch.rand(4096, 8)), 32))), seconds=SECONDS)


def with_workers() -> None:
    """Two workers are ahead; they live on from epoch to epoch, and each hundred steps end with an evaluation."""
    loader = DataLoader(Decoded(), batch_size=4, num_workers=2, persistent_workers=True)
    held_out = DataLoader(TensorDataset(torch.rand(64, 8)), 32)
    training = Training()

    def evaluate(step: int, loss: torch.Tensor) -> None:
        if step % 100 == 0:
            with torch.no_grad():
                for (x,) in held_out:
                    training.model(x)

    training.run(loader, seconds=SECONDS, after=evaluate)


def accumulating() -> None:
    """Gradients of four batches make a step; the loss is read and printed now and then."""
    training = Training(compute_s=0.02)
    loader = endless(DataLoader(TensorDataset(torch.rand(4096, 8)), 32))
    ends_s = time.monotonic() + SECONDS
    while time.monotonic() < ends_s:
        for _ in range(4):
            (x,) = next(loader)
            (training.model(x).square().mean() / 4).backward()
        time.sleep(0.02)
        training.optimizer.step()
        training.optimizer.zero_grad()


def compiled() -> None:
    """torch.compile, and shapes that stay the same."""
    model = torch.compile(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), backend="eager")
    Training(model=model).run([torch.rand(4, 8) for _ in range(64)], seconds=SECONDS)


def adversarial() -> None:
    """A generator and a discriminator, each with its optimizer, and both with two samples of noise a round."""
    torch.set_num_threads(1)
    forger, judge = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 1)
    of_forger = torch.optim.Adam(forger.parameters(), lr=1e-3)
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3)
    ends_s = time.monotonic() + SECONDS
    for (real,) in endless(DataLoader(TensorDataset(torch.rand(4096, 8)), 32)):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        forged = forger(torch.randn(len(real), 4))
        of_judge.zero_grad()
        loss = binary_cross_entropy_with_logits(judge(real), ones)
        (loss + binary_cross_entropy_with_logits(judge(forged.detach()), zeros)).backward()
        of_judge.step()
        time.sleep(0.01)
        of_forger.zero_grad()
        binary_cross_entropy_with_logits(judge(forged), ones).backward()
        of_forger.step()
        time.sleep(0.01)
        if time.monotonic() > ends_s:
            break


def with_closures() -> None:
    """LBFGS evaluates the model as often as it needs within one step."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, y = torch.rand(64, 8), torch.rand(64, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        time.sleep(0.005)
        loss.backward()
        return loss

    ends_s = time.monotonic() + SECONDS
    while time.monotonic() < ends_s:
        optimizer.step(closure)


def streaming() -> None:
    """An iterable dataset, short epochs, workers that live on; each epoch ends with an evaluation."""
    loader = DataLoader(Stream(), batch_size=4, num_workers=2, persistent_workers=True)
    held_out = DataLoader(TensorDataset(torch.rand(64, 8)), 32)
    training = Training()
    ends_s = time.monotonic() + SECONDS
    while time.monotonic() < ends_s:
        training.model.train()
        for x in loader:
            training.step(x)
        training.model.eval()
        with torch.no_grad():
            for (x,) in held_out:
                training.model(x)


def mapped() -> None:
    """Two workers read a file of half a gigabyte through the page cache, and fill it."""
    path = os.path.join(os.getcwd(), f"rows-{os.getpid()}.bin")
    with open(path, "wb") as file:
        file.truncate(4 * ROWS * ROW)  # a hole: nothing of it is on the disk
    loader = DataLoader(Mapped(path), batch_size=8, shuffle=True, num_workers=2)
    os.unlink(path)
    Training().run(loader, seconds=SECONDS)


def distributed() -> None:
    """DistributedDataParallel; rank 0 saves, and logs every twentieth step."""
    dist.init_process_group("gloo")
    training = Training(model=DistributedDataParallel(nn.Linear(8, 8)))

    def now_and_then(step: int, loss: torch.Tensor) -> None:
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
            torch.save(training.model.state_dict(), os.path.join(os.getcwd(), "checkpoint.pt"))

    training.run([torch.rand(4, 8) for _ in range(64)], seconds=SECONDS, after=now_and_then)
    # DDP's reducer must not be what frees the process group: torch joins gloo's threads there, holding the GIL.
    training.model = nn.Identity()
    dist.destroy_process_group()


def for_longer() -> None:
    """Long enough for what takes a minute to be found.

    The data of the first epoch, a sixth of the time, stay in memory; every step is logged, to a file; two hundred steps
    end with a checkpoint, and an epoch with an evaluation, whose data stay as well.
    """
    directory = os.getcwd()
    logger = logging.getLogger("training")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.FileHandler(os.path.join(directory, f"training-{os.getpid()}.log")))
    dataset, held_out = Cached(), []
    training = Training()
    ballast = torch.rand(1 << 20)

    def now_and_then(step: int, loss: torch.Tensor) -> None:
        logger.info("step %d: loss %.4f", step, loss.item())
        if step % 200 == 0:
            state = {"ballast": ballast, **training.model.state_dict()}
            torch.save(state, os.path.join(directory, f"checkpoint-{os.getpid()}.pt"))
        if step % (len(dataset) // 4) == 0:
            if not held_out:
                held_out.extend(DataLoader(TensorDataset(torch.rand(64, 8)), 32))
            with torch.no_grad():
                for (x,) in held_out:
                    training.model(x)

    training.run(DataLoader(dataset, batch_size=4), seconds=LONG_SECONDS, after=now_and_then)
    print(f"epochs {4 * training.steps // len(dataset)} kept {len(dataset.kept)}", flush=True)


def endless(loader: DataLoader):
    """Epoch after epoch."""
    while True:
        yield from loader


KINDS = (in_memory, with_workers, accumulating, compiled, adversarial, with_closures, streaming, mapped)
PROGRAMS = {each.__name__: each for each in (*KINDS, distributed, for_longer)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=PROGRAMS)
    PROGRAMS[parser.parse_args().name]()
