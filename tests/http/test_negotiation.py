"""What a client may be sent, by its own words."""

from __future__ import annotations

import pytest

from gpulaunch.exporters.http import takes_gzip


@pytest.mark.parametrize(
    ("header", "packed"),
    [
        ("gzip", True),
        ("GZIP, deflate, br", True),
        ("gzip;q=0.5", True),
        ("br;q=1, gzip;q=0.8", True),
        ("", False),
        ("identity", False),
        ("deflate", False),
        ("gzip;q=0", False),
        ("gzip;q=0.000", False),
        ("gzip;q=0.3, identity", False),
        ("*", False),
        ("gzipped", False),
    ],
)
def test_a_page_is_packed_for_who_likes_gzip_at_least_as_much(header: str, packed: bool) -> None:
    assert takes_gzip(header) == packed
