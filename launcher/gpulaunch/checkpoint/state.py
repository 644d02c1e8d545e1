"""Extracts the state of the program's objects to save, and restores it.

A state dict is split: its tensors go, under one flat name each, to torch.distributed.checkpoint, which writes each
once and reads what a rank needs of it, on any number of ranks; the rest, the skeleton, is one small file. So a state is
rebuilt as it was saved, whatever the fresh object contains: an optimizer that has not stepped yet has no moments, and
is not stepped just to create some.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from gpulaunch.checkpoint.copies import plain
from gpulaunch.checkpoint.messages import CheckpointError

Tensors = dict[str, torch.Tensor]
Skeleton = Any

_TENSOR = "gpulaunch.tensor"  # marks a tensor's place in a skeleton: {_TENSOR: name, "shape": [..], "dtype": ..}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The objects of the program that make up its state."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    shared: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Name -> object with state_dict and load_state_dict; the same on every rank, or made of DTensors."""
    own: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Name -> such an object, or a torch.Generator; every rank has its own."""

    # -- reading from the objects

    def take(self) -> tuple[Skeleton, Tensors]:
        """The state that all ranks share. The tensors are the live ones: copy them before training continues."""
        tensors: Tensors = {}
        skeleton = {"model": split(get_model_state_dict(self.model), "model", tensors)}
        if self.optimizers:
            skeleton["optimizer"] = split(self._optimizer_state(), "optimizer", tensors)
        for name, thing in self.shared.items():
            skeleton[f"shared {name}"] = split(thing.state_dict(), f"shared.{name}", tensors)
        return skeleton, tensors

    def take_own(self) -> dict[str, Any]:
        """This rank's own state, as live values."""
        return {
            name: thing.get_state() if isinstance(thing, torch.Generator) else thing.state_dict()
            for name, thing in self.own.items()
        }

    def buffers(self, tensors: Tensors) -> Tensors:
        """The plain buffers among `take`'s tensors. Between two forwards DDP leaves each rank its own, such as batch
        norm's statistics."""
        parameters = {p.data_ptr() for p in self.model.parameters() if not isinstance(p, DTensor)}
        return {
            name: value
            for name, value in tensors.items()
            if name.startswith("model.") and not isinstance(value, DTensor) and value.data_ptr() not in parameters
        }

    # -- writing to the objects

    def room_for(self, skeleton: Skeleton) -> Tensors:
        """Return tensors to load into, for every one that the skeleton names. The model's are its own, filled in place.

        Raises:
            CheckpointError: the state does not match these objects; the text names the first differences.
        """
        model: Tensors = {}
        split(get_model_state_dict(self.model), "model", model)
        _compare("model", _leaves(skeleton["model"]), model)
        room = dict(model)
        if self.optimizers:
            if "optimizer" not in skeleton:
                raise CheckpointError("the checkpoint was saved without an optimizer; this program has one")
            parameters = self._parameters()
            for key, part in skeleton["optimizer"].items():
                for owner, values in part.items() if key == "state" else [("", part)]:
                    room |= {name: _empty(leaf, parameters.get(owner)) for name, leaf in _leaves(values).items()}
        for name, thing in self.shared.items():
            if f"shared {name}" not in skeleton:
                raise CheckpointError(f"the checkpoint has no state of {name!r}, which this program saves")
            live: Tensors = {}
            split(thing.state_dict(), f"shared.{name}", live)
            for key, leaf in _leaves(skeleton[f"shared {name}"]).items():
                room[key] = _empty(leaf, live.get(key))
        return room

    def put(self, skeleton: Skeleton, tensors: Tensors) -> None:
        """Restore every object's state from `room_for`'s filled tensors."""
        set_model_state_dict(self.model, join(skeleton["model"], tensors))
        if self.optimizers:
            state = join(skeleton["optimizer"], tensors)
            for fqn in self._parameters():
                state["state"].setdefault(fqn, {})  # it had no gradient yet; torch requires an entry for each
            with _without_stepping(self.optimizers):
                set_optimizer_state_dict(self.model, self.optimizers, state)
            for optimizer in self.optimizers:
                for parameter in [p for p, values in optimizer.state.items() if not values]:
                    del optimizer.state[parameter]
        for name, thing in self.shared.items():
            thing.load_state_dict(join(skeleton[f"shared {name}"], tensors))

    def put_own(self, states: Mapping[str, Any]) -> None:
        """Restore the states of this rank's own objects."""
        for name, thing in self.own.items():
            if name not in states:
                raise CheckpointError(f"the checkpoint has no state of {name!r}, which this program saves")
            if isinstance(thing, torch.Generator):
                thing.set_state(states[name])
            else:
                thing.load_state_dict(states[name])

    def put_buffers(self, saved: Tensors) -> None:
        """Restore the model's buffers of this rank."""
        live: Tensors = {}
        split(get_model_state_dict(self.model), "model", live)
        with torch.no_grad():
            for name, value in saved.items():
                live[name].copy_(value)

    def _optimizer_state(self) -> dict[str, Any]:
        with _without_stepping(self.optimizers):
            return dict(get_optimizer_state_dict(self.model, self.optimizers))

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Name -> parameter, of everything that an optimizer has."""
        named: dict[str, torch.Tensor] = {}
        for optimizer in self.optimizers:
            with _without_stepping((optimizer,)):
                groups: Any = get_optimizer_state_dict(self.model, optimizer)["param_groups"]
            for group, live in zip(groups, optimizer.param_groups, strict=True):
                named.update(zip(group["params"], live["params"], strict=True))
        return named


# -- skeletons


def split(value: Any, name: str, tensors: Tensors) -> Skeleton:
    """Move the tensors of `value` into `tensors`; return the rest, with a mark in place of each."""
    if isinstance(value, torch.Tensor):
        while name in tensors:
            name += "'"
        tensors[name] = value
        return {_TENSOR: name, "shape": list(value.shape), "dtype": value.dtype}
    if isinstance(value, Mapping):
        return {key: split(each, f"{name}.{key}", tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [split(each, f"{name}.{index}", tensors) for index, each in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return plain(value, name)


def join(skeleton: Skeleton, tensors: Tensors) -> Any:
    """Put the tensors back into their places."""
    if isinstance(skeleton, dict):
        if _TENSOR in skeleton:
            return tensors[skeleton[_TENSOR]]
        return {key: join(each, tensors) for key, each in skeleton.items()}
    if isinstance(skeleton, (list, tuple)):
        parts = [join(each, tensors) for each in skeleton]
        return parts if isinstance(skeleton, list) else tuple(parts)
    return skeleton


def _leaves(skeleton: Skeleton) -> dict[str, dict[str, Any]]:
    """Name -> mark, of every tensor."""
    if isinstance(skeleton, dict):
        if _TENSOR in skeleton:
            return {skeleton[_TENSOR]: skeleton}
        parts: Sequence[Any] = list(skeleton.values())
    elif isinstance(skeleton, (list, tuple)):
        parts = skeleton
    else:
        return {}
    return {name: leaf for part in parts for name, leaf in _leaves(part).items()}


def _empty(leaf: dict[str, Any], like: torch.Tensor | None) -> torch.Tensor:
    """An empty tensor: sharded as `like` if that is sharded and of the same shape, else whole and on the CPU."""
    if isinstance(like, DTensor) and list(like.shape) == leaf["shape"]:
        return torch.empty_like(like, dtype=leaf["dtype"], requires_grad=False)
    return torch.empty(leaf["shape"], dtype=leaf["dtype"])


def _compare(what: str, saved: dict[str, dict[str, Any]], live: Tensors) -> None:
    """Raise CheckpointError unless both have the same tensors, of the same shapes."""
    differences = [f"it has {name}, the program does not" for name in saved.keys() - live.keys()]
    differences += [f"the program has {name}, it does not" for name in live.keys() - saved.keys()]
    differences += [
        f"{name} is {tuple(leaf['shape'])} in it, {tuple(live[name].shape)} in the program"
        for name, leaf in saved.items()
        if name in live and leaf["shape"] != list(live[name].shape)
    ]
    if differences:
        shown = "; ".join(sorted(differences)[:3])
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(f"the checkpoint is of a different {what}: {shown}{more}")


@contextlib.contextmanager
def _without_stepping(optimizers: Sequence[torch.optim.Optimizer]) -> Generator[None]:
    """Keep torch from stepping an optimizer without state just to create it: a profiler would count that step.

    torch does not do so for an optimizer whose parameters have gradients (`_init_optim_state`).
    """
    lent: list[torch.Tensor] = []
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if parameters and not optimizer.state and all(p.grad is None for p in parameters):
            parameters[0].grad = torch.zeros_like(parameters[0])
            lent.append(parameters[0])
    try:
        yield
    finally:
        for parameter in lent:
            parameter.grad = None
