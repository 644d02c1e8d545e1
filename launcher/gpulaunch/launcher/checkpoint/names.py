"""Interprets names: a checkpoint's step, what is still being written, what is only a part, and a user's pattern."""

from __future__ import annotations

import fnmatch
import re

_SUFFIX = re.compile(r"(\.(pt|pth|ckpt|bin|tar|safetensors|pkl))+$")
_STEP = re.compile(r"(?:^|[^a-z])(?:global_?step|step|iter|iteration|checkpoint|ckpt)s?[-_=]?(\d+)", re.IGNORECASE)
_EPOCH = re.compile(r"(?:^|[^a-z])(?:epoch|ep)s?[-_=]?(\d+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(?:^|(?<![a-z])([a-z]*)[-_=.])(\d+)$", re.IGNORECASE)
_NOT_STEPS = frozenset({"rank", "shard", "part", "version", "fold", "of", "seed", "epoch", "ep", "worker", "v"})

_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", "~")
_UNFINISHED_BEGINNINGS = (".", "tmp-", "tmp_")

# Files next to the weights in a checkpoint directory; never a checkpoint themselves.
_PARTS = re.compile(
    r"(optim|scheduler|lr_scheduler|rng_state|random_states|training_args|scaler|sampler|dl_state|custom_checkpoint|"
    r"trainer_state|meta\.pt).*|.*rank[-_=]?\d+.*|.*-\d{5}-of-\d{5}\..*|.*(optim|model)_states\.pt",
    re.IGNORECASE,
)
_TORCH = (".pt", ".pth", ".pth.tar", ".pt.tar")
_WEIGHTS = re.compile(r".*\.safetensors|(pytorch|adapter)_model\.bin")


def is_unfinished(name: str) -> bool:
    """Whether a file or directory of this name is hidden or still being written."""
    return name.startswith(_UNFINISHED_BEGINNINGS) or name.endswith(_UNFINISHED)


def format_of_file(name: str) -> str | None:
    """The family of formats for which a file of this name, on its own, can be a checkpoint."""
    if is_unfinished(name) or _PARTS.fullmatch(name):
        return None
    if name.endswith(".ckpt"):
        return "lightning"
    if name.endswith(_TORCH):
        return "torch"
    return "safetensors" if _WEIGHTS.fullmatch(name) else None


def step_of(name: str) -> int | None:
    """The step in a name: step_20, epoch=1-step=20.ckpt, checkpoint-500, iter_0000100, model_20.pt, 20."""
    stem = _SUFFIX.sub("", name)
    steps = _STEP.findall(stem)
    if steps:
        return int(steps[-1][:18])
    last = _LAST_NUMBER.search(stem)
    if last and (last[1] or "").lower() not in _NOT_STEPS and len(last[2]) <= 18:
        return int(last[2])
    return None


def epoch_of(name: str) -> int | None:
    """The epoch in a name."""
    found = _EPOCH.findall(_SUFFIX.sub("", name))
    return int(found[-1][:18]) if found else None


class Pattern:
    """A user's pattern: a glob for each part of the path, below a checkpoint directory, with one optional `{step}`."""

    def __init__(self, text: str) -> None:
        """`text` must have passed `check_pattern`."""
        parts = [part for part in text.split("/") if part not in ("", ".")]
        self._parts = [re.compile(_expression(part)) for part in parts]
        self.depth = len(parts)

    def match(self, path: str) -> tuple[bool, int | None, str]:
        """Whether the whole path matches, its step, and the path without the step, which identifies the series."""
        parts = path.split("/")
        if len(parts) != self.depth:
            return False, None, ""
        step: int | None = None
        for at, (part, expression) in enumerate(zip(parts, self._parts, strict=True)):
            found = expression.fullmatch(part)
            if found is None:
                return False, None, ""
            if "step" in expression.groupindex:
                step = int(found["step"])
                parts[at] = f"{part[: found.start('step')]}{{step}}{part[found.end('step') :]}"
        return True, step, "/".join(parts)

    def may_match_below(self, directory: str) -> bool:
        """Whether something below this directory can match."""
        parts = directory.split("/") if directory else []
        return len(parts) < self.depth and all(
            expression.fullmatch(part) for part, expression in zip(parts, self._parts, strict=False)
        )


def check_pattern(text: str) -> str | None:
    """Say why a text is not a valid pattern; None if it is."""
    if text.count("{step}") > 1:
        return f"{text!r} has {{step}} more than once"
    rest = text.replace("{step}", "")
    if "{" in rest or "}" in rest:
        return f"{text!r} has braces other than {{step}}"
    if text.startswith("/") or ".." in text.split("/"):
        return f"{text!r} leads out of the checkpoint directory: a pattern is relative to it"
    if not rest.strip("/.") and "{step}" not in text:
        return f"{text!r} names nothing"
    return None


def _expression(part: str) -> str:
    before, braces, after = part.partition("{step}")
    translated = [fnmatch.translate(piece).removesuffix(r"\Z").removesuffix(r"\z") for piece in (before, after)]
    return translated[0] + (r"(?P<step>\d{1,18})" if braces else "") + (translated[1] if braces else "")
