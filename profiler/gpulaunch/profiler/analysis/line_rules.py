"""Rules about lines of the program, found by samples of the training thread's stack.

A share of few samples is a guess, so a line is reported when the standard error of its share is small enough: a line
that holds half of the steps after a quarter of a minute, one that holds a twentieth after some minutes. Lines that
follow each other are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import sqrt
from typing import Final

from gpulaunch.profiler.analysis.finding import DERIVED, ESTIMATED, Loss, Place, place_of
from gpulaunch.profiler.analysis.gpu_idle import bounded
from gpulaunch.profiler.analysis.thresholds import LOST, LOST_MEASURED, SAMPLED_ERROR, SAMPLES_OF_A_LINE
from gpulaunch.profiler.analysis.window import RankWindow, Window

_CURES: Final = (
    (
        r"copy\.(?:deep)?copy|.*\.(?:state_dict|load_state_dict|get_(?:model_|optimizer_)?state_dict)",
        "Copy every N steps; for an average of the weights, update it in place every few steps.",
    ),
    (
        r"(?:random|numpy\.random)\..*",
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
        r"(?:sklearn|torchmetrics|evaluate|nltk|rouge_score|sacrebleu)\b.*",
        "Keep the predictions, and compute the metric every N steps or in the validation.",
    ),
    (
        r"(?:transformers\.tokenization\w*|tokenizers|sentencepiece|tiktoken)\b.*|.*\b(?:tokenize|batch_encode_plus)",
        "Tokenize once beforehand, or in the workers of the DataLoader: in the Dataset or collate_fn.",
    ),
    (
        r"torch\.autograd\.set_detect_anomaly",
        "It records the stack of every operation: switch it off once the error is found.",
    ),
    (r".*\.empty_cache", "Do not empty the cache in the loop: the next step has to allocate the memory again."),
    (r"(?:queue|threading)\..*", "The training thread waits for another thread: let that run ahead, or start more."),
)


def logging_stall(window: Window) -> Iterator[Loss]:
    """Stack samples repeatedly show the training thread in logging, called from one line."""
    for rank in window.over.ranks:
        for found in _sampled(rank, rank.logged, "samples_in_logging"):
            yield replace(
                found, advice="Log every N steps, or write in another thread (logging.handlers.QueueHandler)."
            )


def hot_line(window: Window) -> Iterator[Loss]:
    """One line of the program, outside of the model's compute, holds a part of every step."""
    for rank in window.over.ranks:
        for found in _sampled(rank, rank.calling, "samples_in_line"):
            call = rank.calls.get(str(found.place), "")
            computes = "." not in call  # with tensors, in a line or function of the program
            if computes and (rank.gpu is not None or found.seconds_per_step < LOST.value * rank.step_s):
                continue  # the host may be waiting for its GPU
            seconds, confidence, idle_s = bounded(window, rank, found.seconds_per_step)
            if rank.gpu is None:
                seconds, confidence = found.seconds_per_step, ESTIMATED if computes else DERIVED
            elif seconds < LOST_MEASURED.value * rank.step_s:
                continue
            idle = {} if idle_s is None else {"gpu_idle_seconds_per_step": idle_s}
            yield replace(
                found,
                seconds_per_step=seconds,
                confidence=confidence,
                evidence={**found.evidence, **idle, **({"call": call} if call else {})},
                advice=_cure(call),
            )


def _sampled(rank: RankWindow, lines: Mapping[str, int], counted_as: str) -> Iterator[Loss]:
    for place, count, together in _together(lines, rank.calls):
        if count > rank.samples:
            continue
        share = count / rank.samples
        likely = (count + 1) / (rank.samples + 2)  # never certain: all of four samples may be half of the time
        error = sqrt(likely * (1.0 - likely) / rank.samples)
        if share >= LOST_MEASURED.value and error <= SAMPLED_ERROR.value * share:
            yield Loss(
                rank=rank.rank,
                seconds_per_step=share * rank.step_s,
                step_s=rank.step_s,
                confidence=DERIVED,
                evidence={
                    "step_seconds": rank.step_s,
                    "samples": rank.samples,
                    counted_as: count,
                    "standard_error_ratio": error / share,
                    **({"lines": together} if together else {}),
                },
                advice="",
                place=place,
            )


def _together(lines: Mapping[str, int], calls: Mapping[str, str]) -> Iterator[tuple[Place, int, str]]:
    """Take lines that follow each other as one, such as `cursor.executemany(...)` and `connection.commit()`, if both
    call a library, or both do not.

    Returns:
        Of each group the first line that has at least half as many samples as any other of it, the samples of all,
        and `first-last` if it has several lines.
    """
    sampled: list[tuple[str, int, int, bool]] = []
    for text, count in lines.items():
        place = place_of(text)
        if count >= SAMPLES_OF_A_LINE.value and place.file is not None and place.line is not None:
            sampled.append((place.file, place.line, count, "." in calls.get(text, "")))
    groups: list[tuple[str, list[tuple[int, int]]]] = []
    last = "", 0, False
    for file, line, count, calls_library in sorted(sampled):
        if last != (file, line - 1, calls_library):
            groups.append((file, []))
        groups[-1][1].append((line, count))
        last = file, line, calls_library
    for file, group in groups:
        most = max(count for _, count in group)
        first = next(line for line, count in group if 2 * count >= most)
        together = f"{group[0][0]}-{group[-1][0]}" if len(group) > 1 else ""
        yield Place(file=file, line=first), sum(count for _, count in group), together


def _cure(call: str) -> str:
    what = f"{call} runs" if call else "This line runs"
    cure = next((text for pattern, text in _CURES if re.fullmatch(pattern, call)), "")
    return f"{what} on the training thread outside of the model. " + (
        cure or "Run it every N steps, once before the loop, in the DataLoader's workers, or in another thread."
    )
