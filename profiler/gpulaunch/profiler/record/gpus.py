"""The GPUs of the node, as the driver has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

DIRECTIONS: Final = ("receive", "transmit")
"""As the GPU sees it: what it receives is copied to it."""
THROTTLE_REASONS: Final = (
    *("power_cap", "thermal", "sync_boost", "board_limit", "reliability"),
    *("hw_slowdown", "hw_thermal", "hw_power_brake"),
)
XIDS: Final = frozenset(
    (
        *(13, 31, 32, 43, 45, 46, 68, 69, 109),  # an engine stopped at what it was given: mostly a program's
        *(48, 63, 64, 92, 94, 95, 140),  # memory: ECC, rows that are replaced
        *(74, 79, 121, 137, *range(144, 151)),  # the bus, NVLink, the link to the CPU
        *(61, 62, 119, 120, 143, 154),  # firmware, starting up, and that the driver wants the card reset
    )
)
"""The numbers of NVIDIA's Xid catalogue that tell something to those who train. Metrics have all others as one: a label
whose values a driver may choose would have as many series as it likes."""


def bare_uuid(uuid: str) -> str:
    """A GPU's UUID without the word before it: to compare by, since CUDA leaves it out.

    NVML has `GPU-` there, or `MIG-`; of what CUDA gives a rank, nobody can tell which of the two it is.
    """
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """What the driver holds against one GPU of the node."""

    index: int
    uuid: str
    xids: Mapping[int, int]
    """How often each critical Xid was reported since this run began, by number; 0: more numbers than are told apart."""
    ecc_uncorrected: int | None
    """Since the driver was loaded; None where ECC is off or not there."""
    recovery_action: str
    """`none`, or what the driver says that the GPU needs; `unknown` where it cannot say."""


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU of the node, or one MIG instance, as NVML has it. What is not known is None, or not in the mapping.

    Sums and counts are since the run began; but ECC errors and remapped rows are the card's own.
    """

    index: int
    """The card's, as NVML counts; an instance has its card's."""
    uuid: str
    """As NVML has it: `GPU-...`, or `MIG-...` for an instance. What a rank says is compared by `bare_uuid`."""
    parent_uuid: str | None
    """The card's UUID, for a MIG instance. What is measured on cards only, such as power and PCIe, is with the card."""
    model: str
    instance: tuple[int, int] | None = None
    """Of a MIG instance: the number of its GPU instance on the card, and of its compute instance in that."""
    age_s: float = 0.0
    """How long ago this was read; 0 for a reading that came in time."""
    utilization_ratio: float | None = None
    """Share of the last 1/6 to 1 s in which at least one kernel ran, however small: never a verdict by itself."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_hertz: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    throttled_by: tuple[str, ...] = ()
    """What keeps the clocks down now, of THROTTLE_REASONS."""
    throttle_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """By reason; several may hold at once, so this is nothing to add up."""
    pcie_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By direction, everything that crosses the link: copies, peers, pages. Where the card's counter cannot be
    followed these are GPM's rates, summed up."""
    pcie_generation: int | None = None
    """Of the link now: idle cards step back to save power, so it means something under load only."""
    pcie_generation_max: int | None = None
    """What card and slot can do together."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    """Packets that had to be sent again: a bad slot or riser."""
    nvlink_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By direction, all links together, payload only."""
    ecc_errors: Mapping[str, int] = field(default_factory=dict[str, int])
    """`corrected` and `uncorrected`, since the driver was loaded."""
    remapped_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of memory, in the card's life, by what they were remapped for: `correctable` and `uncorrectable` errors."""
    remap_pending: bool | None = None
    """Rows wait for a reset of the card to be remapped."""
    remap_failed: bool | None = None
    """A row could not be remapped: the card should be replaced."""
    gpm_ratios: Mapping[str, float] = field(default_factory=dict[str, float])
    """How busy the insides were between the last two readings, by the names of `gpm.RATIOS`; Hopper and newer."""
    numa_node: int | None = None
    """Of its slot; None where the machine has one node only, or does not tell."""

    @property
    def label(self) -> str:
        """How metrics call it: `0`, or `0.7` for GPU instance 7 of card 0, whichever one has that place now.

        Hardly ever is a GPU instance divided further; what is not its first part is `0.7.1`. An instance whose place
        the driver does not tell has its UUID: it must not be taken for its card.
        """
        if self.parent_uuid is not None and self.instance is None:
            return self.uuid
        gpu, compute = self.instance or (None, 0)
        return ".".join(str(each) for each in (self.index, gpu, compute or None) if each is not None)
