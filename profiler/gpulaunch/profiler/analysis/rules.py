"""The table of all rules: id, function, and the text of its page.

`docs/findings.md` is generated from it: python -m gpulaunch.profiler.analysis.rules > docs/findings.md
"""

from __future__ import annotations

import sys
from typing import Final

from gpulaunch.profiler.analysis import (
    loader_rules,
    machine_rules,
    memory_rules,
    pause_rules,
    straggler_rules,
    thresholds,
    transfer_rules,
)
from gpulaunch.profiler.analysis.rule import Rule

RULES: Final = (
    Rule(
        id="dataloader-too-few-workers",
        judge=loader_rules.too_few_workers,
        problem="Training waits for batches that more workers would make beside each other.",
        evidence="The workers are busy all the time (or there are none), and they compute on free cores or wait for "
        "something that is not storage.",
        costs="The step as it is, less the step with the workers advised: `max(own, batches * fetch / workers, "
        "cpu / cores)`, where `own` is the step without its wait and `cpu` what all ranks use per step.",
        fix="`DataLoader(..., num_workers=N, persistent_workers=True)`; of computing ones no more than find a core.",
        suppressed="Workers wait for cores already, or computing ones would find none free; fetches are shorter than a "
        "worker is worth; or the model gains too little.",
        limits=(
            thresholds.LOST,
            thresholds.BUSY,
            thresholds.CROWDED,
            thresholds.CROWDED_NODE,
            thresholds.WORKER_PAYS_S,
        ),
    ),
    Rule(
        id="dataloader-too-many-workers",
        judge=loader_rules.too_many_workers,
        problem="Workers stand in each other's way, or talking to them costs more than they save.",
        evidence="They spend their fetches in the run queue, and there are more than two of them per core; or batches "
        "are ready, and unpickling and mapping them takes longer than making them.",
        costs="By the same model, with as many workers as there are cores for them; or with none at all, when handing "
        "over is what takes long. Where all cores are busy anyway it is 0: then fewer workers save memory only.",
        fix="`num_workers` as advised; or a `collate_fn` that makes a few large tensors of a batch, not hundreds.",
        suppressed="The kernel does not count the run queue (`schedstat`), or others use the cores.",
        limits=(thresholds.CROWDED, thresholds.SURPLUS, thresholds.HANDOVER, thresholds.LOST),
    ),
    Rule(
        id="dataloader-slow-storage",
        judge=loader_rules.slow_storage,
        problem="Workers stand still for reads from storage.",
        evidence="They are busy all the time, blocked for most of it, and most of what they read was not in memory.",
        costs="By the same model, with fetches that do nothing but compute.",
        fix="Copy the data to a local disk or into memory first; fewer and larger files, read in order.",
        suppressed="The reads come from the page cache (then it is not the storage), or workers idle.",
        limits=(thresholds.LOST, thresholds.BUSY, thresholds.STORAGE),
    ),
    Rule(
        id="dataloader-slow-transform",
        judge=loader_rules.slow_transform,
        problem="Preparing the samples takes more than the cores can give.",
        evidence="Workers compute, or wait for a core to compute on, all the time, and more of them would not help. Or "
        "there are none, the training thread computes while it waits for its batches (the CPU time of its process "
        "leaves no other way), and no core is free for a worker.",
        costs="The whole wait: what is saved if preparing keeps up with training. Without workers that is a bound: "
        "nothing hides what a cheaper transform still takes.",
        fix="Prepare once and store the result; decode and augment on the GPU; resize before augmenting.",
        suppressed="There is a free core for another worker: then that is the cheaper cure. Or others use the cores. "
        "Without workers: fetches may wait for storage as well, or are shorter than a worker is worth.",
        limits=(
            *(thresholds.LOST, thresholds.BUSY, thresholds.CROWDED, thresholds.CROWDED_NODE),
            *(thresholds.COMPUTES, thresholds.WORKER_PAYS_S),
        ),
    ),
    Rule(
        id="dataloader-head-of-line",
        judge=loader_rules.head_of_line,
        problem="Batches are ready, but they wait for an earlier one that takes long.",
        evidence="The training thread waits while finished batches lie behind the one that is next in order.",
        costs="That wait, as far as the workers could have kept up on average.",
        fix="`DataLoader(..., in_order=False)` (torch 2.6), or items that take about equally long.",
        suppressed="`in_order=False` is set.",
        limits=(thresholds.LOST,),
    ),
    Rule(
        id="unpinned-copies",
        judge=transfer_rules.unpinned_copies,
        problem="Batches are copied to the GPU out of pageable memory.",
        evidence="A line copies to the GPU, most of it out of memory that is not pinned, and stands still meanwhile.",
        costs="The time that the line blocks, but no more than the GPU idles; where the idle time is not known, the "
        "quarter of it that pinned memory is known to save.",
        fix='`DataLoader(..., pin_memory=True)` and `batch.to("cuda", non_blocking=True)`.',
        suppressed="The GPU works meanwhile.",
        limits=(thresholds.LOST_MEASURED, thresholds.PINNED_GAIN),
    ),
    Rule(
        id="blocking-copies",
        judge=transfer_rules.blocking_copies,
        problem="Copies out of pinned memory wait for their end all the same.",
        evidence="A line copies to the GPU out of pinned memory, mostly without `non_blocking=True`.",
        costs="The time that the line blocks, but no more than the GPU idles; an upper bound where that is not known.",
        fix='`batch.to("cuda", non_blocking=True)`.',
        suppressed="The GPU works meanwhile.",
        limits=(thresholds.LOST_MEASURED,),
    ),
    Rule(
        id="sync-every-step",
        judge=transfer_rules.sync_every_step,
        problem="A line makes the program wait for the GPU at every step.",
        evidence="`item`, `tolist`, `numpy`, `cpu`, a copy to the CPU (`to`, `copy_`), a condition on a tensor, "
        "`nonzero` or `synchronize` on one line.",
        costs="The time that the line blocks, but no more than the GPU idles: it is the gap behind a wait that is "
        "lost, not the wait. An upper bound where the idle time is not known.",
        fix="`total += loss.detach()`, and `total.item()` every N steps.",
        suppressed="The GPU works meanwhile; the line is reached less often than every other step; copies go to pinned "
        "memory with `non_blocking=True`; or it is `GradScaler.step` that looks for infinities, as it must.",
        limits=(thresholds.LOST_MEASURED, thresholds.EVERY_STEP),
    ),
    Rule(
        id="tensor-built-on-cpu",
        judge=transfer_rules.tensor_built_on_cpu,
        problem="A tensor is made on the CPU, only to be moved to the GPU.",
        evidence="The text of the line that moves it: what it moves comes from `zeros`, `ones`, `rand`, `tensor` "
        "or their like, in the same function.",
        costs="The time that the copy blocks. Making it on the CPU comes on top and is not counted.",
        fix='`torch.zeros(n, device="cuda")`.',
        suppressed="It happens less often than at every other step.",
        limits=(thresholds.SMALL_LOSS, thresholds.EVERY_STEP),
    ),
    Rule(
        id="dataparallel",
        judge=transfer_rules.dataparallel,
        problem="`nn.DataParallel` drives several GPUs from one process.",
        evidence="The line that makes it, on a node with more than one GPU.",
        costs="The copies between GPUs that the program makes itself. Those of DataParallel are made by torch's C++, "
        "which is not seen, and that one Python drives all GPUs is not counted: often 0, and never too much.",
        fix="`DistributedDataParallel` with one process per GPU: `gpulaunch --nproc auto train.py`.",
        suppressed="There is one GPU, or none.",
    ),
    Rule(
        id="fp32-on-tensor-cores",
        judge=transfer_rules.fp32_on_tensor_cores,
        problem="The GPU multiplies in 32 bits, and its tensor cores idle.",
        evidence="Parameters are float32 without autocast, the float32 pipes are in use, and the tensor pipes are not.",
        costs="Half of the time in which the float32 pipes are in use: a bound, to be tried.",
        fix='`torch.autocast("cuda", torch.bfloat16)`, or `torch.set_float32_matmul_precision("high")`.',
        suppressed="The GPU idles half of the time, or its counters are not known (before Hopper).",
        limits=(thresholds.LOST, thresholds.PIPE_IDLE, thresholds.GEMM_BUSY),
    ),
    Rule(
        id="host-memory-growth",
        judge=memory_rules.host_memory_growth,
        problem="A rank, or its dataloader workers, take more host memory with every step.",
        evidence="A robust line through the least anonymous memory of each window since the attempt began, still "
        "rising at its end; with it the batches in shared memory that the rank has not freed.",
        costs="No time until the memory is full: `hours_to_full` in the evidence.",
        fix="`losses.append(loss.item())`, a bound for every cache; datasets that hold arrays, not Python objects.",
        suppressed="It would take more than a week to fill what is left; or what grows is the page cache, by files "
        "that are mapped. Workers: the kernel does not tell their anonymous memory (`Pss_Anon` in `smaps_rollup`).",
        limits=(thresholds.GROWN_BYTES, thresholds.GROWN_POINTS, thresholds.MOST_TO_FULL_S),
    ),
    Rule(
        id="gpu-memory-growth",
        judge=memory_rules.gpu_memory_growth,
        problem="Tensors on the GPU become more with every step.",
        evidence="The same line through what torch has allocated at its lowest.",
        costs="No time until the memory is full: `hours_to_full` in the evidence.",
        fix="`total += loss.detach()`: a loss that is kept keeps its graph.",
        suppressed="It would take more than a week to fill what is left: what the allocator keeps for later, and of "
        "what is free on the card each rank's part.",
        limits=(thresholds.GROWN_BYTES, thresholds.GROWN_POINTS, thresholds.MOST_TO_FULL_S),
    ),
    Rule(
        id="gpu-memory-fragmented",
        judge=memory_rules.gpu_memory_fragmented,
        problem="GPU memory is reserved and free, and still does not fit what is asked for.",
        evidence="The allocator had to give everything back and try again, and much of its memory is in parts of "
        "blocks.",
        costs="Not timed; each retry waits for the GPU.",
        fix="`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or batches of one shape.",
        suppressed="No allocation was retried.",
        limits=(thresholds.FRAGMENTED,),
    ),
    Rule(
        id="shm-nearly-full",
        judge=memory_rules.shm_nearly_full,
        problem="The shared memory that carries batches is nearly full.",
        evidence="`/dev/shm` of this node, and the batches in it that are on their way to ranks.",
        costs="No time: full means that a rank dies of a bus error.",
        fix="A larger `/dev/shm` (a container gets 64 MiB by default); fewer workers, less `prefetch_factor`.",
        suppressed="No rank has workers.",
        limits=(thresholds.SHM_FULL,),
    ),
    Rule(
        id="straggler",
        judge=straggler_rules.straggler,
        problem="One rank is late at every step, and the others wait for it.",
        evidence="It takes longer than the median rank for what it does alone, by the program's clock or the GPU's, "
        "and waits less where ranks meet.",
        costs="What it takes longer than the median rank; a slower backward too, where it is known how much of DDP's "
        "communication was exposed. The cause is in the evidence: input, copies, compute, throttle, CPU contention, "
        "garbage collection, or other.",
        fix="By the cause.",
        suppressed="The others do not wait for it; or it is late with its batches, and they wait for theirs as long: "
        "then loading is to be mended, whoever it holds up most. Ranks of other nodes are not compared.",
        limits=(thresholds.LOST, thresholds.STRAGGLES_S, thresholds.THROTTLED, thresholds.SLOW_WINDOW_STEPS),
    ),
    Rule(
        id="checkpoint-stall",
        judge=pause_rules.checkpoint_stall,
        problem="Training stands still while checkpoints are written.",
        evidence="The phase `checkpoint`: `torch.save`, `torch.distributed.checkpoint`, `gpulaunch.checkpoint`.",
        costs="That phase, spread over all steps of the long window.",
        fix="Save less often, or `torch.distributed.checkpoint.async_save`.",
        suppressed="There were less than three saves: how often they come is not known yet.",
        limits=(thresholds.LOST_MEASURED, thresholds.SAVES, thresholds.LONG_S),
    ),
    Rule(
        id="logging-stall",
        judge=pause_rules.logging_stall,
        problem="The training thread spends its time in logging.",
        evidence="Stack samples inside of `logging`, TensorBoard, wandb, tqdm and their like, called from one line.",
        costs="The share of the samples, times the step; two a second at most, so it takes a minute or two.",
        fix="Log every N steps, or through `logging.handlers.QueueHandler`.",
        suppressed="There are no stack samples (no py-spy, or no right to trace), or too few to tell.",
        limits=(thresholds.LOST_MEASURED, thresholds.LOGGED_SAMPLES, thresholds.LOGGED_ERROR, thresholds.LONG_S),
    ),
    Rule(
        id="omp-oversubscribed",
        judge=machine_rules.omp_oversubscribed,
        problem="The ranks compute with more threads than there are cores.",
        evidence="`torch.get_num_threads()` of all ranks against the cores, and threads that wait for one, long and "
        "often.",
        costs="A thread progresses while it has a core, and in part only while the threads it waits for have one: of "
        "the computing, `1 - (1 - waiting)^1.5` is lost. An estimate: how threads wait for each other is not seen.",
        fix="Leave `OMP_NUM_THREADS` to gpulaunch (cores / ranks); no `torch.set_num_threads`.",
        suppressed="They do not wait for cores: threads that only exist cost nothing.",
        limits=(thresholds.THREADS, thresholds.BUSY, thresholds.CROWDED, thresholds.CROWDED_NODE),
    ),
    Rule(
        id="gc-pauses",
        judge=pause_rules.gc_pauses,
        problem="Python's garbage collector takes a good part of the steps.",
        evidence="The phase `gc` of the steps; and the line that asks for collections, where half of it or more is "
        "its.",
        costs="That phase.",
        fix="`gc.collect(); gc.freeze()` once after setting up; no `gc.collect()` in the loop.",
        suppressed="",
        limits=(thresholds.LOST_MEASURED, thresholds.LONG_S),
    ),
    Rule(
        id="recompiles",
        judge=pause_rules.recompiles,
        problem="`torch.compile` compiles again and again.",
        evidence="The phase `compile` of the steps, in window after window.",
        costs="That phase.",
        fix="Pad to a few shapes, `drop_last=True`, or `dynamic=True`; `TORCH_LOGS=recompiles` says what changed.",
        suppressed="It is the warm-up, or a single compilation.",
        limits=(thresholds.LOST_MEASURED, thresholds.WARM_UP_STEPS),
    ),
    Rule(
        id="throttled",
        judge=machine_rules.throttled,
        problem="A GPU is slowed down against heat, or for want of power.",
        evidence="The driver's own time counters. A power cap is no fault: every card that is well used runs into it.",
        costs="The share of the time, times how much slower its clock is than that of the node's other cards.",
        fix="Cooling, power cables, what else runs in that rack.",
        suppressed="",
        limits=(thresholds.THROTTLED,),
    ),
    Rule(
        id="numa-mismatch",
        judge=machine_rules.numa_mismatch,
        problem="A rank runs on cores of another NUMA node than its GPU's.",
        evidence="The cores that it may use, and the node of the GPU's PCIe slot.",
        costs="Not known before it is tried; the evidence has what the rank copies.",
        fix="`gpulaunch --numa-binding node`.",
        suppressed="The machine has one node, or the GPU's is not known.",
    ),
)


