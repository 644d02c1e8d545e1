"""Batches have lengths of their own, and each new one is compiled anew. Repaired: one length."""

import torch
from pace import Training, arguments
from torch import nn

if __name__ == "__main__":
    args = arguments()
    torch._dynamo.config.recompile_limit = 100_000
    torch._dynamo.config.accumulated_recompile_limit = 100_000
    model = torch.compile(nn.Linear(8, 8), backend="eager", dynamic=False)
    lengths = range(4, 5) if args.repaired else range(1, 4096)
    Training(model=model).run(
        (torch.rand(length, 8) for length in lengths for _ in range(4000 if args.repaired else 2)), seconds=args.seconds
    )
