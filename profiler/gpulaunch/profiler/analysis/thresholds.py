"""All thresholds of all rules, each with its reason. A rule's page in docs/findings.md lists those that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One threshold."""

    name: str
    value: float
    unit: str
    why: str

    def __str__(self) -> str:
        return f"{self.value * 100:g} %" if self.unit == "share" else f"{self.value:g} {self.unit}".strip()


# -- minimum data for a verdict

WINDOW_S: Final = Limit(
    name="a window",
    value=5.0,
    unit="s",
    why="CPU time is counted in ticks of 10 ms, and ranks are sampled once a second",
)
WINDOW_STEPS: Final = Limit(
    name="steps of a window",
    value=20,
    unit="steps",
    why="the mean of fewer steps varies by more than the losses to be found",
)
SLOW_WINDOW_S: Final = Limit(
    name="a window of slow steps", value=60.0, unit="s", why="programs with long steps need findings, too"
)
SLOW_WINDOW_STEPS: Final = Limit(
    name="steps of such a window", value=4, unit="steps", why="a single step may be the first of an epoch"
)
WARM_UP_STEPS: Final = Limit(
    name="warm-up",
    value=10,
    unit="steps",
    why="the first steps compile, start workers, and fill caches and pools; they are not representative",
)
LONG_S: Final = Limit(
    name="the long window",
    value=600.0,
    unit="s",
    why="rare events (saves, sampled log lines) are judged over this time, or half of it",
)
APPEARS: Final = Limit(
    name="appears after",
    value=2,
    unit="windows",
    why="one window may contain the end of an epoch, or a burst of another job",
)
FEW_WINDOWS: Final = Limit(
    name="few windows",
    value=4,
    unit="windows",
    why="in fewer, what is near a limit may be found in the last one only: one of three runs of 20 s was told nothing",
)
GONE: Final = Limit(name="disappears after", value=3, unit="windows", why="a finding near a limit must not flap")

SHORT_RUN_S: Final = Limit(
    name="a short run",
    value=2.0,
    unit="s",
    why="a run that ends before two windows is judged once; ranks are sampled once a second, so this has two samples",
)
SHORT_RUN_LOST: Final = Limit(
    name="loss in a short run",
    value=0.20,
    unit="share",
    why="judged once, and over few seconds: twice of what a loss has to be in two windows",
)

# -- minimum loss

LOST: Final = Limit(
    name="predicted loss",
    value=0.10,
    unit="share",
    why="a predicted loss below a tenth of the step is within the variation of steps on a shared machine",
)
FILLED_GIB_S: Final = Limit(
    name="memory filled",
    value=20,
    unit="GiB/s of a thread",
    why="what a thread computes in a second fills at most half of that: cores move some 20 GB/s, and a byte of a new "
    "page is cleared, read and written. Twice as much, as free memory is read at any moment of a step. Here one "
    "fills 1.2 GiB/s",
)
CONVERTED: Final = Limit(
    name="converted",
    value=0.30,
    unit="share",
    why="a program that makes its data in Python has to convert them: a simulation of 64 workshops did for 0.20 of its "
    "steps",
)
COPIED: Final = Limit(
    name="copied",
    value=0.20,
    unit="share",
    why="of a function after a step; averages of the weights by their copies had 0.26 to 0.67 of it in these, and the "
    "rest in arithmetic; with less, the function is for something else",
)
LOST_MEASURED: Final = Limit(
    name="measured loss", value=0.05, unit="share", why="a measured loss needs no margin for a model"
)
ALL_TARGETS: Final = Limit(
    name="all targets",
    value=0.9,
    unit="share",
    why="a causal model leaves out one token of each sequence, of which the shortest in use have a dozen",
)
SMALL_LOSS: Final = Limit(
    name="small loss", value=0.02, unit="share", why="certain, easy to fix, and present at every step"
)

# -- dataloader

