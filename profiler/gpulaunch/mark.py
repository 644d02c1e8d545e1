"""Optional markers that a training loop can set for gpulaunch: `step()`, `phase(name)`, `note(text)`.

They are not required: steps and phases are detected from outside. Without gpulaunch around the program they do nothing.
"""

from __future__ import annotations

from gpulaunch.profiler.probe.mark import note, phase, step

__all__ = ["note", "phase", "step"]
