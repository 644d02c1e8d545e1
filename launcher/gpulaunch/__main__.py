"""`python -m gpulaunch`: the same as the command."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory: a user file there must not shadow our modules
    from gpulaunch.launcher.cli.main import main

    sys.exit(main())
