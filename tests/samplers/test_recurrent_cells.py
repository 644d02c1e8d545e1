"""Which loops over the elements of a sequence call an LSTM cell that could take all of them at once."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.samplers.recurrent_cells import lines_of_cells

MODULE = """
class Reader(nn.Module):
    def __init__(self, width):
        self.cell = nn.LSTMCell(width, width)
        self.other = nn.GRUCell(width, width)

    def forward(self, x, state):
        h, c = state
        out = []
{}
        return torch.stack(out)
"""


def told(loop: str) -> set[str]:
    source = MODULE.format(textwrap.indent(loop, " " * 8))
    lines = source.splitlines()
    return {lines[line - 1].strip() for line in lines_of_cells(ast.parse(source))}


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        ("for now in x:\n    h, c = self.cell(now, (h, c))\n    out.append(h)", "h, c = self.cell(now, (h, c))"),
        ("for at in range(9):\n    state = self.cell(x[:, at], state)", "state = self.cell(x[:, at], state)"),
        (
            "for at in range(9):\n    word = embed(x[at])\n    h, c = self.cell(word, (h, c))\n    y = self.out(h)",
            "h, c = self.cell(word, (h, c))",
        ),
    ],
    ids=["", "the state in one", "what each element is made of is known, too"],
)
def test_a_cell_that_is_called_for_each_element_of_a_sequence(loop: str, line: str) -> None:
    assert told(loop) == {line}


@pytest.mark.parametrize(
    "loop",
    [
        "for at in range(9):\n    h, c = self.cell(word, (h, c))\n    word = embed(self.out(h).argmax(-1))",
        "for now in x:\n    seen = attend(h, x)\n    h, c = self.cell(now + seen, (h, c))",
        "for now in x:\n    h, c = self.cell(now, (h, c))\n    h = self.drop(h)",
        "for now in x:\n    h, c = self.cell(now, (self.drop(h), mask * c))",
        "for now in x:\n    h, c = self.cell(now, (h, c))\n    if (h > 3).any():\n        break",
        "for now in x:\n    new, c = self.cell(now, (h, c))\n    h = torch.where(mask, new, h)",
        "for now in x:\n    if len(now):\n        h, c = self.cell(now, (h, c))",
        "for now in x:\n    h = self.other(now, h)",
        "while going:\n    h, c = self.cell(x[0], (h, c))",
        "h, c = self.cell(x[0], (h, c))",
    ],
    ids=[
        *("a decoder", "attention", "dropout after it", "dropout before it", "ends by what it computes", "a mask"),
        *("not for each", "no LSTM, which is no faster on a CPU", "of unknown length", "no loop"),
    ],
)
def test_one_that_needs_more_of_the_state_than_its_own_is_not_told(loop: str) -> None:
    assert told(loop) == set()
