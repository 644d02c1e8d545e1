"""Make text from a rank fit to be shown: no secrets, nothing that a terminal would obey. The raw log files stay raw.

Redaction is by name (`WANDB_API_KEY=...`) and by the published shape of well-known tokens (`hf_...`). In what looks
like an environment it would rather hide too much; in what looks like source code it lets `num_tokens=4096` stand.
"""

from __future__ import annotations

import re

HIDDEN = "<redacted>"

# Every repetition is bounded and every name starts where a word starts: a long line costs linear time.
_VALUE = r"""("[^"\n]{1,4096}"|'[^'\n]{1,4096}'|[^\s"',;&)}\]]{1,4096})"""
_NAMED = (
    # HF_TOKEN=x, AWS_SECRET_ACCESS_KEY: x, 'DB_PASSWORD': 'x'
    r"""((?<![A-Z0-9_])[A-Z0-9_]{0,64}(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD)[A-Z0-9_]{0,64}["']?\s{0,4}[=:]\s{0,4})"""
    + _VALUE,
    # password=x, api_key="x", {"auth_token": "x"}, password: x
    r"""(?i)((?<![a-z0-9_])(?:[a-z0-9]{1,32}[_-]){0,4}(?:token|secret|password|passwd|(?:api|access|private|auth)[_-]?key)"""
    r"""(?:["']?\s{0,4}=|["']\s{0,4}:|(?<=password):|(?<=secret):)\s{0,4})""" + _VALUE,
    # --hf-token x
    r"""(?i)((?<!\S)--?[a-z0-9-]{0,64}(?:token|secret|password|passwd|key)\s{1,4})""" + _VALUE,
    r"""(?i)(\bbearer\s{1,4})([a-z0-9._~+/=-]{8,4096})""",
    r"""(://[^\s/:@]{1,256}:)([^\s/@]{1,256})(?=@)""",
)
_SHAPES = (
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_[A-Za-z0-9_]{8,}|glpat-[A-Za-z0-9_-]{8,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|xox[abprs]-[A-Za-z0-9-]{8,}|sk-[A-Za-z0-9_-]{16,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]{8,})"
)
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def redact(text: str) -> str:
    """Hide what looks like a secret."""
    for pattern in _NAMED:
        text = re.sub(pattern, rf"\g<1>{HIDDEN}", text)
    return re.sub(_SHAPES, HIDDEN, text)


def inert(text: str) -> str:
    r"""Show control characters as `\x1b`, so that no rank's text moves the cursor, recolours or renames the terminal.

    Tabs and newlines stay. Direction marks and lone surrogates go too: they reorder a line, or cannot be printed.
    """
    return re.sub(_CONTROL, lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def redact_all(value: object) -> object:
    """Redact every string inside lists, tuples and dicts; the shape stays."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {name: redact_all(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(item) for item in value]
    return value
