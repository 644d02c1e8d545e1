"""What ranks print: to a file each, and to one console.

A rank's stdout and stderr are pipes read by the agent's loop (`capture`). Bytes go unchanged to the stream's own file
(`files`); `lines` cuts them into lines, and the console prefixes them (`terminal`), folds what several ranks say alike
(`fold`) and hands them to a sink that never blocks (`sink`). No thread anywhere.
"""

from __future__ import annotations
