"""Every rule once: its id, what it looks for, and the words of its page.

`docs/findings.md` is written from this table: python -m gpulaunch.profiler.analysis.rules > docs/findings.md
"""

from __future__ import annotations

import sys
from typing import Final

from gpulaunch.profiler.analysis import copying, holding, limits, loading, machine, pausing, straggling
from gpulaunch.profiler.analysis.rule import Rule

RULES: Final = (
    Rule(
        id="dataloader-too-few-workers",
        judge=loading.too_few_workers,
        says="Training waits for batches that more workers would make beside each other.",
        sees="The workers are busy all the time (or there are none), and they compute on free cores or wait for "
        "something that is not storage.",
        costs="The step as it is, less the step with the workers advised: `max(own, batches * fetch / workers, "
        "cpu / cores)`, where `own` is the step without its wait and `cpu` what all ranks use per step.",
        mend="`DataLoader(..., num_workers=N, persistent_workers=True)`; of computing ones no more than find a core.",
        silent="Workers wait for cores already, or computing ones would find none free; fetches are shorter than a "
        "worker is worth; or the model gains too little.",
        limits=(limits.LOST, limits.BUSY, limits.CROWDED, limits.CROWDED_NODE, limits.WORKER_PAYS_S),
    ),
    Rule(
        id="dataloader-too-many-workers",
        judge=loading.too_many_workers,
        says="Workers stand in each other's way, or talking to them costs more than they save.",
        sees="They spend their fetches in the run queue, and there are more than two of them per core; or batches are "
        "ready, and unpickling and mapping them takes longer than making them.",
        costs="By the same model, with as many workers as there are cores for them; or with none at all, when handing "
        "over is what takes long. Where all cores are busy anyway it is 0: then fewer workers save memory only.",
        mend="`num_workers` as advised; or a `collate_fn` that makes a few large tensors of a batch, not hundreds.",
        silent="The kernel does not count the run queue (`schedstat`), or others use the cores.",
        limits=(limits.CROWDED, limits.SURPLUS, limits.HANDOVER, limits.LOST),
    ),
    Rule(
        id="dataloader-slow-storage",
        judge=loading.slow_storage,
        says="Workers stand still for reads from storage.",
        sees="They are busy all the time, blocked for most of it, and most of what they read was not in memory.",
        costs="By the same model, with fetches that do nothing but compute.",
        mend="Copy the data to a local disk or into memory first; fewer and larger files, read in order.",
        silent="The reads come from the page cache (then it is not the storage), or workers idle.",
        limits=(limits.LOST, limits.BUSY, limits.STORAGE),
    ),
    Rule(
        id="dataloader-slow-transform",
        judge=loading.slow_transform,
        says="Preparing the samples takes more than the cores can give.",
        sees="Workers compute, or wait for a core to compute on, all the time, and more of them would not help. Or "
        "there are none, the training thread computes while it waits for its batches (the CPU time of its process "
        "leaves no other way), and no core is free for a worker.",
        costs="The whole wait: what is saved if preparing keeps up with training. Without workers that is a bound: "
        "nothing hides what a cheaper transform still takes.",
        mend="Prepare once and store the result; decode and augment on the GPU; resize before augmenting.",
        silent="There is a free core for another worker: then that is the cheaper cure. Or others use the cores. "
        "Without workers: fetches may wait for storage as well, or are shorter than a worker is worth.",
        limits=(
            *(limits.LOST, limits.BUSY, limits.CROWDED, limits.CROWDED_NODE),
            *(limits.COMPUTES, limits.WORKER_PAYS_S),
        ),
    ),
    Rule(
        id="dataloader-head-of-line",
        judge=loading.head_of_line,
        says="Batches are ready, but they wait for an earlier one that takes long.",
        sees="The training thread waits while finished batches lie behind the one that is next in order.",
        costs="That wait, as far as the workers could have kept up on average.",
        mend="`DataLoader(..., in_order=False)` (torch 2.6), or items that take about equally long.",
        silent="`in_order=False` is set.",
        limits=(limits.LOST,),
    ),
    Rule(
        id="unpinned-copies",
        judge=copying.unpinned_copies,
        says="Batches are copied to the GPU out of pageable memory.",
        sees="A line copies to the GPU, most of it out of memory that is not pinned, and stands still meanwhile.",
        costs="The time that the line blocks, but no more than the GPU idles; where the idle time is not known, the "
        "quarter of it that pinned memory is known to save.",
        mend='`DataLoader(..., pin_memory=True)` and `batch.to("cuda", non_blocking=True)`.',
        silent="The GPU works meanwhile.",
        limits=(limits.LOST_MEASURED, limits.PINNED_GAIN),
    ),
    Rule(
        id="blocking-copies",
        judge=copying.blocking_copies,
        says="Copies out of pinned memory wait for their end all the same.",
        sees="A line copies to the GPU out of pinned memory, mostly without `non_blocking=True`.",
        costs="The time that the line blocks, but no more than the GPU idles; an upper bound where that is not known.",
        mend='`batch.to("cuda", non_blocking=True)`.',
        silent="The GPU works meanwhile.",
        limits=(limits.LOST_MEASURED,),
    ),
    Rule(
        id="sync-every-step",
        judge=copying.sync_every_step,
        says="A line makes the program wait for the GPU at every step.",
        sees="`item`, `tolist`, `numpy`, `cpu`, a copy to the CPU (`to`, `copy_`), a condition on a tensor, `nonzero` "
        "or `synchronize` on one line.",
        costs="The time that the line blocks, but no more than the GPU idles: it is the gap behind a wait that is "
        "lost, not the wait. An upper bound where the idle time is not known.",
        mend="`total += loss.detach()`, and `total.item()` every N steps.",
        silent="The GPU works meanwhile; the line is reached less often than every other step; copies go to pinned "
        "memory with `non_blocking=True`; or it is `GradScaler.step` that looks for infinities, as it must.",
        limits=(limits.LOST_MEASURED, limits.EVERY_STEP),
    ),
    Rule(
        id="tensor-built-on-cpu",
        judge=copying.tensor_built_on_cpu,
        says="A tensor is made on the CPU, only to be moved to the GPU.",
        sees="The text of the line that moves it: what it moves comes from `zeros`, `ones`, `rand`, `tensor` "
        "or their like, in the same function.",
        costs="The time that the copy blocks. Making it on the CPU comes on top and is not counted.",
        mend='`torch.zeros(n, device="cuda")`.',
        silent="It happens less often than at every other step.",
        limits=(limits.SMALL_LOSS, limits.EVERY_STEP),
    ),
    Rule(
        id="dataparallel",
        judge=copying.dataparallel,
        says="`nn.DataParallel` drives several GPUs from one process.",
        sees="The line that makes it, on a node with more than one GPU.",
        costs="The copies between GPUs that the program makes itself. Those of DataParallel are made by torch's C++, "
        "which is not seen, and that one Python drives all GPUs is not counted: often 0, and never too much.",
        mend="`DistributedDataParallel` with one process per GPU: `gpulaunch --nproc auto train.py`.",
        silent="There is one GPU, or none.",
    ),
    Rule(
        id="fp32-on-tensor-cores",
        judge=copying.fp32_on_tensor_cores,
        says="The GPU multiplies in 32 bits, and its tensor cores idle.",
        sees="Parameters are float32 without autocast, the float32 pipes are in use, and the tensor pipes are not.",
        costs="Half of the time in which the float32 pipes are in use: a bound, to be tried.",
        mend='`torch.autocast("cuda", torch.bfloat16)`, or `torch.set_float32_matmul_precision("high")`.',
        silent="The GPU idles half of the time, or its counters are not known (before Hopper).",
        limits=(limits.LOST, limits.PIPE_IDLE, limits.GEMM_BUSY),
    ),
    Rule(
        id="host-memory-growth",
        judge=holding.host_memory_growth,
        says="A rank, or its dataloader workers, take more host memory with every step.",
        sees="A robust line through the least anonymous memory of each window since the attempt began, still rising at "
        "its end; with it the batches in shared memory that the rank has not freed.",
        costs="No time until the memory is full: `hours_to_full` in the evidence.",
        mend="`losses.append(loss.item())`, a bound for every cache; datasets that hold arrays, not Python objects.",
        silent="It would take more than a week to fill what is left; or what grows is the page cache, by files that "
        "are mapped. Workers: the kernel does not tell their anonymous memory (`Pss_Anon` in `smaps_rollup`).",
        limits=(limits.GROWN_BYTES, limits.GROWN_POINTS, limits.MOST_TO_FULL_S),
    ),
    Rule(
        id="gpu-memory-growth",
        judge=holding.gpu_memory_growth,
        says="Tensors on the GPU become more with every step.",
        sees="The same line through what torch has allocated at its lowest.",
        costs="No time until the memory is full: `hours_to_full` in the evidence.",
        mend="`total += loss.detach()`: a loss that is kept keeps its graph.",
        silent="It would take more than a week to fill what is left: what the allocator keeps for later, and of what "
        "is free on the card each rank's part.",
        limits=(limits.GROWN_BYTES, limits.GROWN_POINTS, limits.MOST_TO_FULL_S),
    ),
    Rule(
        id="gpu-memory-fragmented",
        judge=holding.gpu_memory_fragmented,
        says="GPU memory is reserved and free, and still does not fit what is asked for.",
        sees="The allocator had to give everything back and try again, and much of its memory is in parts of blocks.",
        costs="Not timed; each retry waits for the GPU.",
        mend="`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or batches of one shape.",
        silent="No allocation was retried.",
        limits=(limits.FRAGMENTED,),
    ),
    Rule(
        id="shm-nearly-full",
        judge=holding.shm_nearly_full,
        says="The shared memory that carries batches is nearly full.",
        sees="`/dev/shm` of this node, and the batches in it that are on their way to ranks.",
        costs="No time: full means that a rank dies of a bus error.",
        mend="A larger `/dev/shm` (a container gets 64 MiB by default); fewer workers, less `prefetch_factor`.",
        silent="No rank has workers.",
        limits=(limits.SHM_FULL,),
    ),
    Rule(
        id="straggler",
        judge=straggling.straggler,
        says="One rank is late at every step, and the others wait for it.",
        sees="It takes longer than the median rank for what it does alone, by the program's clock or the GPU's, and "
        "waits less where ranks meet.",
        costs="What it takes longer than the median rank; a slower backward too, where it is known how much of DDP's "
        "communication was exposed. The cause is in the evidence: input, copies, compute, throttle, CPU contention, "
        "garbage collection, or other.",
        mend="By the cause.",
        silent="The others do not wait for it; or it is late with its batches, and they wait for theirs as long: then "
        "loading is to be mended, whoever it holds up most. Ranks of other nodes are not compared.",
        limits=(limits.LOST, limits.STRAGGLES_S, limits.THROTTLED, limits.SLOW_WINDOW_STEPS),
    ),
    Rule(
        id="checkpoint-stall",
        judge=pausing.checkpoint_stall,
        says="Training stands still while checkpoints are written.",
        sees="The phase `checkpoint`: `torch.save`, `torch.distributed.checkpoint`, `gpulaunch.checkpoint`.",
        costs="That phase, spread over all steps of the long window.",
        mend="Save less often, or `torch.distributed.checkpoint.async_save`.",
        silent="There were less than three saves: how often they come is not known yet.",
        limits=(limits.LOST_MEASURED, limits.SAVES, limits.LONG_S),
    ),
    Rule(
        id="logging-stall",
        judge=pausing.logging_stall,
        says="The training thread spends its time in logging.",
        sees="Stack samples inside of `logging`, TensorBoard, wandb, tqdm and their like, called from one line.",
        costs="The share of the samples, times the step; two a second at most, so it takes a minute or two.",
        mend="Log every N steps, or through `logging.handlers.QueueHandler`.",
        silent="There are no stack samples (no py-spy, or no right to trace), or too few to tell.",
        limits=(limits.LOST_MEASURED, limits.LOGGED_SAMPLES, limits.LOGGED_ERROR, limits.LONG_S),
    ),
    Rule(
        id="omp-oversubscribed",
        judge=machine.omp_oversubscribed,
        says="The ranks compute with more threads than there are cores.",
        sees="`torch.get_num_threads()` of all ranks against the cores, and threads that wait for one, long and often.",
        costs="A thread gets on while it has a core and the one that it waits for has one: of the computing, "
        "`1 - (1 - waiting)^2` is lost. An estimate: how threads wait for each other is not seen.",
        mend="Leave `OMP_NUM_THREADS` to gpulaunch (cores / ranks); no `torch.set_num_threads`.",
        silent="They do not wait for cores: threads that only exist cost nothing.",
        limits=(limits.THREADS, limits.BUSY, limits.CROWDED, limits.CROWDED_NODE),
    ),
    Rule(
        id="gc-pauses",
        judge=pausing.gc_pauses,
        says="Python's garbage collector takes a good part of the steps.",
        sees="The phase `gc` of the steps; and the line that asks for collections, where half of it or more is its.",
        costs="That phase.",
        mend="`gc.collect(); gc.freeze()` once after setting up; no `gc.collect()` in the loop.",
        silent="",
        limits=(limits.LOST_MEASURED, limits.LONG_S),
    ),
    Rule(
        id="recompiles",
        judge=pausing.recompiles,
        says="`torch.compile` compiles again and again.",
        sees="The phase `compile` of the steps, in window after window.",
        costs="That phase.",
        mend="Pad to a few shapes, `drop_last=True`, or `dynamic=True`; `TORCH_LOGS=recompiles` says what changed.",
        silent="It is the warm-up, or a single compilation.",
        limits=(limits.LOST_MEASURED, limits.WARM_UP_STEPS),
    ),
    Rule(
        id="throttled",
        judge=machine.throttled,
        says="A GPU is slowed down against heat, or for want of power.",
        sees="The driver's own time counters. A power cap is no fault: every card that is well used runs into it.",
        costs="The share of the time, times how much slower its clock is than that of the node's other cards.",
        mend="Cooling, power cables, what else runs in that rack.",
        silent="",
        limits=(limits.THROTTLED,),
    ),
    Rule(
        id="numa-mismatch",
        judge=machine.numa_mismatch,
        says="A rank runs on cores of another NUMA node than its GPU's.",
        sees="The cores that it may use, and the node of the GPU's PCIe slot.",
        costs="Not known before it is tried; the evidence has what the rank copies.",
        mend="`gpulaunch --numa-binding node`.",
        silent="The machine has one node, or the GPU's is not known.",
    ),
)


