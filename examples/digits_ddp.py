"""Learn to read handwritten digits with DistributedDataParallel.

    gpulaunch --nproc 2 examples/digits_ddp.py      # or torchrun, with the same arguments
    python examples/digits_ddp.py                   # alone, one process

The 1,797 images (8 x 8 pixels) ship inside scikit-learn: nothing is downloaded. It saves every --save-every steps, and
goes on from the newest checkpoint when it is started again: under gpulaunch, in the run's directory (--job-dir);
otherwise in checkpoints/digits_ddp.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gpulaunch.checkpoint import Checkpoint


def join_the_others() -> torch.device:
    """Join the process group and say which device is ours."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    # NCCL wants one GPU per rank. Ranks that share a GPU, or have none, talk over gloo.
    backend = "nccl" if gpus >= local_world_size else "gloo"
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # no launcher: a group of one, so that the rest of the program is the same
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Give (train, test). Every rank shuffles alike, so all agree on which fifth is held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # pixels are 0..16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def cnn() -> nn.Module:
    """Make a small convolutional network: 8 x 8 pixels in, 10 scores out."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_epoch(
    ckpt: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, device: torch.device
) -> float:
    """Go once through this rank's share, or what is left of it; give the mean loss over all ranks."""
    model.train()
    total, before = torch.zeros((), device=device), ckpt.steps_done
    for images, labels in ckpt.batches(loader):  # calls set_epoch: another order in every epoch
        loss = cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients of all ranks while this runs
        optimizer.step()
        total += loss.detach()  # stays on the device: .item() here would wait for the GPU at every step
        ckpt.step()  # last: what happened so far belongs to this step
    mean = total / max(ckpt.steps_done - before, 1) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Give the share of held-out images read correctly, counted over all ranks."""
    model.eval()
    # Not DistributedSampler: it repeats images until all ranks have equally many, and would count those twice.
    images, labels = (part.to(device) for part in test[dist.get_rank() :: dist.get_world_size()])
    right = (model(images).argmax(dim=1) == labels).sum()
    counts = torch.stack([right, torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--workers", type=int, default=2, help="DataLoader workers per rank")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--require-accuracy", action="store_true", help="exit 1 under 95 %% test accuracy")
    return parser.parse_args()


def main() -> int:
    """Train, and give the exit code."""
    args = arguments()
    device = join_the_others()
    first = dist.get_rank() == 0

    train, test = digits()
    sampler = DistributedSampler(train, seed=args.seed)  # another share of the images for every rank
    loader = DataLoader(
        train,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,  # started once, not once per epoch
        pin_memory=device.type == "cuda",
    )
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(cnn().to(device))  # sends rank 0's weights to all
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    ckpt = Checkpoint(model=model, optimizer=optimizer, every=args.save_every)
    ckpt.resume()
    for epoch in ckpt.epochs(args.epochs):
        loss = train_epoch(ckpt, model, optimizer, loader, device)
        score = accuracy(model, test, device)
        if first:
            print(f"epoch {epoch + 1:2d}/{args.epochs}  loss {loss:.3f}  test accuracy {score:.1%}", flush=True)

    score = accuracy(model, test, device)
    if first:
        print(f"test accuracy {100 * score:.1f} %", flush=True)
    dist.destroy_process_group()
    if args.require_accuracy and score < 0.95:
        if first:
            print("too low: --require-accuracy asks for 95 %; train longer (--epochs)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
