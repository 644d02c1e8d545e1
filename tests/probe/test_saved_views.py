"""How much of what a save writes none of its tensors has. Costs the import of torch, and one rank."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from gpulaunch.profiler.probe.saved_views import bytes_of_save

pytestmark = pytest.mark.torch

TABLE = torch.zeros(1000)  # 4,000 bytes


@pytest.mark.parametrize(
    ("saved", "written", "spare"),
    [
        ({"a": TABLE}, 4000, 0),
        ({"a": TABLE[:10]}, 4000, 3960),
        ({"a": TABLE[:10].clone()}, 40, 0),
        ({"a": TABLE[:600], "b": [(TABLE[400:],)]}, 4000, 0),
        ({"a": TABLE[:10].expand(500, 10)}, 4000, 0),
        (OrderedDict(a=nn.Parameter(TABLE[:100]), step=3, name="x"), 4000, 3600),
        ({"a": TABLE[:10], "b": torch.zeros(10, device="meta")}, 0, 0),
        ({"a": TABLE[:10], "b": torch.eye(3).to_sparse()}, 0, 0),
        ({"a": TABLE[:10], "b": torch.nested.nested_tensor([TABLE, TABLE], layout=torch.jagged)}, 0, 0),
        ({"a": TABLE[:10], "model": nn.Linear(2, 2)}, 0, 0),
        ({"a": TABLE[:10], "replay": TABLE.numpy()}, 0, 0),
        ([1] * 20_000, 0, 0),
        (3, 0, 0),
    ],
)
def test_bytes_that_no_tensor_has(saved: Any, written: int, spare: int) -> None:
    assert bytes_of_save(saved) == (written, spare)


def test_what_torch_writes_is_what_is_counted(tmp_path: Any) -> None:
    """As long as this holds, the advice is right."""
    torch.save({"a": TABLE[:10]}, tmp_path / "view.pt")
    torch.save({"a": TABLE[:10].clone()}, tmp_path / "copy.pt")

    view, copy = ((tmp_path / name).stat().st_size for name in ("view.pt", "copy.pt"))
    assert 3900 <= view - copy <= 4100


def test_no_code_of_the_program_runs() -> None:
    class Proxy:
        def __getattribute__(self, name: str) -> Any:
            raise ValueError(name)

    assert bytes_of_save({"a": TABLE[:10], "b": Proxy()}) == (0, 0)


def test_an_object_that_contains_itself_ends() -> None:
    saved: dict[str, Any] = {"a": TABLE[:10]}
    saved["self"] = saved

    assert bytes_of_save(saved) == (0, 0)
