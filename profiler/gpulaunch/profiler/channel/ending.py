"""How the sidecar ends: what it still does when it is told to, and how long the agent, who tells it, waits for that.

It waits for the look into a rank that is under way, then writes the stacks a last time. Who kills it before that loses
what was sampled since the file was last written: up to half a minute, and in a short job nearly all.
"""

from __future__ import annotations

from typing import Final

LOOK_ENDS_S: Final = 4.0
"""A little more than the longest look: py-spy is killed after 3 s."""
SIDECAR_ENDS_S: Final = LOOK_ENDS_S + 2.0
"""All of it: before the look the reading that is under way, after it what is written."""
