"""Two ranks multiply with as many threads as OMP_NUM_THREADS says: more than there are cores, or as gpulaunch says."""

import torch
import torch.distributed as dist
from pace import Training, arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    args = arguments()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    training = Training(compute_s=0.0, model=model, threads=None)
    training.run([torch.rand(64, 256) for _ in range(64)], seconds=args.seconds)
    dist.destroy_process_group()
