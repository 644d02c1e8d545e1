"""Turns measurements into findings: records in, findings out; no clock, no files, no state except the arguments."""
