"""What the measurements mean: records in, findings out; no clock, no files, no state but what is handed in."""
