"""What a line of a program calls, read in its source."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpulaunch.profiler.samplers.source_lines import SourceLines

PROGRAM = """\
import math, os, time
import numpy as np
import torch.nn.functional as F
from hashlib import sha256
from torch import topk


def train(loader, model, average):
    for epoch in range(3):
        for x, y in loader:
            order = sorted(x)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update(model)
            log.write(
                "step"
            )
            os.fsync(log.fileno())
            np.linalg.svd(
                x
            )
            time.sleep(1)
            sha256(x)
            topk(x, 5)
            np.save(path, x.cpu())
            value = np.sqrt(x + 1) * math.sqrt(2)
            rows = sorted(
                history
            )
            best = sorted(x, key=attrgetter("error"), reverse=True)
            last = sorted(x, key=lambda each: -each[0].age)
            seen = sha256(x.detach().numpy().tobytes()).hexdigest()
            odd = sorted(x, key=lambda each: each.loss.item())
            print(loss)
            total += loss.item()
        validate(model)
    done()


def gan():
    while True:
        d_loss.backward()
        fake = generate()
        g_loss.backward()
        keep(fake)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_functions_of_imported_modules_and_slow_builtins_are_named(program: Path) -> None:
    sources = SourceLines()
    called = {
        line.strip(): name
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if (name := sources.call(str(program), number))
    }

    assert called == {
        "order = sorted(x)": "builtins.sorted",
        "os.fsync(log.fileno())": "os.fsync",
        "np.linalg.svd(": "numpy.linalg.svd",
        "x": "numpy.linalg.svd",
        "sha256(x)": "hashlib.sha256",
        "rows = sorted(": "builtins.sorted",
        "history": "builtins.sorted",
        ")": "builtins.sorted",
        'best = sorted(x, key=attrgetter("error"), reverse=True)': "builtins.sorted",
        "last = sorted(x, key=lambda each: -each[0].age)": "builtins.sorted",
        "seen = sha256(x.detach().numpy().tobytes()).hexdigest()": "hashlib.sha256",
    }


def test_what_a_loop_does_after_backward_is_told_apart(program: Path) -> None:
    sources = SourceLines()
    after = {number for number in range(1, 70) if sources.is_after_backward(str(program), number, may_wait=True)}

    assert {PROGRAM.splitlines()[number - 1].strip() for number in after} == {
        "average.update(model)",
        *("log.write(", '"step"', ")", "os.fsync(log.fileno())", "np.linalg.svd(", "x"),
        *("time.sleep(1)", "sha256(x)", "topk(x, 5)", "validate(model)", "keep(fake)", "print(loss)"),
        *("np.save(path, x.cpu())", "value = np.sqrt(x + 1) * math.sqrt(2)", "rows = sorted(", "history"),
        *('best = sorted(x, key=attrgetter("error"), reverse=True)', "last = sorted(x, key=lambda each: -each[0].age)"),
        "seen = sha256(x.detach().numpy().tobytes()).hexdigest()",
    }


def test_a_line_that_waits_for_the_gpu_counts_for_what_it_calls(program: Path) -> None:
    sources = SourceLines()
    line = PROGRAM.splitlines().index("            total += loss.item()") + 1

    assert not sources.is_after_backward(str(program), line, may_wait=True)
    assert sources.is_after_backward(str(program), line, may_wait=False)


