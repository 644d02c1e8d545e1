"""Rules about the precision that a program computes in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.analysis.facts import section, steps_by_closure, text
from gpulaunch.profiler.analysis.finding import ESTIMATED, Loss
from gpulaunch.profiler.analysis.thresholds import DOUBLE_GAIN, GEMM_BUSY, LOST, PIPE_IDLE
from gpulaunch.profiler.analysis.window import RankWindow, Window

_HAS_TF32: Final = 8.0
"""Compute capability from which tensor cores take float32 matrices (as TF32)."""
_HAS_TENSOR_CORES: Final = 7.0
_MODEL: Final = ("forward", "backward", "optimizer")


def fp32_on_tensor_cores(window: Window) -> Iterator[Loss]:
    """A GPU that is busy with float32 arithmetic while its tensor cores idle."""
    for rank in window.ranks:
        gpu = window.gpu_of(rank)
        precision = section(rank.facts, "precision")
        capability = _capability(rank)
        if gpu is None or not precision or capability < _HAS_TENSOR_CORES:
            continue
        ratios = gpu.state.gpm_ratios
        if text(precision, "parameters") != "float32" or precision.get("autocast") is not False:
            continue
        tensor, fp32, active = (ratios.get(name) for name in ("tensor_active", "fp32_active", "sm_active"))
        if tensor is None or tensor > PIPE_IDLE.value or not fp32 or active is None or active < GEMM_BUSY.value:
            continue
        seconds = 0.5 * min(1.0, fp32) * rank.step_s
        if seconds < LOST.value * rank.step_s:
            continue
        tf32 = capability >= _HAS_TF32 and text(precision, "matmul") == "highest"
        easy = 'torch.set_float32_matmul_precision("high") for TF32, or ' if tf32 else ""
        yield Loss(
            rank=rank.rank,
            seconds_per_step=seconds,
            step_s=rank.step_s,
            confidence=ESTIMATED,
            evidence={
                "step_seconds": rank.step_s,
                "tensor_pipe_ratio": tensor,
                "fp32_pipe_ratio": fp32,
                "sm_active_ratio": active,
                "matmul_precision": text(precision, "matmul"),
            },
            advice=f"Use the tensor cores for matrix multiplication: {easy}torch.autocast with bfloat16. Then compare "
            "the loss curves.",
        )


def float64_parameters(window: Window) -> Iterator[Loss]:
    """A model is trained in 64 bits, though torch's default has not been changed and no method needs it."""
    for rank in window.ranks:
        precision = section(rank.facts, "precision")
        if text(precision, "parameters") != "float64" or precision.get("autocast") is not False:
            continue
        if text(precision, "default") != "float32" or steps_by_closure(rank):
            continue  # it is meant
        if section(rank.facts, "graph").get("decomposes") is True:
            continue  # a matrix that 32 bits may take for singular
        computes_s = sum(map(rank.phase_s, _MODEL))
        seconds = DOUBLE_GAIN.value * computes_s
        if seconds >= LOST.value * rank.step_s:
            yield Loss(
                rank=rank.rank,
                seconds_per_step=seconds,
                step_s=rank.step_s,
                confidence=ESTIMATED,
                evidence={"step_seconds": rank.step_s, "model_seconds_per_step": computes_s},
                advice="Train in float32: convert the data (torch.as_tensor(array, dtype=torch.float32)), and do not "
                "call .double() on the model. Then compare the loss curves.",
            )


def _capability(rank: RankWindow) -> float:
    said = section(rank.facts, "device").get("capability")
    match said:
        case [int(major), int(minor)] if 0 <= major < 100 and 0 <= minor < 100:
            return major + minor / 10
        case _:
            return 0.0
