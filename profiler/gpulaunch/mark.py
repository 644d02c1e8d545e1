"""What a training loop may tell gpulaunch about itself: `step()`, `phase(name)`, `note(text)`.

Nothing needs to be told: steps and phases are seen from outside. Without gpulaunch around the program these do nothing.
"""

from __future__ import annotations

from gpulaunch.profiler.probe.mark import note, phase, step

__all__ = ["note", "phase", "step"]
