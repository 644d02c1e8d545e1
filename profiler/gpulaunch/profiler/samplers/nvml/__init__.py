"""Everything that asks NVML: GPUs and their health, through one reader; for the launcher, a session of the library."""