def test_a_function_that_makes_a_step_counts_as_its_backward(tmp_path: Path) -> None:
    """One with a loop of its own makes an epoch, or a round: what follows it is no part of a step."""
    program = tmp_path / "train.py"
    program.write_text(
        "class Trainer:\n"
        "    def train_step(self, batch):\n"
        "        self.loss(batch).backward()\n"
        "    def fit(self):\n"
        "        for batch in loader:\n"
        "            self.train_step(batch)\n"
        "            accuracy(batch)\n"
        "    def update(self, batch):\n"
        "        self.loss(batch).backward()\n"
        "def local_training(client):\n"
        "    for batch in client:\n"
        "        loss(batch).backward()\n"
        "for client in clients:\n"
        "    local_training(client)\n"
        "    average(client)\n"
        "for turn in range(9):\n"
        "    stats.update(turn)\n"
        "    action = policy(turn)\n"
    )
    sources = SourceLines()

    assert [line for line in range(30) if sources.is_after_backward(str(program), line, may_wait=True)] == [7]


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    sources = SourceLines()
    broken, large, binary = tmp_path / "broken.py", tmp_path / "large.py", tmp_path / "binary.py"
    broken.write_text("for x in (:\n")
    large.write_text("import os\n" + "os.fsync(1)\n" * 100_000)
    binary.write_bytes(b"\0\xff" * 9)
    nested = tmp_path / "nested.py"
    nested.write_text("(" * 5000 + ")" * 5000)

    for each in (broken, large, binary, nested, tmp_path, tmp_path / "none.py", Path("<string>"), Path("train.py")):
        assert sources.call(str(each), 1) == ""
        assert not sources.is_after_backward(str(each), 1, may_wait=True)


def test_lines_that_sleep_or_collect_garbage_are_excused(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    lines = (
        "import gc",
        "import time",
        "time.sleep(1)",
        "gc.collect()",
        "gc.freeze()",
        "import json",
        "json.loads(text)",
    )
    program.write_text("\n".join(lines))
    sources = SourceLines()

    assert [line for line in range(10) if sources.is_excused(str(program), line)] == [3, 4]
    assert [sources.call(str(program), line) for line in (3, 4, 7)] == ["", "", "json.loads"]


@pytest.mark.parametrize(
    ("uses", "is_needed"),
    [
        ("SGD(clone.parameters(), lr=0.1)", True),
        ("torch.autograd.grad(loss, list(clone.parameters()))", True),
        ("average(clone.parameters())", False),
        ("SGD(model.parameters(), lr=0.1)", False),
    ],
)
def test_a_copy_of_a_model_that_is_trained_is_excused(tmp_path: Path, uses: str, *, is_needed: bool) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"import copy\nclone = copy.deepcopy(model)\n{uses}\nbest = copy.deepcopy(clone)\n")
    sources = SourceLines()

    assert [line for line in range(9) if sources.is_excused(str(program), line)] == ([2] if is_needed else [])


def test_a_file_that_has_been_changed_since_and_a_pipe_say_nothing(program: Path, tmp_path: Path) -> None:
    sources = SourceLines()
    later_s = time.time() + 60
    os.utime(program, (later_s, later_s))
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)

    assert not any(sources.call(str(program), line) for line in range(60))
    assert sources.call(str(pipe), 1) == ""


def test_files_without_end_fill_nothing(tmp_path: Path) -> None:
    paths = [tmp_path / f"made_{number}.py" for number in range(70)]
    for path in paths:
        path.write_text("import os\nos.fsync(1)\n")
    sources = SourceLines()

    assert [sources.call(str(path), 2) for path in paths] == ["os.fsync"] * 64 + [""] * 6


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torch.autograd.set_detect_anomaly(True)", 2),
        ("with torch.autograd.detect_anomaly():\n    pass", 2),
        ("set_detect_anomaly(mode=debug)", 2),
        ("torch.autograd.set_detect_anomaly(False)", 0),
        ("set_detect_anomaly(mode=False)", 0),
        ("pass", 0),
    ],
)
def test_the_line_that_switches_anomaly_mode_on_is_known(tmp_path: Path, line: str, found: int) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"import torch\n{line}\n")

    assert SourceLines().anomaly_line(str(program)) == found


