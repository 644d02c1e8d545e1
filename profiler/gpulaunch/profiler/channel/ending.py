"""Shutdown of the sidecar: the time limits of what it does when asked to stop, and how long the agent waits.

It waits for a stack sample in progress, then writes the stacks a last time. Killing it earlier loses all samples
since the file was last written: up to half a minute, and in a short job nearly all of them.
"""

from __future__ import annotations

from typing import Final

LOOK_ENDS_S: Final = 4.0
"""A little more than the longest stack sample: py-spy is killed after 3 s."""
SIDECAR_ENDS_S: Final = LOOK_ENDS_S + 2.0
"""The whole shutdown: the reading in progress before the stack sample, and the writes after it."""
