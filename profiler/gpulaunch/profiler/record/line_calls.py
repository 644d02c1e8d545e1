"""What stands in the place of the function that a line of a program calls, where that is not what matters of it."""

from __future__ import annotations

from typing import Final

PYTHON: Final = "Python code"
"""It always holds the GIL, whatever it calls."""
DRAWS_ORDER: Final = "torch.utils.data.Sampler.__iter__"
"""It asks one of torch's samplers for the indices of a batch."""
CONSTANT: Final = "the same in every step"
"""Its result depends on nothing that changes."""
ONE_HOT: Final = "one_hot"
"""It makes a matrix of nothing but zeros and a one in each row."""
ELEMENTS: Final = "element"
"""It takes tensors apart, element by element."""
FORWARD_AGAIN: Final = "forward again"
"""It makes the forward pass of the step a second time, only to compare the predictions."""
PAIRS: Final = "differences of pairs"
"""It makes the differences of all pairs of vectors, only for their distances, and backward goes through them."""
PAIRS_FORWARD: Final = "differences of pairs, forward"
"""The same, but backward does not."""
PERMUTATION: Final = "permutation"
"""It draws a permutation of everything for a few of its elements."""