def test_methods_that_no_model_has_are_calls_whatever_their_object_is(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    lines = (
        "encoded = tokenizer.encode_batch([texts[index] for index in picked])",
        "rows = self.database.execute(query, (first, last)).fetchall()",
        "latent = vae.encode(images)",
    )
    program.write_text("\n".join(lines))
    sources = SourceLines()

    assert [sources.call(str(program), line) for line in (1, 2, 3)] == [
        "tokenizer.encode_batch",
        "self.database.execute(query, (first, last)).fetchall",
        "",
    ]


ON_THE_HOST = """\
import json, time, zlib
import numpy as np
import torch, mylib
from scipy import signal


def batch(kept, rows, model):
    screens = kept if whole else np.frombuffer(zlib.decompress(kept), np.uint8).reshape(84, 84)
    said = [json.loads(line) for line in rows]
    smooth = np.asarray(signal.medfilt(kept["x"], 5)).astype("float32")
    text = str(zlib.decompress(rows[0]).strip().decode())
    parsed = [json.loads(line)["ids"][:64] for line in rows]
    mixed = np.stack([unpacked(row) for row in rows])
    gpu = np.asarray(model(rows))
    scaled = np.asarray(rows) * model
    other = np.asarray(mylib.read(rows))
    back = json.dumps(rows.cpu())
    slow = json.loads(time.sleep(1))
    tensor = np.asarray(torch.sort(rows))
    looked_up = np.asarray(table[np.argmax(rows)])
    return len(rows)
"""


def test_a_line_all_of_whose_calls_are_of_libraries_without_tensors_is_named(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(ON_THE_HOST)
    sources = SourceLines()
    lines = enumerate(ON_THE_HOST.splitlines(), 1)

    assert {line.split()[0]: name for number, line in lines if (name := sources.call(str(program), number))} == {
        "screens": "zlib.decompress",
        "said": "json.loads",
        "smooth": "scipy.signal.medfilt",
        "text": "zlib.decompress",
        "parsed": "json.loads",
    }


TENSORS = """\
import torch
from torch import tensor


def batch(rows, table, device):
    ids = [torch.tensor(row["ids"], dtype=torch.long) for row in rows]
    y = tensor(list(map(len, rows))).to(device)
    both = {"x": torch.tensor([row[0] for row in rows]), "y": torch.FloatTensor(rows[0])}
    looked_up = table[torch.tensor(rows)]
    weighed = torch.tensor(rows) * table
    drawn = torch.tensor([row.sum() for row in rows])
    lost = loss(torch.tensor(rows), table)
    far = torch.tensor(list(map(distance, rows, table)))
    return torch.as_tensor(rows)
"""


def test_a_line_that_only_makes_tensors_of_values_of_python_is_named(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TENSORS)
    sources = SourceLines()

    named = [number for number in range(1, 20) if sources.call(str(program), number) == "torch.tensor"]

    assert [TENSORS.splitlines()[number - 1].split()[0] for number in named] == ["ids", "y", "both", "return"]


def test_methods_of_random_generators_are_known_by_what_made_these(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import random\n"
        "import numpy as np\n"
        "import torch\n"
        "dice = random.Random(3)\n"
        "def draw(memory):\n"
        "    rows = dice.choices(memory)\n"
        "class Replay:\n"
        "    def __init__(self):\n"
        "        self.rng = self.other = np.random.default_rng(0)\n"
        "        self.g = torch.Generator()\n"
        "        size, self.dice = 3, dice\n"
        "    def sample(self, p, rng):\n"
        "        rows = self.rng.choice(9, 4, p=p)\n"
        "        order = self.other.permutation(rows)\n"
        "        rows = self.g.choice(9)\n"
        "        rows = rng.choice(9)\n"
        "        order = self.dice.sample(rows, 9)\n"
        "        rows = self.rng.state.choice(9)\n"
        "        x = torch.as_tensor(model(self.rng.choice(9)))\n"
    )
    sources = SourceLines()

    assert {line: name for line in (6, *range(11, 20)) if (name := sources.call(str(program), line))} == {
        6: "random.choices",
        13: "numpy.random.choice",
        14: "numpy.random.permutation",
        17: "random.sample",
    }
