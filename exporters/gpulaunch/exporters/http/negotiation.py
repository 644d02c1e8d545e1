"""Content negotiation: reads the `Accept` and `Accept-Encoding` headers of a request."""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=32)  # a client sends the same each time
def takes_gzip(accept_encoding: str) -> bool:
    """Say whether an Accept-Encoding header ranks gzip at least as high as the identity encoding."""
    weight = weights(accept_encoding, "gzip", "identity")
    return weight["gzip"] > 0 and weight["gzip"] >= weight["identity"]


def weights(header: str, *known: str) -> dict[str, float]:
    """Return the q-value that a header gives to each of these; 0: it does not name it."""
    weight = dict.fromkeys(known, 0.0)
    for clause in header.split(","):
        kind, *parameters = (part.strip().lower() for part in clause.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        if kind in weight and quality.replace(".", "", 1).isdecimal() and quality.isascii():
            weight[kind] = max(weight[kind], float(quality))
    return weight
