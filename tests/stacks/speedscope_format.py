"""What the viewer speedscope asks of a file, by the facts of its schema. Not a test module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
UNITS = ("none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes")
OF_A_FILE = {"$schema": str, "shared": dict, "profiles": list, "name": str, "exporter": str, "activeProfileIndex": int}
OF_A_FRAME = {"name": str, "file": str, "line": int, "col": int}


def faults_of(content: Any) -> list[str]:
    """What is not as the schema has it, of a file with sampled profiles; nothing: it is such a file."""
    if not isinstance(content, dict):
        return ["no object"]
    return [*_faults_of(content)]


def _faults_of(content: dict[str, Any]) -> Iterator[str]:
    if content.get("$schema") != SCHEMA:
        yield f"schema {content.get('$schema')!r}"
    yield from _wrong_types("file", content, OF_A_FILE)
    frames, profiles = content.get("shared", {}).get("frames"), content.get("profiles")
    if not isinstance(frames, list) or not isinstance(profiles, list):
        yield "no lists of frames and profiles"
        return
    if not 0 <= content.get("activeProfileIndex", 0) < len(profiles):
        yield "the profile that is shown first is none"
    for number, frame in enumerate(frames):
        if "name" not in frame:
            yield f"frame {number} has no name"
        yield from _wrong_types(f"frame {number}", frame, OF_A_FRAME)
    for number, profile in enumerate(profiles):
        yield from (f"profile {number}: {fault}" for fault in _faults_of_profile(profile, len(frames)))


def _wrong_types(of: str, found: dict[str, Any], types: dict[str, type]) -> Iterator[str]:
    for key, value in found.items():
        if key not in types:
            yield f"{of}: {key} is not in the schema"
        elif type(value) is not types[key]:
            yield f"{of}: {key} is {value!r}"


def _faults_of_profile(profile: dict[str, Any], num_frames: int) -> Iterator[str]:
    if profile.get("type") != "sampled":
        yield f"type {profile.get('type')!r}"
    if type(profile.get("name")) is not str:
        yield "no name"
    if profile.get("unit") not in UNITS:
        yield f"unit {profile.get('unit')!r}"
    start, end = profile.get("startValue"), profile.get("endValue")
    samples, weights = profile.get("samples"), profile.get("weights")
    if not (_is_number(start) and _is_number(end)):
        yield f"from {start!r} to {end!r}"
        return
    if not (isinstance(samples, list) and isinstance(weights, list) and len(samples) == len(weights)):
        yield "not as many weights as samples"
        return
    if not all(_is_number(weight) and weight >= 0 for weight in weights):
        yield "a weight that is none"
    elif start + sum(weights) != end:
        yield f"weights of {sum(weights)} from {start} to {end}"
    for sample in samples:
        if not all(type(index) is int and 0 <= index < num_frames for index in sample):
            yield f"sample {sample} of {num_frames} frames"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
