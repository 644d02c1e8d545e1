"""What to do about a line of the program that holds a part of every step, by what it calls."""

from __future__ import annotations

import re
from typing import Final

from gpulaunch.profiler.record.line_calls import (
    ADAM,
    ADAPTER,
    ANOMALY,
    ATTENTION,
    CELL,
    COMPRESSES,
    CONSTANT,
    DECOMPOSES,
    DENSE_TARGETS,
    DRAWS_ORDER,
    ELEMENTS,
    FOR_ALL_RANKS,
    FORWARD_AGAIN,
    GRAPH_MATRIX,
    KEEPS_LOGITS,
    NORM_STATISTICS,
    OBSERVES,
    ONE_HOT,
    ONE_HOT_PRODUCT,
    PAIRS,
    PAIRS_FORWARD,
    PAIRS_OF_ALL_RANKS,
    PARAMETRIZED,
    PERMUTATION,
    PYTHON,
    RECOMPUTED,
    ROLLED,
    SAME_IN_LAYERS,
    SAME_IN_LOOP,
    SAME_IN_LOOP_FORWARD,
    SAME_PASSES,
    SINGULAR,
    SINGULAR_FORWARD,
    STATISTICS,
)

CONVERTS: Final = "torch.tensor"
COPIES: Final = r"copy\.(?:deep)?copy|.*\.(?:state_dict|load_state_dict|get_(?:model_|optimizer_)?state_dict)"
"""Functions that copy all weights."""
_CURES: Final = (
    (
        COPIES,
        "Copy every N steps; for an average of the weights, update it in place every few steps.",
    ),
    (
        r"numpy\.random\.choice",
        (
            "With p it goes through all probabilities for each call: draw for many steps at once, or keep a tree of "
            "their sums, in which each draw takes a few additions."
        ),
    ),
    (
        r"(?:random|numpy\.random)\.(?:shuffle|permut\w+|sample|choices?|rand\w+|integers)",
        "Draw the order of all samples at once, with torch.randperm or a numpy generator, not element by element.",
    ),
    (
        r"(?:json|pickle|csv|yaml|pandas|h5py|zipfile|tarfile|sqlite3|shutil|os\.fsync|builtins\.open)\b.*",
        "Write every N steps, or in another thread: the training thread waits for it.",
    ),
    (
        r"(?:requests|urllib3?|http|socket|ssl|boto3|botocore|subprocess)\b.*",
        "Send it from another thread: the training thread waits for the answer.",
    ),
    (
        r"(?:[A-Z]\w*\.)?_?(?:validate|validation|evaluate|evaluation)(?:_(?:epoch|loop|model))?",
        "Validate every N epochs, or on a part of the data, and with several ranks each on its own part.",
    ),
    (
        r"(?:sklearn\.metrics|torchmetrics|evaluate|nltk|rouge_score|sacrebleu)\b.*",
        "Keep the predictions, and compute the metric every N steps or in the validation.",
    ),
    (
        r"(?:transformers\.tokenization\w*|tokenizers|sentencepiece|tiktoken)\b.*|.*\b(?:tokenize|batch_encode_plus)",
        "Tokenize once beforehand, or in the workers of the DataLoader: in the Dataset or collate_fn.",
    ),
    (
        re.escape(ANOMALY),
        (
            "It records the stack of every operation, and looks for NaN in all that backward computes: switch it off "
            "once the error is found."
        ),
    ),
    (
        r"torch\.tensor",
        "It converts Python's values one by one: convert them once before the loop, or keep NumPy arrays.",
    ),
    (
        r".*\._sync_buffers",
        (
            "It sends the buffers of the model from the first rank to all others before every forward pass. If each "
            "rank may keep its own, or they are the same: DistributedDataParallel(..., broadcast_buffers=False)."
        ),
    ),
    (
        r".*\.full_tensor",
        (
            "It gathers a whole tensor from all ranks: compute from the shards what can be (norm() of the DTensor; "
            "torch.nn.utils.get_total_norm for many), or gather it every N steps."
        ),
    ),
    (
        r"accelerate\..*\bgather_for_metrics",
        (
            "It sends predictions to all ranks: in the training loop, let each rank count its own (torchmetrics, a "
            "confusion matrix), and reduce the counts where they are shown."
        ),
    ),
    (
        r"torch\.distributed\..*_object(?:_list)?",
        (
            "It sends objects by pickle, and all ranks wait for it: reduce numbers as one small tensor (all_reduce), "
            "and gather what is large every N steps, or in the validation."
        ),
    ),
    (
        re.escape(DRAWS_ORDER),
        (
            "It draws the order of all samples for very few batches: keep an iterator of the DataLoader (`for batch in "
            "loader`), instead of next(iter(loader)) for each batch."
        ),
    ),
    (
        re.escape(KEEPS_LOGITS),
        (
            "It keeps the logits of the whole evaluation, and copies all of them for each batch: keep what the metric "
            "needs, with Trainer(preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)), or let "
            "eval_accumulation_steps move them to NumPy."
        ),
    ),
    (r".*\.empty_cache", "Do not empty the cache in the loop: the next step has to allocate the memory again."),
    (r"(?:queue|threading)\..*", "The training thread waits for another thread: let that run ahead, or start more."),
)
IN_PLACE_OF_CALLS: Final = {
    PYTHON: "This line computes in Python, or in C that keeps the GIL, on the training thread. If the step needs it, "
    "compute it for all elements at once with NumPy or torch, or in another process; else every N steps.",
    CONSTANT: "This line computes the same in every step: nothing that it uses changes, except for shapes. Compute it "
    "once, in __init__ with register_buffer, or keep it for each shape (a clone of it where it is changed later).",
    SAME_IN_LAYERS: "This line computes the same in every layer: it depends on an argument that the model gives to "
    "each of them. Compute it once before the layers, and give them the result; if the argument is the same in every "
    "step, as the graph of a data set that is one graph, compute it once in all.",
    **dict.fromkeys(
        (SAME_IN_LOOP, SAME_IN_LOOP_FORWARD),
        "This line computes the same in every turn of a loop, which changes nothing that it depends on: compute it "
        "once before the loop.",
    ),
    SAME_PASSES: "This statement runs a network several times on the same input: keep the result of one pass, and take "
    "all derivatives from it (torch.autograd.grad(u.sum(), (x, t), create_graph=True) gives two at once).",
    FOR_ALL_RANKS: "This line computes for all ranks, and each keeps only its own part: take that part first, and "
    "compute only for it.",
    ELEMENTS: "This loop takes tensors apart, one element after the other, each of which is an operation of torch: "
    "compute all at once, with indices (target[batch, row, column] = values), or convert a tensor once, with tolist().",
    FORWARD_AGAIN: "This line makes the forward pass of the step a second time, only to compare the predictions, or to "
    "log another loss: take the output that the loss is computed from (output.detach()), or do it every N steps.",
    **dict.fromkeys(
        (PAIRS, PAIRS_FORWARD),
        "This line makes the differences of all pairs of vectors, only for their distances: torch.cdist(a, b) (for "
        "NumPy scipy's cdist), or a product of matrices for squared ones, (|a|^2 + |b|^2 - 2 a b).clamp(min=0), needs "
        "no tensor of pairs x width. (cdist cannot be differentiated twice.)",
    ),
    ATTENTION: "These lines make a matrix of all scores of attention, several times, and again in backward: "
    "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, or attn_mask=mask) does not.",
    CELL: "This loop calls an LSTM cell for one element after the other, although all of them are known before: "
    "nn.LSTM has the same weights, takes the whole sequence, and on a CPU needs a fifth to two thirds of the time.",
    PAIRS_OF_ALL_RANKS: "Each rank computes the loss of the pairs of all ranks, from tensors through which gradients "
    "go back to those: take only the rows of its own samples (own @ gathered.T), as the other ranks do of theirs.",
    GRAPH_MATRIX: "This line multiplies by a matrix that is zero between the graphs of a batch: with a list of the "
    "edges, torch.zeros_like(h).index_add_(0, starts, h[ends]) adds only what there is.",
    ADAM: "This optimizer does what torch's AdamW does, with a dozen operations on each tensor, each of which reads "
    "and writes it: torch.optim.AdamW(groups, ..., fused=True) goes through it once.",
    DECOMPOSES: "This optimizer decomposes matrices that change little from step to step: keep what it gets, and "
    "decompose them again every 10 to 100 steps, as Shampoo and SOAP do (precondition_frequency).",
    DENSE_TARGETS: "This loss makes a distribution over all classes for each target, and goes through it several "
    "times: torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1, ignore_index=padding), with the "
    "reduction that the loss has (sum), needs only the indices. It spreads the rest over all classes, the target too.",
    COMPRESSES: "This communication hook sends only a part of the gradients, and to choose it takes longer than to "
    "send all of them between the ranks of one node: register it only where there are several nodes. The optimizer "
    "gets other gradients then: all of them.",
    NORM_STATISTICS: "This line runs the averaged model on all of the loader, and nothing in this loop uses the "
    "result: call torch.optim.swa_utils.update_bn once after the loop, or before the averaged model is evaluated.",
    ADAPTER: "This line adds an adapter of low rank to the weights before they are used; backward makes the gradient "
    "of the whole matrix: linear(x, weight) + scale * linear(linear(x, down), up) makes neither.",
    ROLLED: "This line copies all rows of a store to add a few and to leave out the oldest: keep a position that goes "
    "around, and write the new rows there (store[at % size] = rows).",
    STATISTICS: "This line computes statistics of all rows of a store, of which few have changed: keep the sum of the "
    "rows, and that of their squares, and change both where rows are added and replaced.",
    RECOMPUTED: "Backward computes parts of the forward pass again, to save memory, and more is free than all of that "
    "can fill: switch activation checkpoints off (gradient_checkpointing=False, no torch.utils.checkpoint), or use "
    "them for fewer layers.",
    PARAMETRIZED: "The weights of a layer are computed by its parametrization (such as orthogonal) each time that they "
    "are used, here in every turn of a loop: `with torch.nn.utils.parametrize.cached():` around the loop computes them "
    "once.",
    OBSERVES: "This hook computes statistics in every forward pass: remove it when they were taken (handle = "
    "module.register_forward_hook(...); handle.remove()), or return at once in all but every N-th step. A hook that is "
    "registered again and again runs as often.",
    **dict.fromkeys(
        (SINGULAR, SINGULAR_FORWARD),
        "This line computes all singular values of a matrix for the largest one: power iteration needs two products, "
        "if its vectors u and v are kept from step to step, as torch.nn.utils.parametrizations.spectral_norm does "
        "(u @ W @ v has the gradient, too).",
    ),
    PERMUTATION: "This line draws a permutation of everything for a few of its elements: torch.randint draws only "
    "those, if it may draw one twice; or go through one permutation in each epoch.",
    **dict.fromkeys(
        (ONE_HOT, ONE_HOT_PRODUCT),
        "This line makes a matrix of zeros with a one in each row, which products mostly multiply by zero: "
        "look the rows up by their indices (nn.Embedding); a loss such as cross_entropy takes indices, too.",
    ),
}


def advice_on(call: str) -> str:
    """What to do about a line that calls such a function, or does what stands for one; empty: it is not known."""
    if call in IN_PLACE_OF_CALLS:
        return IN_PLACE_OF_CALLS[call]
    what = f"{call} runs" if call else "This line runs"
    cure = next((text for pattern, text in _CURES if re.fullmatch(pattern, call)), "")
    return f"{what} on the training thread outside of the model. " + (
        cure or "Run it every N steps, once before the loop, in the DataLoader's workers, or in another thread."
    )
