"""Removes secrets from program output before it is shown or passed on. Works on copies: raw log files stay raw.

Redaction is by name (`WANDB_API_KEY=...`), by place (`scheme://user:...@host`, `Authorization: ...`, PEM) and by the
published shape of well-known tokens (`hf_...`). In text that looks like an environment it rather hides too much; in
text that looks like source code it keeps `num_tokens=4096`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

HIDDEN: Final = "<redacted>"
_DEEPEST: Final = 100
"""Python's recursion limit is about a thousand."""

_WORDS: Final = "token|key|secret|password|passwd"
_WHOLE: Final = "pass|auth|credentials?|pat"
"""Only as a whole word of a name, between `_` or `-`: PATH, AUTHOR, PASSES and `compat` are no secrets."""
# Every repetition is bounded and every name starts where a word starts: a long line costs linear time.
_VALUE: Final = r"""(?!["']?<redacted>)("[^"\n]{1,4096}"|'[^'\n]{1,4096}'|[^\s"',;&)}\]]{1,4096})"""
_OPTION: Final = rf"--?(?:[a-z0-9._-]{{0,64}}(?:{_WORDS})|(?:[a-z0-9._-]{{0,64}}[._-])?(?:{_WHOLE}))"
_NAMED: Final = (
    # HF_TOKEN=x, AWS_SECRET_ACCESS_KEY: x, 'DB_PASSWORD': 'x'
    rf"""((?<![A-Z0-9_])[A-Z0-9_]{{0,64}}(?:{_WORDS.upper()})[A-Z0-9_]{{0,64}}["']?\s{{0,4}}[=:]\s{{0,4}})""" + _VALUE,
    # DB_PASS=x, WANDB_AUTH: x
    rf"""((?<![A-Z0-9_])(?:[A-Z0-9]{{1,32}}_){{1,8}}(?:{_WHOLE.upper()})(?:_[A-Z0-9]{{1,32}}){{0,4}}["']?\s{{0,4}}[=:]\s{{0,4}})"""
    + _VALUE,
    # password=x, api_key="x", {"auth_token": "x"}, password: x
    r"""(?i)((?<![a-z0-9_])(?:[a-z0-9]{1,32}[_-]){0,4}"""
    r"""(?:token|secret|password|passwd|(?:api|access|private|auth)[_-]?key)"""
    r"""(?:["']?\s{0,4}=|["']\s{0,4}:|(?<=password):|(?<=secret):)\s{0,4})""" + _VALUE,
    # --hf-token x, --auth=x
    rf"(?i)((?<!\S){_OPTION}(?:\s{{1,4}}|=))" + _VALUE,
    # Authorization: Basic x, Bearer x
    r"""(?i)(\bauthorization["']?\s{0,4}[:=]\s{0,4}["']?(?:[a-z]{1,16}\s{1,4})?)([^\s"',;<][^\s"',;]{7,4095})""",
    r"(?i)(\bbearer\s{1,4})([a-z0-9._~+/=-]{8,4096})",
    # https://user:x@host, redis://:x@host; to the last @ of the authority, RFC 3986 3.2
    r"(://[^\s/:@?#]{0,256}:)([^\s/?#]{1,256})(?=@)",
    # https://x@host, where it is too long for a user's name
    r"(://)([^\s/:@?#<>]{16,256})(?=@)",
    # an AWS key id and its secret side by side; the id itself goes by its shape
    r"((?:AKIA|ASIA)[A-Z0-9]{12,32}[\s:,;/\"']{1,4})([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])",
    # PEM, RFC 7468; one that is cut off too
    r"(-----BEGIN [A-Z0-9 ]{0,32}PRIVATE KEY-----)((?:(?!-----)[\s\S]){1,16384})",
)
# As long as their issuers make them, or a little shorter: `hf_checkpoints` and `sk-learn-pipeline` are names of files.
_SHAPES: Final = (
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|hf_(?=[a-z0-9]{0,20}[A-Z])[A-Za-z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{8,}"
    r"|github_pat_[A-Za-z0-9_]{8,}|glpat-[A-Za-z0-9_-]{8,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{30,}|xox[abeoprs]-[A-Za-z0-9-]{8,}|nvapi-[A-Za-z0-9_-]{20,}"
    r"|sk-(?:[a-z0-9]{1,16}-){0,3}[A-Za-z0-9_]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[A-Za-z0-9_-]{40,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]{8,})"
)


def redact(text: str) -> str:
    """Hide what looks like a secret."""
    for pattern in _NAMED:
        text = re.sub(pattern, rf"\g<1>{HIDDEN}", text)
    return re.sub(_SHAPES, HIDDEN, text)


def is_secret(name: str) -> bool:
    """Whether a variable of this name must not be shown."""
    pattern = rf"{_WORDS}|(?<![^_.-])(?:{_WHOLE})(?![^_.-])"
    return re.search(pattern, name, re.IGNORECASE) is not None


def redact_words(words: Iterable[str]) -> tuple[str, ...]:
    """Hide secrets among the words of a command line: an option's value may be a word of its own."""
    shown: list[str] = []
    named = False
    for word in words:
        option, equals, _ = word.partition("=")
        asks = re.fullmatch(_OPTION, option, re.IGNORECASE) is not None
        shown.append(HIDDEN if named else f"{option}={HIDDEN}" if asks and equals else redact(word))
        named = asks and not equals
    return tuple(shown)


def redact_all(value: object, depth: int = 0) -> object:
    """Redact every string inside lists, tuples and dicts; the shape stays. Values nested too deep are hidden."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, (dict, list, tuple)) and depth >= _DEEPEST:
        return HIDDEN
    if isinstance(value, dict):
        return {name: redact_all(item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(item, depth + 1) for item in value]
    return value
