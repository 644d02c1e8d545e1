"""Train a small character-level GPT with FSDP2 (`fully_shard`) on the source text of Python's standard library.

    gpulaunch --nproc 2 examples/gpt_fsdp.py      # or torchrun, with the same arguments
    python examples/gpt_fsdp.py                   # alone, one process

Real text that is on every machine: nothing is downloaded. At the end it writes a few lines of "Python" of its own. It
saves every --save-every steps, and goes on from the newest checkpoint when it is started again, also on another number
of ranks: under gpulaunch, in the run's directory (--job-dir); otherwise in checkpoints/gpt_fsdp.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from gpulaunch.checkpoint import Checkpoint

VOCABULARY = 128  # ASCII: a token is a character


def join_the_others() -> torch.device:
    """Join the process group and say which device is ours."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # FSDP on GPUs wants one for each rank (NCCL). With fewer, all ranks use the CPU (gloo).
    use_cuda = torch.cuda.device_count() >= local_world_size
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if use_cuda else "gloo"

    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # no launcher: a group of one, so that the rest of the program is the same
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on top of a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:  # B batch, T time, C channels, H heads
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # BTC -> BHT(C/H)
            for part in self.qkv(self.norm1(x_BTC)).chunk(3, dim=-1)
        )
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.mix(seen.transpose(1, 2).flatten(2))
        return x_BTC + self.mlp(self.norm2(x_BTC))


class GPT(nn.Module):
    """Characters in, the scores of each next character out."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.characters, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.characters(tokens_BT) + self.places(places)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC).flatten(0, 1))  # one row per character, (B * T) x VOCABULARY


def standard_library(num_bytes: int) -> torch.Tensor:
    """Give the first `num_bytes` of the standard library's source, as one tensor of ASCII codes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    return torch.tensor([code for code in text[:num_bytes] if code < VOCABULARY])


def windows(
    text: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut `count` pieces at random places: (characters, the characters that follow them)."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    pieces = text[starts + torch.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def write(model: nn.Module, prompt: str, length: int, context: int, device: torch.device) -> str:
    """Continue the prompt. Every rank must take part: each holds only a shard of the weights."""
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        scores = model(tokens[:, -context:])[-1] / 0.8
        tokens = torch.cat([tokens, torch.multinomial(scores.softmax(dim=0), 1)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode("ascii")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters per window")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--text-bytes", type=int, default=2_000_000)
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    return parser.parse_args()


def main() -> None:
    """Train, then write."""
    args = arguments()
    device = join_the_others()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = GPT(layers=args.layers, width=args.width, heads=args.heads, context=args.context).to(device)
    num_parameters = sum(p.numel() for p in model.parameters())
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)  # gathered just before it runs, dropped just after: one block's weights at a time
    fully_shard(model, mesh=mesh)  # what is left: embeddings, last norm, head
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after fully_shard: it must see the shards

    text = standard_library(args.text_bytes).chunk(world_size)[rank]  # each rank reads a part of its own
    generator = torch.Generator().manual_seed(args.seed + rank)
    if rank == 0:
        print(f"{num_parameters:,} parameters over {world_size} ranks on {device.type}, {len(text):,} characters each")

    # The generator decides which text comes next, on each rank another.
    ckpt = Checkpoint(model=model, optimizer=optimizer, every=args.save_every, per_rank={"text": generator})
    ckpt.resume()
    losses: list[torch.Tensor] = []
    for step in ckpt.steps(args.steps):
        tokens, targets = (part.to(device) for part in windows(text, args.batch_size, args.context, generator))
        loss = cross_entropy(model(tokens), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # no .item() here: on a GPU it would wait for every step
        if step == 1 or step % 20 == 0 or step == args.steps:
            mean = torch.stack(losses).mean() / world_size
            dist.all_reduce(mean)  # over all ranks, and the steps since the last line
            losses.clear()
            if rank == 0:
                print(f"step {step:4d}/{args.steps}  loss {mean.item():.3f}", flush=True)
        ckpt.step()  # last: what happened so far belongs to this step

    sample = write(model, "import ", args.sample, args.context, device)
    if rank == 0:
        print(f"--- what it writes ---\n{sample}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
