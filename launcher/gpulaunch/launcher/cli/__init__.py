"""The command line: one file per subcommand; the only package that combines the others."""

from __future__ import annotations
