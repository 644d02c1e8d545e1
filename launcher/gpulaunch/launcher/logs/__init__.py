"""Output of the ranks: one file per stream, and one shared console.

A rank's stdout and stderr are pipes read by the agent's loop (`capture`). Bytes go unchanged to the stream's own file
(`files`); `lines` cuts them into lines, and the console prefixes them (`terminal`), folds equal lines of several ranks
(`fold`) and hands them to a sink that never blocks (`sink`). No threads.
"""

from __future__ import annotations