def markdown() -> str:
    """Give the rules as the page docs/findings.md."""
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
        f"A window is {limits.WINDOW_S} and {limits.WINDOW_STEPS} at least, after {limits.WARM_UP_STEPS} of warm-up;",
        f"where steps are slow, {limits.SLOW_WINDOW_S} and {limits.SLOW_WINDOW_STEPS}.",
        f"A finding appears after {limits.APPEARS} in a row and goes after {limits.GONE} without it.",
        "No seconds: it costs none, or none yet. Where the seconds are a bound, or nobody knows why a rank is late,",
        "the advice ends with the `gpulaunch trace` that shows more.",
        "",
        "| rule | what is wrong |",
        "|---|---|",
        *(f"| [`{rule.id}`](#{rule.id}) | {rule.says} |" for rule in RULES),
    ]
    for rule in RULES:
        lines += ["", f"## {rule.id}", "", rule.says, ""]
        lines.append(f"- **Found by**: {rule.sees}")
        lines.append(f"- **Seconds**: {rule.costs}")
        lines.append(f"- **Change**: {rule.mend}")
        if rule.silent:
            lines.append(f"- **Silent when**: {rule.silent}")
        lines += [f"- Limit: {limit.name} {limit}; {limit.why}." for limit in rule.limits]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
