"""Data types of the node's GPUs, as the driver reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

DIRECTIONS: Final = ("receive", "transmit")
"""From the GPU's side: `receive` is data copied to it."""
THROTTLE_REASONS: Final = (
    *("power_cap", "thermal", "sync_boost", "board_limit", "reliability"),
    *("hw_slowdown", "hw_thermal", "hw_power_brake"),
)


def bare_uuid(uuid: str) -> str:
    """A GPU's UUID without its prefix: for comparison, since CUDA leaves the prefix out.

    NVML's prefix is `GPU-` or `MIG-`; from the UUID that CUDA gives a rank it cannot be told which of the two it is.
    """
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """Faults that the driver reports for one GPU of the node."""

    index: int
    uuid: str
    xids: Mapping[int, int]
    """How often each critical Xid was reported since this run began, by number; 0: all numbers not counted apart."""
    ecc_uncorrected: int | None
    """Since the driver was loaded; None where ECC is off or not available."""
    recovery_action: str
    """`none`, or the action that the driver recommends for the GPU; `unknown` where it reports none."""


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU of the node, or one MIG instance, as NVML reports it. Unknown values are None, or not in the mapping.

    Sums and counts are since the run began, except ECC errors and remapped rows, which are the card's own.
    """

    index: int
    """The card's index in NVML; an instance has its card's."""
    uuid: str
    """As in NVML: `GPU-...`, or `MIG-...` for an instance. A rank's UUID is compared by `bare_uuid`."""
    parent_uuid: str | None
    """The card's UUID, for a MIG instance. Values measured per card only, such as power and PCIe, are with the card."""
    model: str
    instance: tuple[int, int] | None = None
    """Of a MIG instance: the number of its GPU instance on the card, and of its compute instance in that one."""
    age_s: float = 0.0
    """Age of this reading; 0 if it was in time."""
    utilization_ratio: float | None = None
    """Share of the last 1/6 to 1 s in which at least one kernel ran, however small: never a verdict by itself."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_hertz: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    throttled_by: tuple[str, ...] = ()
    """The THROTTLE_REASONS that lower the clocks now."""
    throttle_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """By reason; several may hold at once, so they must not be summed."""
    pcie_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By direction, all traffic of the link: copies, peers, pages. Where the card's counter cannot be followed, the sum
    of GPM's rates."""
    pcie_generation: int | None = None
    """Of the link now: idle cards lower it to save power, so it is meaningful under load only."""
    pcie_generation_max: int | None = None
    """The maximum of card and slot together."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    """Packets that had to be resent: a bad slot or riser."""
    nvlink_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By direction, all links together, payload only."""
    ecc_errors: Mapping[str, int] = field(default_factory=dict[str, int])
    """`corrected` and `uncorrected`, since the driver was loaded."""
    remapped_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """Memory rows remapped in the card's life, by cause: `correctable` and `uncorrectable` errors."""
    remap_pending: bool | None = None
    """Rows will be remapped at the next reset of the card."""
    remap_failed: bool | None = None
    """A row could not be remapped: the card should be replaced."""
    gpm_ratios: Mapping[str, float] = field(default_factory=dict[str, float])
    """Utilisation of the GPU's units between the last two readings, by the names of `gpm.RATIOS`; Hopper and newer."""
    numa_node: int | None = None
    """Of its slot; None where the machine has only one node, or does not report it."""

    @property
    def label(self) -> str:
        """The label in metrics: `0`, or `0.7` for GPU instance 7 of card 0, whichever instance has that place now.

        GPU instances are rarely divided further; a part other than the first is `0.7.1`. An instance whose place the
        driver does not report has its UUID: it must not be taken for its card.
        """
        if self.parent_uuid is not None and self.instance is None:
            return self.uuid
        gpu, compute = self.instance or (None, 0)
        return ".".join(str(each) for each in (self.index, gpu, compute or None) if each is not None)
