"""The table of all rules: id, function, and the text of its page.

`docs/findings.md` is generated from it: python -m gpulaunch.profiler.analysis.rules > docs/findings.md
"""

from __future__ import annotations

import sys
from typing import Final

from gpulaunch.profiler.analysis import (
    collective_rules,
    compute_rules,
    dispatch_rules,
    fetch_rules,
    gil_rules,
    line_rules,
    loader_rules,
    machine_rules,
    memory_rules,
    pause_rules,
    precision_rules,
    straggler_rules,
    thresholds,
    transfer_rules,
)
from gpulaunch.profiler.analysis.rule import Rule


def _listed(text: str, *items: str) -> str:
    """Return the text with a list below it, as Markdown has it inside of a list."""
    return "\n  - ".join((f"{text}:", *items))


RULES: Final = (
    Rule(
        id="dataloader-too-few-workers",
        judge=loader_rules.too_few_workers,
        problem="Training waits for batches that more workers would prepare in parallel.",
        evidence="The workers are always busy (or there are none), and they compute on free cores or wait for "
        "something other than storage.",
        costs="The current step time minus the step time with the advised workers: `max(own, batches * fetch / "
        "workers, cpu / cores)`, where `own` is the step without its data wait (if there are no workers, with the "
        "transfer of batches from one) and `cpu` the CPU time of all ranks per step. Without workers, the part of the "
        "data wait in the line that holds most of the fetches, if that is more: workers take cores from training.",
        fix="`DataLoader(..., num_workers=N, persistent_workers=True)`; workers that compute need a free core each.",
        suppressed="Workers already wait for cores, or at a lock; or workers that compute would find no free one; "
        "fetches are shorter than the overhead of a worker; the model predicts too small a gain; or there are none, "
        "and the dataset holds an open file, archive, database or socket, which they would share.",
        limits=(
            thresholds.LOST,
            thresholds.BUSY,
            thresholds.CROWDED,
            thresholds.CROWDED_NODE,
            thresholds.WORKER_PAYS_S,
            thresholds.TRANSFER_S,
            thresholds.TENSOR_S,
        ),
    ),
    Rule(
        id="dataloader-too-many-workers",
        judge=loader_rules.too_many_workers,
        problem="Workers compete for cores, or communication with them costs more than they save.",
        evidence="They spend their fetches in the run queue, and there are more than two of them per core; or batches "
        "are ready, and unpickling and mapping them takes longer than preparing them; or the workers compute more "
        "outside of their fetches, where a thread of theirs pickles the batches.",
        costs="By the same model, with as many workers as there are cores for them; with none at all if the transfer "
        "dominates. If all cores are busy anyway, 0: fewer workers then save only memory.",
        fix="`num_workers` as advised; or a `collate_fn` that returns a few large tensors per batch instead of "
        "hundreds.",
        suppressed="The kernel does not report the run queue (`schedstat`), or other processes use the cores.",
        limits=(thresholds.CROWDED, thresholds.SURPLUS, thresholds.HANDOVER, thresholds.LOST),
    ),
    Rule(
        id="dataloader-slow-storage",
        judge=loader_rules.slow_storage,
        problem="Workers are blocked by reads from storage.",
        evidence="They are always busy, blocked for most of that time, and most of what they read was not in memory.",
        costs="By the same model, with fetches that only compute, outside of the kernel.",
        fix="Copy the data to a local disk or into memory first; use fewer and larger files, read sequentially.",
        suppressed="The reads are served from the page cache (storage is then not the cause), or workers are idle.",
        limits=(thresholds.LOST, thresholds.BUSY, thresholds.STORAGE),
    ),
    Rule(
        id="dataloader-slow-transform",
        judge=loader_rules.slow_transform,
        problem="Preparing samples takes more CPU time than the cores provide.",
        evidence="Workers always compute, or wait for a core to compute on, and training would still wait for as many "
        "of them as there are cores for. Or there "
        "are no workers, the training thread computes while it waits for its batches (as the CPU time of its process "
        "shows), and no core is free for a worker. The line is that of the dataset or the collate function that holds "
        "a third of the sampled fetches or more; otherwise the DataLoader's.",
        costs="The whole data wait: the saving if preparation keeps up with training, and, without a GPU, the time "
        "in which the training thread waited for a core. Without workers this is an upper bound of the data wait: "
        "nothing hides the remaining cost of a cheaper transform.",
        fix="Preprocess once and store the result; decode and augment on the GPU; resize before augmenting.",
        suppressed="There are cores for enough workers, which are then the cheaper fix; or other processes use the "
        "cores. Without workers: fetches may also wait for storage, or are shorter than the overhead of a worker.",
        limits=(
            *(thresholds.LOST, thresholds.BUSY, thresholds.CROWDED, thresholds.CROWDED_NODE),
            *(thresholds.COMPUTES, thresholds.WORKER_PAYS_S),
            *(thresholds.HOLDS_FETCHES, thresholds.INNER_LINE, thresholds.SAMPLES_OF_A_LINE),
        ),
    ),
    Rule(
        id="dataloader-head-of-line",
        judge=loader_rules.head_of_line,
        problem="Finished batches wait for an earlier one that takes longer.",
        evidence="The training thread waits while finished batches are queued behind the next one in order, or all "
        "workers but one have finished what they were asked for.",
        costs="That wait, as far as the workers could have kept up on average.",
        fix="`DataLoader(..., in_order=False)` (torch 2.6), or samples that take about equally long.",
        suppressed="`in_order=False` is set.",
        limits=(thresholds.LOST,),
    ),
    Rule(
        id="dataloader-lock",
        judge=loader_rules.locked_workers,
        problem="The workers wait for each other at a lock.",
        evidence="They are always busy, blocked for most of that time, and stack samples show them in a lock of "
        "`multiprocessing`, of a file, or of a package for such locks.",
        costs="By the same model, with fetches that do not wait for the lock: a bound, as the lock may be needed.",
        fix="A file handle, connection or archive for each worker, opened in `worker_init_fn`; a shorter section under "
        "the lock.",
        suppressed="There are few stack samples of the workers.",
        limits=(thresholds.LOST, thresholds.BUSY, thresholds.HOLDS_FETCHES, thresholds.SAMPLES_OF_A_LINE),
    ),
    Rule(
        id="dataloader-pinned-workers",
        judge=loader_rules.pinned_workers,
        problem="The workers may only run on a few cores, and wait there for each other.",
        evidence="They spend their fetches in the run queue, and the affinity masks of all workers of the node have "
        "fewer cores than there are workers, and than the node has.",
        costs="By the same model, with fetches that do not wait for a core.",
        fix="Remove what binds them (`taskset`, `OMP_PROC_BIND`, a library that sets the affinity when it is "
        "imported), or call `os.sched_setaffinity(0, range(os.cpu_count()))` in `worker_init_fn`.",
        suppressed="The workers do not wait for a core.",
        limits=(thresholds.CROWDED, thresholds.LOST),
    ),
    Rule(
        id="dataloader-workers-restarted",
        judge=loader_rules.restarted_workers,
        problem="Every epoch starts its workers anew.",
        evidence="The creation of the iterator and the wait for the first batch of each epoch in the long window, with "
        "`persistent_workers=False`, or with a DataLoader that a line constructs for every epoch.",
        costs="These waits, without a fetch for each; and as much as the step after each start takes longer, with page "
        "faults, because the training thread copies what it writes to: a fork shares all memory with the workers.",
        fix="`DataLoader(..., persistent_workers=True)`, constructed once: outside of the loop over epochs, and with "
        "Lightning without `reload_dataloaders_every_n_epochs`.",
        suppressed="There was one epoch so far; or the program changes the dataset between epochs, or tells it the "
        "epoch (`set_epoch`), which workers that persist would not hear.",
        limits=(thresholds.EPOCHS, thresholds.LOST_MEASURED, thresholds.PAGE_FAULT_US, thresholds.LONG_S),
    ),
    Rule(
        id="unpinned-copies",
        judge=transfer_rules.unpinned_copies,
        problem="Batches are copied to the GPU from pageable memory.",
        evidence="A line copies to the GPU, mostly from memory that is not pinned, and blocks meanwhile.",
        costs="The time that the line blocks, at most the idle time of the GPU; if the idle time is unknown, the "
        "quarter of it that pinned memory is known to save.",
        fix='`DataLoader(..., pin_memory=True)` and `batch.to("cuda", non_blocking=True)`.',
        suppressed="The GPU is busy meanwhile.",
        limits=(thresholds.LOST_MEASURED, thresholds.PINNED_GAIN),
    ),
    Rule(
        id="blocking-copies",
        judge=transfer_rules.blocking_copies,
        problem="Copies from pinned memory block the training thread unnecessarily.",
        evidence="A line copies to the GPU from pinned memory, mostly without `non_blocking=True`.",
        costs="The time that the line blocks, at most the idle time of the GPU; an upper bound if that is unknown.",
        fix='`batch.to("cuda", non_blocking=True)`.',
        suppressed="The GPU is busy meanwhile.",
        limits=(thresholds.LOST_MEASURED,),
    ),
    Rule(
        id="sync-every-step",
        judge=transfer_rules.sync_every_step,
        problem="A line synchronizes with the GPU at every step.",
        evidence="`item`, `tolist`, `numpy`, `cpu`, a copy to the CPU (`to`, `copy_`), a condition on a tensor, "
        "`nonzero` or `synchronize` on one line.",
        costs="The time that the line blocks, at most the idle time of the GPU: the loss is the gap after the wait, "
        "not the wait itself. An upper bound if the idle time is unknown.",
        fix="`total += loss.detach()`, and `total.item()` every N steps.",
        suppressed="The GPU is busy meanwhile; the line runs less often than every other step; copies go to pinned "
        "memory with `non_blocking=True`; or `GradScaler.step` checks for infinities, as it must.",
        limits=(thresholds.LOST_MEASURED, thresholds.EVERY_STEP),
    ),
    Rule(
        id="tensor-built-on-cpu",
        judge=transfer_rules.tensor_built_on_cpu,
        problem="A tensor is created on the CPU only to be moved to the GPU.",
        evidence="The source of the line that moves it: the tensor comes from `zeros`, `ones`, `rand`, `tensor` or "
        "similar in the same function.",
        costs="The time that the copy blocks. Creating the tensor on the CPU is not included.",
        fix='`torch.zeros(n, device="cuda")`.',
        suppressed="It happens less often than every other step.",
        limits=(thresholds.SMALL_LOSS, thresholds.EVERY_STEP),
    ),
    Rule(
        id="dataparallel",
        judge=transfer_rules.dataparallel,
        problem="`nn.DataParallel` drives several GPUs from one process.",
        evidence="The line that creates it, on a node with more than one GPU.",
        costs="The copies between GPUs that the program makes itself. Copies by DataParallel are made by torch's C++ "
        "code and are not observed, and the cost of one Python process driving all GPUs is not included: often 0, and "
        "never an overestimate.",
        fix="`DistributedDataParallel` with one process per GPU: `gpulaunch --nproc auto train.py`.",
        suppressed="There is at most one GPU.",
    ),
    Rule(
        id="fp32-on-tensor-cores",
        judge=precision_rules.fp32_on_tensor_cores,
        problem="The GPU multiplies in 32 bits while its tensor cores are idle.",
        evidence="Parameters are float32 without autocast, the float32 pipes are in use, and the tensor pipes are not.",
        costs="Half of the time in which the float32 pipes are in use: an upper bound; measure the effect.",
        fix='`torch.autocast("cuda", torch.bfloat16)`, or `torch.set_float32_matmul_precision("high")`.',
        suppressed="The GPU is idle half of the time, or its counters are unavailable (before Hopper).",
        limits=(thresholds.LOST, thresholds.PIPE_IDLE, thresholds.GEMM_BUSY),
    ),
    Rule(
        id="float64-parameters",
        judge=precision_rules.float64_parameters,
        problem="The model is trained in 64 bits.",
        evidence="Most parameters of the optimizer are float64, while torch's default dtype is float32.",
        costs="Half of forward, backward and optimizer: an estimate, as it is not known what limits them; measure the "
        "effect.",
        fix="`torch.as_tensor(array, dtype=torch.float32)` for data from NumPy, which is float64 there by default; no "
        "`model.double()`.",
        suppressed="`torch.set_default_dtype(torch.float64)` was called, an optimizer is `LBFGS`, or the model "
        "factorises matrices: signs that the precision is needed.",
        limits=(thresholds.LOST, thresholds.DOUBLE_GAIN),
    ),
    Rule(
        id="padded-batches",
        judge=compute_rules.padded_batches,
        problem="Batches are padded to a width that none of their samples needs.",
        evidence="The `attention_mask` of batches, looked at now and then in the rank: columns that are 0 for "
        "every sample.",
        costs="The share of these columns, of the time in forward and backward; with a GPU, of its busy time. "
        "An estimate: attention saves more.",
        fix="Pad each batch to its longest sample: `padding=True`, or a collator that pads "
        '(`DataCollatorWithPadding`), not `padding="max_length"`. `group_by_length` makes batches of '
        "similar lengths.",
        suppressed="`torch.compile` is used, which wants constant shapes; the mask is on the GPU already, or is not "
        "named so; embeddings look up shorter sequences, as the program cuts its batches; or the utilisation of the "
        "GPU is not known.",
        limits=(thresholds.PADDED, thresholds.LOST),
    ),
    Rule(
        id="gradients-unused",
        judge=compute_rules.gradients_unused,
        problem="Backward computes gradients of parameters that nothing updates.",
        evidence="The autograd graph, read a few times in a run: parameters that no optimizer has, or only with a "
        "learning rate of 0, unchanged since seconds before.",
        costs="Their part of backward, by the number of elements; half of it where backward must pass through "
        "them to others; and of the optimizer, if it has them. With a GPU, of two thirds of its busy time. An "
        "estimate.",
        fix="`with torch.no_grad():` around the teacher or the frozen part, or `requires_grad_(False)` for "
        "its parameters; if it is to be trained, give them to the optimizer.",
        suppressed="No optimizer of torch has any parameter of the graph (DeepSpeed, Apex), or some are sharded "
        "(FSDP); the graph has 4,096 nodes or more; or the utilisation of the GPU is not known.",
        limits=(thresholds.LOST,),
    ),
    Rule(
        id="targets-ignored",
        judge=compute_rules.targets_ignored,
        problem="A model computes scores of rows that its loss ignores.",
        evidence="The autograd graph, read a few times in a run: the rows that the last linear layer gives, and those "
        "that the cross-entropy is given; and of one batch in eight the share of targets that are -100. The line is "
        "the one that gives the scores.",
        costs="Of the head, the share of the rows that are ignored: the samples of its line and of the loss, with as "
        "large a part of backward, but no more than its share of the products of the model; where the line calls a "
        "whole model, and with a GPU, of whose busy time it is, by the products alone. An estimate.",
        fix="`head(hidden[targets != -100])`, and the loss of the targets that are left.",
        suppressed="The loss is computed by a library; something else in the graph uses the scores, or another head "
        "has such a loss; the batch is not from a DataLoader of torch, or marks what is ignored by another number; the "
        "graph has 4,096 nodes or more; or the utilisation of the GPU is not known.",
        limits=(thresholds.ALL_TARGETS, thresholds.LOST),
    ),
    Rule(
        id="gradients-cleared",
        judge=compute_rules.gradients_cleared,
        problem="A backward pass goes on through another model, whose gradients are cleared before they are used.",
        evidence="The autograd graphs of passes that follow each other, read a few times in a run: at the next pass, "
        "the gradients of a part that only one optimizer needs are `None`, and only another one has stepped since.",
        costs="That part of backward, by the number of elements. With a GPU, of two thirds of its busy time. An "
        "estimate.",
        fix="`discriminator(fake.detach())` in the discriminator's pass.",
        suppressed="Backward must pass through the part to reach other parameters, as a generator's pass through the "
        "discriminator; or gradients are set to zero (`set_to_none=False`); or as for `gradients-unused`.",
        limits=(thresholds.LOST,),
    ),
    Rule(
        id="backward-repeated",
        judge=compute_rules.backward_repeated,
        problem="Several backward passes of a step go through the same part of the graph.",
        evidence="The autograd graph, read a few times in a run: nodes of a pass that was kept with "
        "`retain_graph=True` are in the next one, and nothing has changed the gradients between the two.",
        costs="The share of nodes that an earlier pass had gone through, of backward. With a GPU, of two thirds of its "
        "busy time. An estimate.",
        fix="Add the losses up, and call `backward` once, unless you need the gradients of each loss by themselves. If "
        "the state of a recurrent network leads to earlier windows, `hidden = hidden.detach()`.",
        suppressed="The gradients are set to zero or taken away between the passes, or parameters are frozen for one "
        "of them; what is gone through again is less than half of a pass, as what makes the weights of a layer; the "
        "gradients are computed with `create_graph=True`; the graph has 4,096 nodes or more; "
        "or the utilisation of the GPU is not known.",
        limits=(thresholds.LOST,),
    ),
    Rule(
        id="embedding-gradient-dense",
        judge=compute_rules.embedding_gradient_dense,
        problem="The optimizer updates all rows of an embedding, of which a batch looks up few.",
        evidence="The autograd graph, read a few times in a run: embeddings with dense gradients that have more "
        "rows than the batch has looked up.",
        costs="The optimizer's time, times the share of such rows among all parameters. An estimate.",
        fix="`nn.Embedding(..., sparse=True)`, with `torch.optim.SparseAdam`, `Adagrad` or `SGD` for these "
        "parameters. Momentum and weight decay then apply to the rows that are looked up only.",
        suppressed="The weight is also used otherwise (an output layer that shares it), the rank has a GPU, or "
        "parameters are sharded (FSDP).",
        limits=(thresholds.LOST,),
    ),
    Rule(
        id="host-memory-growth",
        judge=memory_rules.host_memory_growth,
        problem="The host memory of a rank or its dataloader workers grows with every step.",
        evidence="A robust line through the minimum of anonymous memory in each window since the attempt started, "
        "still rising at its end; it includes batches in shared memory that the rank has not freed.",
        costs="No time until the memory is full: `hours_to_full` in the evidence.",
        fix="`losses.append(loss.item())`; a bound for every cache; datasets that hold arrays instead of Python "
        "objects.",
        suppressed="It would take more than a week to fill the remaining memory; the page cache of mapped files grows; "
        "a rank fills what it has allocated before (`VmSize` does not grow); or the first epoch is not over, and what "
        "grows until then, as a cache of the dataset does, takes less than a quarter of the remaining memory. For "
        "pages that workers copy: the kernel does not report them (`Pss_Anon` in `smaps_rollup`).",
        limits=(
            *(thresholds.GROWN_BYTES, thresholds.GROWN_POINTS, thresholds.MOST_TO_FULL_S),
            *(thresholds.URGENT_S, thresholds.URGENT_POINTS, thresholds.URGENT_GROWN, thresholds.FITS),
        ),
    ),
    Rule(
        id="gpu-memory-growth",
        judge=memory_rules.gpu_memory_growth,
        problem="The memory of tensors on the GPU grows with every step.",
        evidence="The same line, through the minimum that torch has allocated.",
        costs="No time until the memory is full: `hours_to_full` in the evidence.",
        fix="`total += loss.detach()`: a loss that is kept keeps its graph.",
        suppressed="It would take more than a week to fill the remaining memory: what the allocator has cached, and "
        "each rank's share of what is free on the GPU.",
        limits=(
            *(thresholds.GROWN_BYTES, thresholds.GROWN_POINTS, thresholds.MOST_TO_FULL_S),
            *(thresholds.URGENT_S, thresholds.URGENT_POINTS, thresholds.URGENT_GROWN),
        ),
    ),
    Rule(
        id="gpu-memory-fragmented",
        judge=memory_rules.gpu_memory_fragmented,
        problem="GPU memory is reserved and free, but too fragmented for what is requested.",
        evidence="The allocator had to release its cache and retry, and much of its memory is in split blocks.",
        costs="Not measured; each retry synchronizes with the GPU.",
        fix="`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or batches of one shape.",
        suppressed="No allocation was retried.",
        limits=(thresholds.FRAGMENTED,),
    ),
    Rule(
        id="shm-nearly-full",
        judge=memory_rules.shm_nearly_full,
        problem="The shared memory that carries batches is nearly full.",
        evidence="`/dev/shm` of this node, and the batches in it that are in transit to ranks.",
        costs="No time; once it is full, a rank is killed by SIGBUS.",
        fix="A larger `/dev/shm` (64 MiB by default in a container); fewer workers, a smaller `prefetch_factor`.",
        suppressed="No rank has workers.",
        limits=(thresholds.SHM_FULL,),
    ),
    Rule(
        id="straggler",
        judge=straggler_rules.straggler,
        problem="One rank is late at every step, and the other ranks wait for it.",
        evidence="Its own work takes longer than that of the median rank, by the program's clock or the GPU's, and it "
        "waits less at synchronization points.",
        costs="Its excess over the median rank; also a slower backward, if the exposed part of DDP's communication is "
        "known and it is much slower, or forward is as much; less what the others compute more if all share it alike. "
        "The cause is in the evidence: input, copies, compute, throttle, CPU contention, garbage collection, or other. "
        "Of compute, the line that only this rank was sampled in, if that takes half of its excess.",
        fix="Depends on the cause.",
        suppressed="The other ranks do not wait for it; or a line that only this rank has takes most of its excess: "
        "that line is then the finding; or it is late because of its data wait, and they wait for their batches "
        "equally long, or their workers are equally slow: data loading is then the cause on all ranks; or no other "
        "rank fetches batches; or the ranks have parts of one model, and work in turns or have more of it than others; "
        "or it is late because `ZeroRedundancyOptimizer` gave it the largest parameter. Ranks on other nodes are not "
        "compared.",
        limits=(
            *(thresholds.LOST, thresholds.STRAGGLES_S, thresholds.SUPPLY_DIFFERS),
            *(thresholds.THROTTLED, thresholds.SLOW_WINDOW_STEPS, thresholds.IN_TURNS),
            thresholds.SAMPLES_OF_ONE_RANK,
        ),
    ),
    Rule(
        id="dataloader-lists",
        judge=fetch_rules.converted_lists,
        problem="The samples of a dataset have lists of Python numbers, which are converted one by one.",
        evidence="Stack samples of fetches inside torch's `default_collate`, or that of Transformers, unless they "
        "stack tensors.",
        costs="Their share of the data wait; with workers, of the step as far as it waits for these.",
        fix='NumPy arrays or tensors as the samples; with the package datasets, `with_format("torch")`.',
        suppressed="The program's own function collates: `dataloader-slow-transform` names its line.",
        limits=(thresholds.HOLDS_FETCHES, thresholds.SAMPLES_OF_A_LINE, thresholds.LOST),
    ),
    Rule(
        id="dataloader-samples-dropped",
        judge=fetch_rules.dropped_samples,
        problem="An iterable dataset prepares the samples of all ranks or workers, and drops those of the others.",
        evidence="Stack samples of fetches in lines of a loop before `if number % world_size != rank: continue` or the "
        "like, or of a generator that `itertools.islice` takes every n-th sample of; only where neither the choice nor "
        "another sample needs what they compute, by the words of the source.",
        costs="Of their share of the data wait the part of the others: 1 - 1 / ranks, or workers, or both; with "
        "workers, of the step as far as it waits for these.",
        fix="Decide which samples are its own before they are read or decoded; or give each its own files.",
        suppressed="There is one rank or worker. The lines hold less than a third of the fetches.",
        limits=(thresholds.HOLDS_FETCHES, thresholds.SAMPLES_OF_A_LINE, thresholds.LOST),
    ),
    Rule(
        id="dataloader-one-rank",
        judge=dispatch_rules.one_rank_fetches,
        problem="One rank fetches the batches of all ranks and sends them.",
        evidence="Only this rank has a DataLoader that is asked for batches, and in every step all ranks call a "
        "collective at the same line. Accelerate does so with an `IterableDataset` (`DataLoaderDispatcher`).",
        costs="The rank's data wait, less the part that is its own, and its time in the collectives that send.",
        fix="A dataset that yields only the part of its rank, and a `DataLoader` on every rank.",
        suppressed="DistributedDataParallel does not have all ranks: those that share a layer need the same batch. "
        "Ranks on other nodes are not compared. With FSDP, whose own collectives are at lines of the program, too.",
        limits=(thresholds.LOST,),
    ),
    Rule(
        id="small-collectives",
        judge=collective_rules.small_collectives,
        problem="Every step has several collectives that transfer only a few numbers.",
        evidence="Calls of `torch.distributed` by the program with a tensor of at most 1 KiB, with Python objects, or "
        "a barrier; and how long they block.",
        costs="The time in them on the rank that waits least, without the first one of each step: that one waits for "
        "late ranks, which a single call would, too.",
        fix="`torch.stack` the numbers and reduce them once; for a log, every N steps.",
        suppressed="torch itself makes the calls (SyncBatchNorm, gradient clipping of FSDP), or an `autograd.Function` "
        "of the model does; they are `send` or `recv`; each needs what the last one of its loop has reduced, by "
        "the source (Sinkhorn's algorithm); or the optimizer is `LBFGS`, whose passes need each other.",
        limits=(thresholds.SMALL_COLLECTIVES, thresholds.LOST_MEASURED),
    ),
    Rule(
        id="redundant-all-reduce",
        judge=collective_rules.redundant_all_reduce,
        problem="The program reduces what is the same on all ranks already, such as gradients that "
        "DistributedDataParallel has averaged.",
        evidence="A few values of float32 tensors on a CPU before and after calls of `all_reduce`, at the line that "
        "reduces most: after each call that was read, they are the same, or the same whole multiple.",
        costs="The time in the calls of that line on the rank that waits least.",
        fix="Remove it: when `backward` of DistributedDataParallel returns, the gradients are the mean of all ranks. "
        "Without it, the ranks have the same samples: `DistributedSampler`.",
        suppressed="It is not so on all ranks of the node, or there is one; the tensors are on a GPU, where a call "
        "takes no time of the program's; or it is asynchronous.",
        limits=(thresholds.LOST_MEASURED,),
    ),
    Rule(
        id="fsdp-small-units",
        judge=collective_rules.fsdp_small_units,
        problem="FSDP shards single layers, and gathers very few parameters at a time.",
        evidence="Its gathers per step, their mean size, the tensors of a unit, and how long its collectives block.",
        costs="The time in its gathers and reductions on the rank that waits least, without the first one of each "
        "step, less the share that units of 256 KiB would keep.",
        fix="`fully_shard(block)` for each block, then `fully_shard(model)`; with FSDP1, an `auto_wrap_policy` of "
        "blocks.",
        suppressed="FSDP trains on a GPU, where its collectives are not on the training thread; or FSDP1 makes one "
        "parameter of each unit (`use_orig_params=False`): how many it has is not known then.",
        limits=(
            *(thresholds.FSDP_GATHERS, thresholds.FSDP_PARAMETERS),
            *(thresholds.FSDP_SMALL_KIB, thresholds.FSDP_UNIT_KIB, thresholds.LOST),
        ),
    ),
    Rule(
        id="reduced-in-accumulation",
        judge=collective_rules.reduced_in_accumulation,
        problem="DistributedDataParallel or FSDP reduces the gradients in every backward pass, although they are "
        "accumulated.",
        evidence="The iterations that DistributedDataParallel has logged, compared with the steps of the optimizer; "
        "the backward passes in which FSDP reduces, as well.",
        costs="The exposed communication of all reductions but one. Communication that overlaps with backward costs "
        "nothing on a GPU; on the CPU it is included if all cores are busy, as it then takes one from backward. Of "
        "FSDP, the measured time of a reduction, for all but one.",
        fix="`with model.no_sync():` around the forward and backward passes of all but the last micro-batch; with "
        "Accelerate, `accelerator.accumulate(model)`; with FSDP2, `model.set_requires_gradient_sync(False)`.",
        suppressed="There are several modules of DistributedDataParallel, or several optimizers, which may have a "
        "backward pass each; passes may need each other (`LBFGS`; no pass adds to the gradients of another one, as in "
        "SAM; they begin at several lines, as in adversarial training); there is one rank; or FSDP trains on a GPU, "
        "where its collectives are not on the training thread.",
        limits=(
            *(thresholds.REDUCTIONS, thresholds.SECOND_LINE, thresholds.LOST_MEASURED, thresholds.BUSY),
            thresholds.LONG_S,
        ),
    ),
    Rule(
        id="unused-parameters-searched",
        judge=compute_rules.unused_parameters_searched,
        problem="DDP searches for unused parameters in every step, and there are none.",
        evidence="After each step on the CPU, what the ranks have told each other: all of them used all parameters, "
        "in at least 200 steps and in every one so far.",
        costs="One more collective where there are several ranks, and the marking of each parameter: as they took on a "
        "CPU with gloo. An estimate.",
        fix="`DistributedDataParallel(model)` without `find_unused_parameters=True`, unless the model may leave some "
        "out: then DDP raises an error.",
        suppressed="A step left a parameter out on any rank; there are several modules of DDP, or several backward "
        "passes in a step; `static_graph=True`; or training is on a GPU: to read there what was used would make the "
        "program wait for it.",
        limits=(thresholds.LOST, thresholds.SEARCH_ALL_REDUCE_S, thresholds.SEARCH_PARAMETER_S, thresholds.LOOP_NS),
    ),
    Rule(
        id="checkpoint-stall",
        judge=pause_rules.checkpoint_stall,
        problem="Training is blocked while checkpoints are written.",
        evidence="The phase `checkpoint`: `torch.save`, `torch.distributed.checkpoint`, `gpulaunch.checkpoint`.",
        costs="That phase, averaged over all steps of the long window, and the share of stack samples outside of it in "
        "functions such as a trainer's `save_checkpoint`, or on the two lines below the save. Of saves that mostly "
        "write memory of which the checkpoint has no tensor, that part.",
        fix="Save less often, or use `torch.distributed.checkpoint.async_save`; save copies of tensors that are parts "
        "of larger ones, as `torch.save` writes all of those.",
        suppressed="There were fewer than three saves, so that their interval is unknown.",
        limits=(
            *(thresholds.LOST_MEASURED, thresholds.SAVES, thresholds.SPARE, thresholds.LONG_S),
            thresholds.SAMPLES_OF_A_LINE,
        ),
    ),
    Rule(
        id="logging-stall",
        judge=line_rules.logging_stall,
        problem="The training thread spends its time on logging.",
        evidence="Stack samples inside `logging`, TensorBoard, wandb, tqdm and similar, called from one line.",
        costs="The share of the samples, times the step time.",
        fix="Log every N steps, or through `logging.handlers.QueueHandler`.",
        suppressed="There are no stack samples (no py-spy, or no permission to trace), or too few.",
        limits=(thresholds.LOGGED, thresholds.SAMPLES_OF_A_LINE, thresholds.SAMPLED_ERROR, thresholds.LONG_S),
    ),
    Rule(
        id="hot-line",
        judge=line_rules.hot_line,
        problem="A line of the program holds a part of every step, outside of the model's compute.",
        evidence=_listed(
            "Samples of the training thread's stack show a line, and the evidence names the call. The line is",
            "in a call of Python's library or a package (what is written in C is read in the source)",
            "in a function of the program that its loop calls after `backward`",
            "always with the GIL: torch releases it for each of its operations, so that line computes in Python, or in "
            "C that keeps it",
            "the same in every step, or in every turn of a loop, by the source: it uses shapes, numbers, buffers that "
            "nothing in its file changes, and what the loop leaves as it is",
            "what a rank computes for all ranks",
            "in a loop that takes tensors apart by `item`",
            "an operation for which another does far less: distances of all pairs through all their differences, a "
            "permutation of everything for a few, all singular values for the largest one, Adam tensor by tensor, "
            "statistics or copies of a whole store, products with zeros, several passes of a network on the same "
            "input, a distribution over all classes for each target",
            "of torch, what copies, gathers or prints what could stay as it is, collectives of objects, and the order "
            "of samples, if about every batch begins an epoch (`next(iter(loader))`)",
            "in a hook of a module that only computes statistics, or a communication hook of DDP that chooses what of "
            "the gradients it sends between the ranks of one node",
            "in a second forward pass only to compare its predictions, or what activation checkpoints compute again",
            "in a decomposition of a matrix by an optimizer of the program's own, or in `update_bn` for an average "
            "that its loop uses for nothing else",
            "sampled in one rank alone: fewer samples are enough without a GPU, if that rank is late by it, and the "
            "others are measured to wait",
        ),
        costs=_listed(
            "The step, times the share of these samples among those of its steps, with those in which the same line "
            "logs what it has computed. It is a bound, if the line computes with tensors or in Python: the program may "
            "need that. Counted are",
            "with a GPU, at most its idle time",
            "where ranks wait for each other, what it takes the last one, or what they wait for the one rank that has "
            "it",
            "of what backward goes through, its part of that, too",
            "in anomaly mode, what its checks at least take in backward",
            "of copies of the weights, all of the function that the loop calls after `backward`, or of a callback's "
            "method, as an average in place needs none of it",
        ),
        fix="Do it every N steps, once before the loop, in the DataLoader's workers, or in another thread; the advice "
        "says what is known of the call.",
        suppressed=_listed(
            "One of these holds",
            "the line waits for data, saves, compiles, communicates or logs: those have rules of their own",
            "the call is of a package that may compute with tensors (except `update` and `compute` of torchmetrics, "
            "without a GPU), or contains the training loop",
            "it is a metric in or after the validation",
            "the line is the model's and calls no library",
            "it always holds the GIL, and the idle time of its GPU is not known",
            "it makes tensors of Python's values, with a GPU or in less than 30 % of the step",
            "it computes activations again, with a GPU, or in hardly a tenth of the step, or where what is computed in "
            "that time could fill the memory that is free",
            "the main thread is not the one that trains, or there are few samples so far",
        ),
        limits=(
            *(thresholds.LOST_MEASURED, thresholds.LOST, thresholds.CONVERTED, thresholds.EVERY_STEP),
            *(thresholds.COPIED, thresholds.SAMPLED_ERROR, thresholds.SAMPLES_OF_A_LINE, thresholds.LONG_S),
            *(thresholds.SAMPLES_OF_ONE_RANK, thresholds.STRAGGLES_S),
            *(thresholds.NAN_CHECK_US, thresholds.NAN_CHECK_NS, thresholds.NAN_CHECK_SHARE, thresholds.LOOP_NS),
            *(thresholds.CELL_SAVES, thresholds.ATTENTION_SAVES, thresholds.ADAM_SAVES),
            *(thresholds.MAPPED_ATTENTION_SAVES, thresholds.MAPPED_MIB),
            *(thresholds.CACHED_ATTENTION_SAVES, thresholds.SCORES_IN_CACHE_MIB),
            *(thresholds.SAME_PASSES_SAVE, thresholds.ADAPTER_SAVES, thresholds.FILLED_GIB_S),
        ),
    ),
    Rule(
        id="small-operations-loop",
        judge=line_rules.small_operations_loop,
        problem="A loop of Python inside the training step computes element by element.",
        evidence="Stack samples before backward show one loop of the program in which no module of the model runs, and "
        "the autograd graph has many nodes whose mean time in backward is so short that most of it is torch's own "
        "work. The line is the loop's first one.",
        costs="The loop's share of the samples, and the same part of backward as of forward; of both torch's own part "
        "of a node, as the rest is computed in any case. With a GPU at most its idle time. An estimate.",
        fix="One operation for the whole batch: broadcasting, indexing with a tensor, a masked reduction, "
        "`torch.vmap`.",
        suppressed="The graph is small, or its nodes take long; the loop is less than 30 % of forward, makes training "
        "steps, hands out batches, goes through the modules or parameters of a model, a dictionary or a few things "
        "that the source lists, only moves or collects tensors, or each turn needs what the one before has computed "
        "(a recurrent network), as far as its source shows: a state that a method keeps in another object is not seen. "
        "`while` loops are never told.",
        limits=(
            *(thresholds.GRAPH_NODES, thresholds.LOOP_SHARE, thresholds.NODE_US, thresholds.NODE_OVERHEAD_US),
            thresholds.LOOP_NS,
            thresholds.LOST,
            *(thresholds.LOST_MEASURED, thresholds.SAMPLED_ERROR, thresholds.SAMPLES_OF_A_LINE, thresholds.LONG_S),
        ),
    ),
    Rule(
        id="gil-contention",
        judge=gil_rules.gil_contention,
        problem="Another thread of the training process computes in Python, and the training thread waits for the GIL.",
        evidence="Samples show the training thread asleep on Python's GIL in a step's own compute, and another thread "
        "of the process that holds it. The line is the one of that thread's function with most of these samples; "
        "without a line of the program, the function of the package is named.",
        costs="The step, times the share of these samples, less what the step waits for other threads or for workers "
        "anyway. With a GPU at most its idle time. A bound: if training needs what the thread computes, it waits for "
        "that in another process, too. Otherwise the cure saves more, 1.2 to 1.7 times as much in two programs: the "
        "thread also takes caches, and the core.",
        fix="Compute in another process (`multiprocessing`, the DataLoader's workers) or less often; use NumPy or "
        "torch, which release the GIL in long operations.",
        suppressed="The training thread sleeps for another reason (`queue.get`, a lock, a socket, a child, OpenMP, the "
        "GPU); it loads data, saves or validates; the idle time of its GPU is not known; it is not the main thread; "
        "the thread is torch's or gpulaunch's; the rank runs another interpreter than the sidecar; or there are few "
        "samples so far.",
        limits=(
            *(thresholds.LOST, thresholds.SAMPLED_ERROR, thresholds.SAMPLES_OF_A_LINE, thresholds.INNER_LINE),
            thresholds.LONG_S,
        ),
    ),
    Rule(
        id="omp-oversubscribed",
        judge=machine_rules.omp_oversubscribed,
        problem="The ranks compute with more threads than there are cores.",
        evidence="`torch.get_num_threads()` of all ranks compared with the cores, and threads that wait for a core, "
        "long and often.",
        costs="A thread progresses while it has a core, and in part only while the threads it waits for have one: of "
        "the compute time, `1 - (1 - waiting)^1.5` is lost. An estimate: how threads wait for each other is not "
        "observed.",
        fix="Leave `OMP_NUM_THREADS` to gpulaunch (cores / ranks); do not call `torch.set_num_threads`.",
        suppressed="The threads do not wait for cores: idle threads cost nothing.",
        limits=(thresholds.THREADS, thresholds.BUSY, thresholds.CROWDED, thresholds.CROWDED_NODE),
    ),
    Rule(
        id="frequent-validation",
        judge=pause_rules.frequent_validation,
        problem="Validation takes a large part of the time.",
        evidence="The phase `validation` of the steps, over the long window and since the start.",
        costs="What that phase takes beyond a tenth of the time.",
        fix="Validate less often, on a part of the data, or with larger batches.",
        suppressed="",
        limits=(thresholds.VALIDATES, thresholds.VALIDATED, thresholds.LONG_S),
    ),
    Rule(
        id="gc-pauses",
        judge=pause_rules.gc_pauses,
        problem="Python's garbage collector takes a large part of the steps.",
        evidence="The phase `gc` of the steps; and the line that requests collections, if it causes at least half of "
        "it.",
        costs="That phase.",
        fix="`gc.collect(); gc.freeze()` once after setup; no `gc.collect()` in the loop.",
        suppressed="",
        limits=(thresholds.LOST_MEASURED, thresholds.LONG_S),
    ),
    Rule(
        id="recompiles",
        judge=pause_rules.recompiles,
        problem="`torch.compile` recompiles repeatedly.",
        evidence="The phase `compile` of the steps, in consecutive windows.",
        costs="That phase.",
        fix="Pad to a few shapes, `drop_last=True`, or `dynamic=True`; `TORCH_LOGS=recompiles` prints what changed.",
        suppressed="It is warm-up, or a single compilation.",
        limits=(thresholds.LOST_MEASURED, thresholds.WARM_UP_STEPS),
    ),
    Rule(
        id="throttled",
        judge=machine_rules.throttled,
        problem="A GPU is throttled because of heat or a lack of power.",
        evidence="The driver's own time counters. A power cap is not counted: every well-utilized GPU reaches it.",
        costs="The throttled share of the time, times how much lower its clock is than that of the node's other GPUs.",
        fix="Check cooling, power cables, and the load of the rack.",
        suppressed="",
        limits=(thresholds.THROTTLED,),
    ),
    Rule(
        id="numa-mismatch",
        judge=machine_rules.numa_mismatch,
        problem="A rank runs on cores of a different NUMA node than its GPU.",
        evidence="The cores that it may use, and the NUMA node of the GPU's PCIe slot.",
        costs="Not estimated; the evidence has the bytes that the rank copies.",
        fix="`gpulaunch --numa-binding node`.",
        suppressed="The machine has one NUMA node, or the GPU's is unknown.",
    ),
)


