"""Fault injection: faults made on a run from outside, to test its recovery. None of this code runs in the ranks."""

from __future__ import annotations
