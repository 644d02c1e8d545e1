"""Copies the state so that a save can write it while training continues: the cost that the training thread pays.

The copy's memory is reused from save to save: fresh memory would cost more than the copy. With CUDA it is pinned, and
the copies run on a separate stream; kernels launched afterwards wait for them on the GPU, not on the host.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gpulaunch.checkpoint.messages import CheckpointError, first_line


class Copies:
    """Memory for one copy of the state. Reusable once the save from it is done."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}
        self._stream: Any = None
        self._done: Any = None

    def take(self, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy each tensor to the CPU; sharded ones stay sharded. Complete after `wait`."""
        with torch.no_grad():
            if not torch.cuda.is_initialized():
                return {name: self._copied(name, value) for name, value in live.items()}
            return self._take_from_gpu(live)

    def wait(self) -> None:
        """Wait until the copies are complete. Called in the saving thread."""
        if self._done is not None:
            self._done.synchronize()

    def _take_from_gpu(self, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = {name: self._copied(name, value) for name, value in live.items()}
            self._done = self._stream.record_event()
        torch.cuda.current_stream().wait_event(self._done)
        return copies

    def _copied(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor):
            return _sharded_like(value, self._copied(name, value.to_local()))
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}: only plain tensors and DTensors can be saved (FSDP2, not FSDP1)"
            )
        memory = self._memory.get(name)
        if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
            memory = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._memory[name] = memory
        return memory.copy_(value, non_blocking=value.is_cuda)


def _sharded_like(value: DTensor, local: torch.Tensor) -> DTensor:
    """`local` on the CPU as this rank's shard, sharded like `value`, whatever the mesh's device.

    from_local would move a CPU tensor to the mesh's device, but leaves a meta tensor; torch's own staging replaces the
    local tensor in the same way.
    """
    shell: Any = DTensor.from_local(
        torch.empty_like(local, device="meta"),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    shell._local_tensor = local
    sharded: DTensor = shell
    return sharded


def snapshot(value: Any, name: str) -> Any:
    """A copy of small values that shares no memory with them; tensors are copied to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: snapshot(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [snapshot(each, f"{name}.{index}") for index, each in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return plain(value, name)


def plain(value: Any, name: str) -> Any:
    """A copy of a value that is neither tensor nor container."""
    try:
        return copy.deepcopy(value)
    except Exception as err:
        raise CheckpointError(f"{name} is a {type(value).__name__}, which cannot be saved: {first_line(err)}") from err