def markdown() -> str:
    """Return the rules as the page docs/findings.md."""
    from gpulaunch.profiler.analysis.rule_examples import EXAMPLES  # for the page only

    lines = [
        "# Findings",
        "",
        "Generated from `profiler/gpulaunch/profiler/analysis/rules.py`; a test compares the two.",
        "",
        "While a job runs, its sidecar applies the rules below to windows of steps. It writes findings to",
        "`findings.jsonl` in the run directory, one object per line; `gpulaunch report` shows them, during the run and",
        "afterwards:",
        "",
        "| field | meaning |",
        "|---|---|",
        "| `rule` | the id of the rule; it does not change |",
        "| `file`, `line` | the line to change; null if it is not about a line |",
        "| `subject` | what it is about if not a line: a rank, a GPU |",
        "| `ranks` | the ranks concerned |",
        "| `seconds_per_step`, `seconds_per_hour` | the time saved in every step, and in an hour of training |",
        "| `confidence` | 0.9: read from a clock or a counter. 0.7: derived from measurements. 0.4: a bound |",
        "| `evidence` | the measurements; the unit is in the name |",
        "| `advice` | what to change, and why |",
        "| `active` | whether it held at the last evaluation |",
        "| `first_seen_s`, `last_seen_s` | Unix time |",
        "",
        (
            f"A window has at least {thresholds.WINDOW_S} and {thresholds.WINDOW_STEPS}, "
            f"after {thresholds.WARM_UP_STEPS} of warm-up;"
        ),
        f"with slow steps, {thresholds.SLOW_WINDOW_S} and {thresholds.SLOW_WINDOW_STEPS}.",
        f"A finding appears after {thresholds.APPEARS} in a row (from stack samples: as soon as there are enough) and",
        f"disappears after {thresholds.GONE} without it.",
        (
            f"A run that ends before that is judged once, if it has {thresholds.WINDOW_STEPS} and "
            f"{thresholds.SHORT_RUN_S} after the warm-up:"
        ),
        f"losses of {thresholds.SHORT_RUN_LOST} of the step and more are reported, with a confidence of 0.4 at most;",
        f"and so is of a run of less than {thresholds.FEW_WINDOWS} what only its last one had.",
        "First in the order is memory that is full within an hour; then the largest loss.",
        "A finding without seconds costs no time, or none yet. If the seconds are a bound, or the cause of a late rank",
        "is unknown, the advice ends with the `gpulaunch trace` command that shows more.",
        "",
        "| rule | problem |",
        "|---|---|",
        *(f"| [`{rule.id}`](#{rule.id}) | {rule.problem} |" for rule in RULES),
    ]
    for rule in RULES:
        lines += ["", f"## {rule.id}", "", rule.problem, ""]
        lines.append(f"- **Evidence**: {rule.evidence}")
        lines.append(f"- **Cost**: {rule.costs}")
        lines.append(f"- **Fix**: {rule.fix}")
        if rule.suppressed:
            lines.append(f"- **Not reported if**: {rule.suppressed}")
        if rule.limits:
            lines.append(f"- **[Limits](#limits)**: {'; '.join(f'{limit.name} {limit}' for limit in rule.limits)}")
        example = EXAMPLES[rule.id]
        lines += ["", "For instance:", "", "```python", example.program.rstrip(), "```", ""]
        lines += [f"> {example.prints}", "", "The cure:", "", "```", example.cure, "```"]
    limits = dict.fromkeys(limit for rule in RULES for limit in rule.limits)
    lines += ["", "## Limits", "", "| limit | value | reason |", "|---|---|---|"]
    lines += [f"| {limit.name} | {limit} | {limit.why} |" for limit in limits]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