BUSY: Final = Limit(
    name="busy workers",
    value=0.70,
    unit="share",
    why="training does not wait for workers that are idle a third of the time",
)
CROWDED: Final = Limit(
    name="run queue",
    value=0.30,
    unit="share",
    why="if workers wait for a core this long, more workers would wait longer",
)
CROWDED_NODE: Final = Limit(
    name="CPU pressure",
    value=0.50,
    unit="share",
    why="half of the time some process on the node waited for a core (PSI, cpu some): no core is free",
)
SURPLUS: Final = Limit(
    name="workers per core",
    value=2.0,
    unit="",
    why="up to two per core overlap reading and computing; more only wait for each other",
)
HANDOVER: Final = Limit(
    name="transfer",
    value=0.40,
    unit="share",
    why="two ranks on two cores spent a quarter of 10 ms steps on it, mostly waiting for a core",
)
TRANSFER_S: Final = Limit(
    name="transfer of a batch",
    value=0.0013,
    unit="s",
    why="from a worker, the shortest that was measured for a batch of one tensor (two cores)",
)
TENSOR_S: Final = Limit(
    name="transfer of a tensor",
    value=0.000065,
    unit="s",
    why="more for each further tensor of a batch, in the worker and in the training thread: 0.06 to 0.08 ms of CPU "
    "time of the latter, with 10 to 240 of them, small or large (shared memory, by file descriptors)",
)
WORKER_PAYS_S: Final = Limit(
    name="overhead of a worker",
    value=0.002,
    unit="s",
    why="the transfer of a batch of one tensor took 1.3 to 2.3 ms (two cores); without a worker it is as fast",
)
STORAGE: Final = Limit(
    name="read from storage",
    value=0.50,
    unit="share",
    why="of the bytes read; otherwise storage is not the cause",
)

COMPUTES: Final = Limit(
    name="computing without workers",
    value=0.50,
    unit="share",
    why="of the wait; the rest may be storage or a network, which a cheaper transform does not help",
)

HOLDS_FETCHES: Final = Limit(
    name="line of the fetches",
    value=0.34,
    unit="share",
    why="of the samples inside fetches; a loop of a transform spreads over two or three lines",
)
INNER_LINE: Final = Limit(
    name="inner line",
    value=0.8,
    unit="share",
    why="of the samples of the line that calls it; with less, other lines of the function take part",
)
EPOCHS: Final = Limit(
    name="epochs", value=2, unit="epochs", why="the workers of a single one have to be started in any case"
)
PAGE_FAULT_US: Final = Limit(
    name="a page fault",
    value=10.0,
    unit="us",
    why="of memory that is shared with new workers, each takes 3.3 to 3.7 us on a virtual machine; a longer time after "
    "their start has another cause, such as a log line",
)

# -- copies and syncs

EVERY_STEP: Final = Limit(
    name="at every step",
    value=0.50,
    unit="per step",
    why="at least every other step; a log line every ten steps does not count",
)
PINNED_GAIN: Final = Limit(
    name="pinned against pageable",
    value=0.25,
    unit="share",
    why="copies of 8 MiB batches were 1.34 to 1.44 times as fast (published by SPDL): a quarter less time",
)
PIPE_IDLE: Final = Limit(
    name="tensor cores idle",
    value=0.05,
    unit="share",
    why="a few library kernels use this much although the program does not",
)
DOUBLE_GAIN: Final = Limit(
    name="float32 against float64",
    value=0.5,
    unit="share",
    why="twice as many numbers fit in a vector register, and half of the bytes are moved; many GPUs gain far more",
)
PADDED: Final = Limit(
    name="unneeded columns",
    value=0.10,
    unit="share",
    why="batches that are padded to a multiple of 8 tokens, which tensor cores want, have up to 7 more than they need",
)
GEMM_BUSY: Final = Limit(
    name="SMs busy", value=0.50, unit="share", why="a GPU that is idle half of the time is not limited by arithmetic"
)

# -- communication

