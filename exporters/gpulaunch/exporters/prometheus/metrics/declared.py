"""Makes the catalogue's rows of the quantities of ranks, from their declarations."""

from __future__ import annotations

from typing import Final

from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Label, Metric
from gpulaunch.profiler.channel.declare import Quantity, quantities_of

_UNITS: Final = ("seconds", "bytes", "ratio")


def declared(record: type, *labels: Label) -> tuple[Metric, ...]:
    """Return a row for each metric of a record of quantities, in the order of their declaration.

    Args:
        record: the record. A metric without help is left out: the catalogue has its row elsewhere.
        labels: that all of them have, besides the rank.
    """
    by_metric: dict[str, list[Quantity]] = {}
    for each in quantities_of(record):
        by_metric.setdefault(each.metric, []).append(each)
    return tuple(
        Metric(
            name=name,
            kind=_kind(same[0]),
            help=same[0].help,
            unit=next((unit for unit in _UNITS if name.removesuffix("_total").endswith(f"_{unit}")), ""),
            labels=(RANK, *labels, *_own_labels(same)),
        )
        for name, same in by_metric.items()
        if same[0].help
    )


def _kind(quantity: Quantity) -> Kind:
    if quantity.buckets:
        return Kind.HISTOGRAM
    return Kind.COUNTER if quantity.is_counter else Kind.GAUGE


def _own_labels(same: list[Quantity]) -> tuple[Label, ...]:
    """Return the labels by which quantities of the same metric differ."""
    if same[0].keys:
        return (Label(name=same[0].key_label, values=frozenset(same[0].keys)),)
    return tuple(Label(name=name, values=frozenset(each.labels[name] for each in same)) for name in same[0].labels)
