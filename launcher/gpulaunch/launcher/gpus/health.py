"""Decides which cards should not be used again, and where their ranks go instead. Pure, except for reading one file.

The sidecar writes NVML's data on each card to `gpu-health.json`; the agent reads it before it starts the next attempt.
A rank on a faulty card goes to a card that this job may use and no rank does; without one it stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpulaunch.launcher.job.host_info import Gpu
from gpulaunch.profiler.xid import PROGRAM_XIDS, XID_TEXTS

HEALTH_FILE = "gpu-health.json"
_CAP_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Health:
    """NVML's data on one card since this run began."""

    index: int
    uuid: str
    xids: tuple[int, ...]
    ecc_uncorrected: int
    """Errors since this run began."""
    recovery_action: str
    """The action that NVML recommends: `none`, `gpu_reset`, `node_reboot` ..."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A rank whose card is faulty, and where it goes."""

    local_rank: int
    card: Gpu
    to: Gpu | None
    """None: no card is free, and the rank stays where it is."""
    evidence: str
    """One sentence for the report."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The cards of the next attempt."""

    moves: tuple[Move, ...]
    visible: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES of the next attempt as UUIDs, independent of CUDA_DEVICE_ORDER; () to leave it unchanged."""


def read(channel_dir: str) -> tuple[Health, ...]:
    """What the sidecar wrote, or () if it wrote nothing: then every card is assumed to be healthy."""
    try:
        with open(os.path.join(channel_dir, HEALTH_FILE), encoding="utf-8", errors="replace") as file:
            return parse(file.read(_CAP_BYTES))
    except OSError:
        return ()


def parse(text: str) -> tuple[Health, ...]:
    """Parse the file's text; from invalid input, or another version, only what can be trusted."""
    try:
        found: Any = json.loads(text)
        cards = found["gpus"] if found["version"] == 1 else []
        return tuple(card for each in cards for card in _card(each))
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def _card(each: Mapping[str, Any]) -> tuple[Health, ...]:
    try:
        return (
            Health(
                index=int(each["index"]),
                uuid=str(each["uuid"]),
                xids=tuple(int(xid) for xid in each.get("xids", ())),
                ecc_uncorrected=int(each.get("ecc_uncorrected") or 0) - int(each.get("ecc_before") or 0),
                recovery_action=str(each.get("recovery_action") or "none"),
            ),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return ()


def fault(card: Health) -> str:
    """One sentence about a card that should not be used again, or "" for a usable one."""
    said: list[str] = []
    for xid in dict.fromkeys(xid for xid in card.xids if xid not in PROGRAM_XIDS):
        words = XID_TEXTS.get(xid)
        said.append(f"Xid {xid}" + (f" ({words})" if words else ""))
    if card.ecc_uncorrected > 0:
        said.append(f"{card.ecc_uncorrected} uncorrected ECC error{'s' if card.ecc_uncorrected > 1 else ''}")
    if card.recovery_action not in ("none", "unknown"):
        said.append(f"that it needs {card.recovery_action.replace('_', ' ')}")
    return f"GPU {card.index} ({card.uuid}) reported {', '.join(said)}" if said else ""


def assign_cards(
    cards: Sequence[Gpu], num_ranks: int, health: Sequence[Health], *, busy: Collection[str] = ()
) -> Placement:
    """Decide which local ranks must move.

    Args:
        cards: those that this node's ranks may see, in the order of CUDA_VISIBLE_DEVICES; local rank i uses the i-th.
        num_ranks: ranks on this node.
        health: from `read`.
        busy: UUIDs of cards in use, from `memory.busy`: by another user, or by a rank that has two.
    """
    # By index, which a MIG instance shares with its card: a fault affects the whole card.
    faults = {card.index: text for card in health if (text := fault(card))}
    used = list(cards[:num_ranks])
    free = [card for card in cards[num_ranks:] if card.index not in faults and card.uuid not in busy]
    moves: list[Move] = []
    for local_rank, card in enumerate(used):
        if card.index in faults:
            to = free.pop(0) if free else None
            moves.append(Move(local_rank=local_rank, card=card, to=to, evidence=faults[card.index]))
            used[local_rank] = to or card
    if not any(move.to for move in moves):
        return Placement(moves=tuple(moves), visible=())
    # A faulty card is left out completely: one that has fallen off the bus can fail cuInit for every process.
    others = [card for card in cards[num_ranks:] if card.uuid in busy]
    return Placement(moves=tuple(moves), visible=tuple(card.uuid for card in [*used, *free, *others]))


def sentence(move: Move) -> str:
    """The message to the user about a move, or about one that was not possible."""
    if move.to is None:
        return f"{move.evidence}; no other GPU is free, so local rank {move.local_rank} is started on it again"
    return f"{move.evidence}; local rank {move.local_rank} moves to GPU {move.to.index} ({move.to.uuid})"
