"""Programs that move tensors, and which of these they have built on the CPU. A stand-in takes torch's place."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.probe import built
from gpulaunch.profiler.probe.built import built_at


class Tensor:
    """Whatever is done with it, it is one; where it is moved, the program's frame is asked about."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def to(self, *_: object, **__: object) -> Tensor:
        found.append(built_at(sys._getframe(1), torch))
        return self

    cuda = copy_ = to

    def long(self, *_: object) -> Tensor:
        return self

    def unsqueeze(self, dim: int) -> Tensor:
        return self

    def __mul__(self, other: object) -> Tensor:
        return self


class FreshBuilder:
    """A function of torch's own, that is like no other."""

    def __call__(self, *_: object, **__: object) -> Tensor:
        return Tensor()


torch = SimpleNamespace(**{name: FreshBuilder() for name in built.BUILDERS}, from_numpy=FreshBuilder())
found: list[int] = []


def lines_found(directory: Path, source: str) -> list[int]:
    """What is found at each move of the program, as lines; the marks `# built` and `# moved` are in it for people."""
    path = directory / "program.py"
    path.write_text(source)
    found.clear()
    exec(compile(source, str(path), "exec"), {"__name__": "__main__", "torch": torch, "Tensor": Tensor})
    return list(found)


def check(tmp_path: Path, source: str) -> None:
    """The program's tensors are found to be built at its lines marked `# built`; there is one move."""
    source = textwrap.dedent(source)
    marked = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# built")]

    assert lines_found(tmp_path, source) == (marked or [0])


@pytest.mark.parametrize(
    "line",
    [
        "torch.zeros(3).to('cuda')",
        "torch.zeros(3).cuda()",
        "y = 1; x = torch.ones(3, dtype=float).to('cuda', non_blocking=True)",
        "x = torch.arange(3).long().unsqueeze(0).to('cuda')",
        "Tensor.long(torch.randn(2, 3).to('cuda'))",
        "Tensor().copy_(torch.tensor([1, 2, 3]))",
        "x = [torch.full((2,), 7).to('cuda') for _ in range(1)]",
        "if (x := torch.rand(3).to('cuda')): pass",
        "'\u00e4\u00f6\u00fc', torch.eye(3).to('cuda')",
    ],
)
def test_built_where_it_is_moved(line: str, tmp_path: Path) -> None:
    check(tmp_path, f"{line}  # built\n")


def test_built_and_named_before_it_is_moved(tmp_path: Path) -> None:
    check(
        tmp_path,
        """
        def mask_of(batch):
            mask = Tensor()
            mask = torch.ones(3)  # built
            size = 3
            mask = mask.to("cuda")
            mask = Tensor()

        mask_of(Tensor())
        """,
    )


def test_built_in_a_method_in_a_loop(tmp_path: Path) -> None:
    check(
        tmp_path,
        """
        class Model:
            name = '''
        a text that is not indented
        '''

            def forward(self, batch):
                '''As above,
        so below.'''
                for _ in range(1):
                    hidden: Tensor = torch.zeros(3)  # built
                    def inner():
                        return 1
                    hidden = hidden.to("cuda")

                def last():
                    return 2

        Model().forward(Tensor())
        """,
    )


def test_built_over_several_lines(tmp_path: Path) -> None:
    check(
        tmp_path,
        """
        noise = torch.randn(  # built
            2,
            3,
        ).to(
            "cuda",
        )
        """,
    )


def test_built_by_a_name_taken_from_torch(tmp_path: Path) -> None:
    check(tmp_path, "zeros = torch.zeros\nzeros(3).to('cuda')  # built\n")


@pytest.mark.parametrize(
    "source",
    [
        "Tensor().to('cuda')",
        "torch.from_numpy(1).to('cuda')",
        "batch = Tensor()\nbatch.to('cuda')",
        "for batch in [Tensor()]:\n    batch.to('cuda')",
        "batch = torch.zeros(3)\nfor batch in [Tensor()]:\n    batch.to('cuda')",
        "batch = torch.zeros(3)\nbatch *= 2\nbatch.to('cuda')",
        "batch = torch.zeros(3)\nbatch, other = Tensor(), 1\nbatch.to('cuda')",
        "def move(batch):\n    batch.to('cuda')\nmove(torch.zeros(3))",
        "batches = {'x': torch.zeros(3)}\nbatches['x'].to('cuda')",
        "(torch.zeros(3) * Tensor()).to('cuda')",
        "class Own:\n    zeros = Tensor\ntorch = Own\ntorch.zeros(3).to('cuda')",
        "zeros = Tensor\nzeros(3).to('cuda')",
        "move = Tensor().to\nmove(torch.zeros(3))",
        "Tensor().copy_(Tensor())",
        "(lambda batch: batch.to('cuda'))(Tensor())",
        "batch = Tensor()\nbatch.to('cuda')\nbatch = torch.zeros(3)",
    ],
)
def test_what_is_not_seen_to_be_built_here_is_data(source: str, tmp_path: Path) -> None:
    check(tmp_path, source)


def test_without_a_text_nothing_is_said(tmp_path: Path) -> None:
    source = "torch.zeros(3).to('cuda')"
    found.clear()
    exec(compile(source, "<stdin>", "exec"), {"torch": torch})
    exec(compile(source, str(tmp_path / "gone.py"), "exec"), {"torch": torch})

    assert found == [0, 0]


@pytest.mark.parametrize(
    "now", ["", "def (:\n", "\n\ntorch.zeros(3).to('cuda')\n", "x = 1\n" * 200_000, "\xff\xfe", "\0"]
)
def test_a_text_that_is_not_what_runs_says_nothing(now: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(now, encoding="latin-1")
    found.clear()
    exec(compile("torch.zeros(3).to('cuda')", str(path), "exec"), {"torch": torch})

    assert found == [0]


@given(st.text(alphabet=st.sampled_from("torch.zeros(3)=xy to\n ,:[]'\"#\\"), max_size=200))
def test_whatever_the_text_has_become_nothing_is_raised(tmp_path_factory: pytest.TempPathFactory, now: str) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.py"
    path.write_text(now)
    found.clear()
    exec(compile("def move(x):\n    return x.to('cuda')\nmove(Tensor())", str(path), "exec"), {"Tensor": Tensor})

    assert len(found) == 1


def test_no_variable_of_the_program_is_held(tmp_path: Path) -> None:
    """Python 3.11 keeps what it gives as f_locals, as long as the frame runs: a step's tensors would stay."""
    held: list[Any] = []

    class Seen(Tensor):
        def to(self, *_: object, **__: object) -> Tensor:
            super().to()
            held.append(sys.getrefcount(self))
            return self

    path = tmp_path / "program.py"
    source = "def step(x):\n    x.to('cuda')\n    x.to('cuda')\nstep(Seen())\n"
    path.write_text(source)
    exec(compile(source, str(path), "exec"), {"Seen": Seen})

    assert held[0] == held[1]