SMALL_COLLECTIVES: Final = Limit(
    name="small collectives",
    value=2,
    unit="per step",
    why="a single one may only wait for late ranks, which the next one would wait for instead",
)
SECOND_LINE: Final = Limit(
    name="second backward line",
    value=0.2,
    unit="share",
    why="of the samples of the first line: two passes through the same model take about as long as each other",
)
REDUCTIONS: Final = Limit(
    name="reductions of the gradients",
    value=2,
    unit="per step",
    why="one is needed",
)
FSDP_GATHERS: Final = Limit(
    name="gathers of parameters by FSDP",
    value=8,
    unit="per step",
    why="a model that is sharded as a whole, or in two or three blocks, has fewer",
)
FSDP_PARAMETERS: Final = Limit(
    name="parameters of a unit of FSDP",
    value=5,
    unit="tensors",
    why="a layer has one or two, a block of a transformer 8 and more; the last unit has the rest of the model",
)
FSDP_SMALL_KIB: Final = Limit(
    name="parameters that FSDP gathers at once",
    value=128,
    unit="KiB",
    why="a gather of 64 KiB takes 1.1 to 1.5 times as long as one of 256 bytes (gloo, 2 ranks): most of it is latency",
)
FSDP_UNIT_KIB: Final = Limit(
    name="parameters of a larger unit of FSDP",
    value=256,
    unit="KiB",
    why="a gather of so many takes 1.6 times as long as one of 256 bytes (gloo, 2 ranks)",
)
SEARCH_ALL_REDUCE_S: Final = Limit(
    name="search for unused parameters",
    value=0.0008,
    unit="s",
    why="the ranks tell each other what they have used: 0.4 to 1.5 ms more, on two ranks with gloo",
)
SEARCH_PARAMETER_S: Final = Limit(
    name="search for a parameter",
    value=6e-6,
    unit="s",
    why="each is marked as used: 480 parameters took 2.9 ms more on the CPU",
)

# -- memory

GROWN_BYTES: Final = Limit(
    name="growth", value=64 << 20, unit="bytes", why="allocators keep and release less than this without a leak"
)
GROWN_POINTS: Final = Limit(
    name="points of a trend", value=6, unit="windows", why="fewer points show a trend by chance (1 in 32 for five)"
)
MOST_TO_FULL_S: Final = Limit(
    name="full within", value=7 * 86400.0, unit="s", why="slower growth does not matter in practice"
)
URGENT_S: Final = Limit(
    name="soon full",
    value=900.0,
    unit="s",
    why="5 GB in half a minute end a job before six windows are over",
)
URGENT_POINTS: Final = Limit(
    name="points of a trend that is soon over",
    value=4,
    unit="windows",
    why="a fourth point that is as high as the first three foretell; caches of the first steps are in none",
)
URGENT_GROWN: Final = Limit(
    name="growth that is urgent",
    value=0.20,
    unit="share",
    why="of the memory that is left: less may be a cache that fills, or noise between four points",
)
FITS: Final = Limit(
    name="fits",
    value=0.25,
    unit="share",
    why="of the memory that is left may be filled by the end of the first epoch, as by a cache of the dataset: the "
    "rest is for what grows besides, as pages that workers copy, and the page cache",
)
FRAGMENTED: Final = Limit(
    name="unusable",
    value=0.25,
    unit="share",
    why="of the reserved memory, in free parts of used blocks; every program has some",
)
SHM_FULL: Final = Limit(name="shared memory used", value=0.80, unit="share", why="the next batches may cause SIGBUS")

# -- pace

