"""Where attention is computed step by step, and its scores are used for nothing else."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.samplers.attention_steps import lines_of_attention

NANO = """
att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float('-inf'))
att = F.softmax(att, dim=-1)
att = self.attn_dropout(att)
y = att @ v
return y
"""
SHORT = """
scores = torch.matmul(q, k.transpose(2, 3)) / self.scale
scores = scores + mask
return torch.matmul(scores.softmax(-1), v)
"""


def told(body: str) -> list[int]:
    source = "def forward(self, x, q, k, v, mask=None):" + textwrap.indent(body, "    ")
    return [line - 1 for line in sorted(lines_of_attention(ast.parse(source)))]


def test_attention_as_it_is_written_by_hand() -> None:
    assert told(NANO) == [1, 2, 3, 4, 5]
    assert told(SHORT) == [1, 2, 3]
    assert told("\nreturn torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)\n") == []


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("return y", "return y, att"),
        ("att = self.attn_dropout(att)", "self.shown = att"),
        ("att = self.attn_dropout(att)", "att = att / att.sum(-1, keepdim=True)"),
        ("att = self.attn_dropout(att)", "att = att + self.distance(T)"),
        ("att = self.attn_dropout(att)", "att = entmax(att)"),
        ("att = F.softmax(att, dim=-1)", "att = F.relu(att)"),
        ("k.transpose(-2, -1)", "self.keys"),
        ("y = att @ v", "y = v @ att"),
    ],
    ids=[
        *("returned", "kept", "normalised again", "a learned position", "something else", "no softmax"),
        *("no keys of tokens", "multiplied from the other side"),
    ],
)
def test_attention_that_needs_its_scores_or_is_another_one_is_not_told(was: str, now: str) -> None:
    assert was in NANO
    assert told(NANO.replace(was, now)) == []