def markdown() -> str:
    """Return the rules as the page docs/findings.md."""
    lines = [
        "# Findings",
        "",
        "Written from `profiler/gpulaunch/profiler/analysis/rules.py`; a test keeps the two the same.",
        "",
        "While a job runs, its sidecar judges windows of steps by the rules below. What it finds is in",
        "`findings.jsonl` of the run directory, one object per line; `gpulaunch report` shows it, then and afterwards:",
        "",
        "| field | meaning |",
        "|---|---|",
        "| `rule` | the id of the rule; it does not change |",
        "| `file`, `line` | the line to change; null where it is no line |",
        "| `subject` | what it is about where that is no line: a rank, a GPU |",
        "| `ranks` | where it was found |",
        "| `seconds_per_step`, `seconds_per_hour` | what every step, and an hour of training, would be shorter by |",
        "| `confidence` | 0.9: read off a clock or a counter. 0.7: follows from what was measured. 0.4: a bound |",
        "| `evidence` | the figures; the unit is in the name |",
        "| `advice` | what to change, in a sentence |",
        "| `active` | whether it still stood at the last look |",
        "| `first_seen_s`, `last_seen_s` | Unix time |",
        "",
        (
            f"A window is {thresholds.WINDOW_S} and {thresholds.WINDOW_STEPS} at least, "
            f"after {thresholds.WARM_UP_STEPS} of warm-up;"
        ),
        f"where steps are slow, {thresholds.SLOW_WINDOW_S} and {thresholds.SLOW_WINDOW_STEPS}.",
        f"A finding appears after {thresholds.APPEARS} in a row and goes after {thresholds.GONE} without it.",
        "No seconds: it costs none, or none yet. Where the seconds are a bound, or nobody knows why a rank is late,",
        "the advice ends with the `gpulaunch trace` that shows more.",
        "",
        "| rule | what is wrong |",
        "|---|---|",
        *(f"| [`{rule.id}`](#{rule.id}) | {rule.problem} |" for rule in RULES),
    ]
    for rule in RULES:
        lines += ["", f"## {rule.id}", "", rule.problem, ""]
        lines.append(f"- **Found by**: {rule.evidence}")
        lines.append(f"- **Seconds**: {rule.costs}")
        lines.append(f"- **Change**: {rule.fix}")
        if rule.suppressed:
            lines.append(f"- **Silent when**: {rule.suppressed}")
        lines += [f"- Limit: {limit.name} {limit}; {limit.why}." for limit in rule.limits]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
