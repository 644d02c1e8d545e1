"""The values of `Probe.thread` that are no thread's id (`get_ident`)."""

from __future__ import annotations

from typing import Final

NO_THREAD: Final = 0
"""No thread has trained yet."""

NESTED: Final = -1
"""The training thread is inside a call whose edges do not count."""

OFF: Final = -2
"""There is no training thread any more. With this or UNOBSERVED the taps pass everything through."""

UNOBSERVED: Final = -3
"""The training thread makes steps that are not observed."""
