"""The batch script that `gpulaunch init slurm` writes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_SCRIPT = """\
#!/bin/bash
# Written by `gpulaunch init slurm`. Add what your cluster wants (--partition, --account), then submit it:
#   sbatch FILE [more arguments of the program]
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --cpus-per-task={cpus}
#SBATCH --time={time}
#SBATCH --signal=USR1@300
#SBATCH --requeue
{no_kill}#SBATCH --open-mode=append

# USR1@300: five minutes before the time limit gpulaunch is told; the ranks save at their next step boundary and the job
# ends with 75, "run me again". It is put into the queue again and goes on from what was saved: a requeued job keeps its
# number, and so its directory with the checkpoints, on a file system that all nodes see, and its name for Prometheus
# (--rdzv-id; docs/prometheus.md). For Prometheus to find it, export GPULAUNCH_METRICS_SD=/shared/targets (--metrics-sd)
# and GPULAUNCH_METRICS_ADDR=0.0.0.0 (--metrics-addr) before sbatch, which hands its environment on, or write them here.
dir="gpulaunch-runs/$SLURM_JOB_ID"
(umask 077 && mkdir -p "$dir" && head -c 32 /dev/urandom | base64 > "$dir/token")  # only these nodes take part
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # since Slurm 22.05 srun does not take it from sbatch

# One gpulaunch for each node, which starts a rank for each GPU; who they are they read from Slurm's variables.
srun{srun} gpulaunch{nnodes} --rdzv-id "$SLURM_JOB_ID" --token-file "$dir/token" --job-dir "$dir" \\
    --nproc "${{NPROC:-{nproc}}}" --max-restarts 10 {program} "$@"
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def script(program: Sequence[str], *, name: str, nodes: int, min_nodes: int, gpus: int, cpus: int, time: str) -> str:
    """The batch script; `time`: the limit as sbatch takes it. For the others see `init_kubernetes.manifest`."""
    elastic = min_nodes < nodes
    return _SCRIPT.format(
        name=re.sub(r"[^\w.-]", "_", name),
        nodes=nodes,
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        cpus=cpus,
        time=time,
        no_kill="#SBATCH --no-kill\n" if elastic else "",
        srun=" --no-kill" if elastic else "",
        nnodes=f" --nnodes {min_nodes}:{nodes}" if elastic else "",
        nproc="gpu" if gpus else "1",
        program=shlex.join(program),
    )