STRAGGLES_S: Final = Limit(
    name="behind the others", value=0.001, unit="s", why="scheduling alone separates ranks on one machine by this much"
)
IN_TURNS: Final = Limit(
    name="ranks that work in turns",
    value=1.1,
    unit="steps",
    why="two stages of a model that wait for each other worked for 1.0 steps together; ranks with a batch each for 1.4 "
    "and more",
)
VALIDATES: Final = Limit(
    name="validation",
    value=0.25,
    unit="share",
    why="of the time; a validation set of a fifth, once per epoch and without backward, takes about a tenth",
)
VALIDATED: Final = Limit(
    name="enough validation", value=0.10, unit="share", why="of the time; what such a validation set takes"
)
SUPPLY_DIFFERS: Final = Limit(
    name="slower supply",
    value=0.20,
    unit="share",
    why="the mean fetch of ranks with the same dataset differs by up to a tenth in a window",
)
SAVES: Final = Limit(
    name="saves", value=3, unit="saves", why="the interval is unknown before the second save, and not steady"
)
SPARE: Final = Limit(
    name="spare memory",
    value=0.5,
    unit="share",
    why="of what a save writes: with less, it is mostly the checkpoint itself that takes the time",
)
SAMPLED_ERROR: Final = Limit(
    name="standard error",
    value=0.25,
    unit="share",
    why="of the loss itself: with few samples, their share is a guess",
)
ADAM_SAVES: Final = Limit(
    name="fused Adam",
    value=0.6,
    unit="share",
    why="of what AdamW takes tensor by tensor is saved by torch.optim.AdamW(fused=True): 0.59 to 0.74 for five sets of "
    "tensors, of 0.7 to 12 million elements; 0.5 to 0.7 where the caches hold something else before (torch 2.13, one "
    "core)",
)
ADAPTER_SAVES: Final = Limit(
    name="adapter beside the weights",
    value=1.4,
    unit="share",
    why="of what adding an adapter to the weights takes forward, with the same part of backward, is saved beside them: "
    "the median of 0.9 to 3.1 for layers of 256 to 4,096 columns, adapters of rank 4 to 64 and 32 or 256 tokens where "
    "that was at least a tenth of the layer's forward pass; backward makes no gradient of the whole matrix then",
)
ATTENTION_SAVES: Final = Limit(
    name="attention at once",
    value=0.4,
    unit="share",
    why="of what attention in steps takes forward and backward is saved by scaled_dot_product_attention where malloc "
    "keeps the memory of the scores: 0.23 to 0.56 with a causal mask, -0.05 to 0.39 without, for 128 and 256 tokens, "
    "scores of 8 and 16 MiB (torch 2.13, one and two cores); in models with 3.4 to 12 MiB 0.26 to 0.68, the "
    "median 0.43",
)
MAPPED_ATTENTION_SAVES: Final = Limit(
    name="attention over mapped scores",
    value=0.75,
    unit="share",
    why="the same where malloc maps each matrix of scores anew: 0.51 to 0.84, the median 0.75, for scores of 32 to 128 "
    "MiB",
)
SCORES_IN_CACHE_MIB: Final = Limit(
    name="scores in the cache",
    value=3,
    unit="MiB",
    why="over smaller ones, of 32 to 64 tokens, scaled_dot_product_attention saved 0 to 3 % of a model's step with two "
    "threads, and 7 to 15 % with one; over 3.4 to 8 MiB -1 to 41 % and 19 to 45 %",
)
CACHED_ATTENTION_SAVES: Final = Limit(
    name="attention over scores in the cache",
    value=0.2,
    unit="share",
    why="of what it takes forward and backward is saved with one thread: 0.04 to 0.36 with a causal mask, the median "
    "0.21, and -0.24 to 0.32 without; with two threads -0.9 to 0.23, for which nothing is told",
)
MAPPED_MIB: Final = Limit(
    name="memory that is mapped", value=32, unit="MiB", why="glibc's DEFAULT_MMAP_THRESHOLD_MAX, see mallopt(3)"
)
CELL_SAVES: Final = Limit(
    name="LSTM at once",
    value=0.6,
    unit="share",
    why="of what a loop over nn.LSTMCell takes forward and backward is saved by nn.LSTM: 0.33 to 0.81 in batches of 16 "
    "and 64, widths of 64 to 256, 20 and 80 elements (torch 2.13, one core); of nn.GRUCell nothing on a CPU",
)
LOGGED: Final = Limit(
    name="logged",
    value=0.1,
    unit="share",
    why="Lightning's `self.log` in every step, as its users write it, took 0.065 and 0.072 of steps of 7 to 10 ms in "
    "programs in which nothing is wrong; logging that was a loss took 0.28 to 0.65",
)
SAME_PASSES_SAVE: Final = Limit(
    name="passes at once",
    value=0.5,
    unit="share",
    why="of what passes of a network on the same input take is saved by one: half of two; of four with two first "
    "derivatives and a second one 0.49, as the derivatives of the last one stay (torch 2.13)",
)
SAMPLES_OF_A_LINE: Final = Limit(
    name="samples of a line", value=4, unit="samples", why="a line may be sampled by chance, but not repeatedly"
)
SAMPLES_OF_ONE_RANK: Final = Limit(
    name="samples of one rank",
    value=6,
    unit="samples",
    why="of two ranks that run a line alike, one has these and the other none once in 64 times",
)
GRAPH_NODES: Final = Limit(
    name="nodes of a graph",
    value=200,
    unit="nodes",
    why="a loop over a batch of 32 faces has 324, one over 128 boxes 1923, a transformer of four layers 222; fewer "
    "take two milliseconds at most",
)
LOOP_SHARE: Final = Limit(
    name="a loop's part of forward",
    value=0.3,
    unit="",
    why="of a loop that takes less, the short nodes may be of another part of the model; loops over faces and boxes "
    "had 0.73 to 0.95, over voices and parts of a mixture 0.54 and 0.33; of few samples it may be less by their "
    "standard error, as in another run of these parts: 0.28 of 152",
)
LOOP_NS: Final = Limit(
    name="a turn of a loop of Python's",
    value=20.0,
    unit="ns",
    why="where that takes longer, so do nodes of a graph, checks for NaN and searches for parameters: at 34 to 60 ns, "
    "a node took 140 to 168 times as long, and a check 123 to 149 times (two cores that others share, eight times). Of "
    "the hosts that they were measured on it is estimated: with 55 ns, 52 programs took 2.4 times as long (median)",
)
NODE_OVERHEAD_US: Final = Limit(
    name="torch's own part of a node",
    value=15.0,
    unit="us",
    why="what one operation for all elements does not have: of nodes of 9 to 18 us, on slow hosts, the cures of loops "
    "over faces, boxes and voices saved 11 to 17; on a faster one all of their 4 to 8.5",
)
NAN_CHECK_US: Final = Limit(
    name="a check for NaN",
    value=5.0,
    unit="us",
    why="in anomaly mode, backward through 202 nodes of 64 elements took 1.9 instead of 0.8 ms",
)
NAN_CHECK_NS: Final = Limit(
    name="a check for NaN, of each element",
    value=2.0,
    unit="ns",
    why="through nodes of 65,536 elements it took 3 ns more for each; every weight is checked twice, as the transposed "
    "one of a linear layer is a node, too; the elements of activations are not known",
)
NAN_CHECK_SHARE: Final = Limit(
    name="checks for NaN, of backward",
    value=0.8,
    unit="share",
    why="0.18 with large products of matrices, 0.55 with small ones, 0.81 with element-wise operations",
)
NODE_US: Final = Limit(
    name="a node",
    value=30.0,
    unit="us",
    why="of longer ones torch's own part is about a quarter; loops over faces, boxes and hours took 7 to 18 us, "
    "transformers of width 128 38 to 46 us, one of width 256 or a layer of 512 columns more than 200",
)
THREADS: Final = Limit(
    name="threads per core", value=1.5, unit="", why="up to this, threads of a dataloader and of torch rarely compete"
)
THROTTLED: Final = Limit(
    name="throttled", value=0.10, unit="share", why="of the time; a short burst of heat is no measurable loss"
)
