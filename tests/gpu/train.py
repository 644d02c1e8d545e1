"""One rank of the GPU checks: trains a toy model with DDP on CUDA, and writes what it saw to REPORT_DIR/rank-R.json."""

from __future__ import annotations

import sys

FORKED = "torch" in sys.modules  # the fork server had it before this program asked for it

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--backend", choices=["nccl", "gloo"], required=True)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--hold", help="after the steps, wait until this file exists")
parser.add_argument("--die-in-attempt-0", type=int, default=0, metavar="BYTES", help="allocate so much, then SIGKILL")
args = parser.parse_args()

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
initialized_at_start = torch.cuda.is_initialized()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group(args.backend)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(args.width, args.width), torch.nn.ReLU(), torch.nn.Linear(args.width, 1)).to(
        device
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank + 1)
losses: list[float] = []
step_us: list[float] = []
first_step_s = 0.0
for step in range(args.steps):
    begin = time.perf_counter()
    inputs = torch.randn(64, args.width, device=device)
    loss = (model(inputs) - inputs[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())  # waits for the GPU, so that the step's time is the step's
    step_us.append(1e6 * (time.perf_counter() - begin))
    if step == 0:
        first_step_s = time.monotonic()
        if attempt == 0 and args.die_in_attempt_0:
            ballast = torch.empty(args.die_in_attempt_0, dtype=torch.uint8, device=device)
            print(f"killed at {time.monotonic()}", flush=True)
            os.kill(os.getpid(), 9)

weights = torch.cat([p.detach().flatten() for p in model.parameters()])
first_weights = weights.clone()
dist.broadcast(first_weights, src=0)
report = {
    "rank": rank,
    "attempt": attempt,
    "forked": FORKED,
    "cuda_initialized_at_start": initialized_at_start,
    "device": str(device),
    "device_count": torch.cuda.device_count(),
    "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "backend": dist.get_backend(),
    "first_step_at_s": first_step_s,
    "first_loss": losses[0],
    "last_loss": statistics.fmean(losses[-5:]),
    "weights_equal_rank_0": bool(torch.equal(weights, first_weights)),
    "step_us": statistics.median(step_us[len(step_us) // 3 :]),
}
Path(os.environ["REPORT_DIR"], f"rank-{rank}.json").write_text(json.dumps(report))
print("trained", flush=True)
while args.hold and not os.path.exists(args.hold):
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
