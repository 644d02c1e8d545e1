"""What a dataset prepares of samples that other ranks or workers keep."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.record.line_calls import OTHER_PARTS, OTHER_RANKS, OTHER_WORKERS
from gpulaunch.profiler.samplers.dropped_samples import lines_of_dropped_samples

MODULE = """
import io, itertools, json, pickle, zlib
import numpy as np
import torch
from torch.utils.data import get_worker_info
from torchvision import transforms

def decode(blob):
    pixels = np.frombuffer(zlib.decompress(blob), np.int16)
    return np.log1p(pixels.astype(np.float32))

def stored(blob):
    KEPT.append(blob)
    return zlib.decompress(blob)

def jitter(blob):
    return decode(blob) + np.random.normal(size=3)

class Stream(IterableDataset):
    def __init__(self, blobs, rank, world_size):
        self.blobs, self.rank, self.world_size = blobs, rank, world_size
        self.transform = transforms.Compose([transforms.ToTensor()])
        self.scale, self.codec, self.seen = Online(), Codec(), {{}}

    def tokens(self, text):
        return [float(word) for word in text.split()]

    @property
    def fresh(self):
        return next(self.numbers)

    def counted(self, text):
        self.seen += 1
        return text.split()

{}

class Sharded(IterableDataset):
    def __init__(self, part):
        self.part = part

dataset = Sharded(dist.get_rank())
"""
DROPS = "if k % self.world_size != self.rank:\n    continue\nyield pixels"
LOOP = "for k, blob in enumerate(self.blobs):\n"


def told(body: str) -> dict[str, str]:
    source = MODULE.format(textwrap.indent(f"def __iter__(self):\n{textwrap.indent(body, '    ')}", "    "))
    lines = source.splitlines()
    found = lines_of_dropped_samples(ast.parse(source))
    return {lines[line - 1].strip(): whose for line, whose in sorted(found.items())}


def in_loop(body: str) -> str:
    return LOOP + textwrap.indent(body, "    ")


@pytest.mark.parametrize(
    "prepares",
    [
        "pixels = decode(blob)",
        "pixels = torch.from_numpy(decode(blob))",
        "pixels = self.transform(zlib.decompress(blob))",
        "pixels = self.tokens(blob.text)",
        "pixels = np.load(io.BytesIO(blob))",
        "pixels = [decode(part) for part in blob.split(4)]",
    ],
)
def test_what_is_prepared_before_the_samples_of_other_ranks_are_dropped_is_told(prepares: str) -> None:
    assert told(in_loop(f"{prepares}\n{DROPS}")) == {prepares: OTHER_RANKS}


def test_all_steps_of_a_sample_are_told() -> None:
    body = f"raw = zlib.decompress(blob)\npixels, size = decode(raw), len(raw)\n{DROPS}, size"
    assert list(told(in_loop(body))) == ["raw = zlib.decompress(blob)", "pixels, size = decode(raw), len(raw)"]


@pytest.mark.parametrize(
    ("before", "test", "whose"),
    [
        ("", "k % dist.get_world_size() != dist.get_rank()", OTHER_RANKS),
        ("info = get_worker_info()\n", "k % info.num_workers != info.id", OTHER_WORKERS),
        ("", "self.rank != k % self.world_size", OTHER_RANKS),
        ("", "self.world_size > 1 and k % self.world_size != self.rank", OTHER_RANKS),
        ("", "k % self.parts != self.part", OTHER_RANKS),
        ("info = get_worker_info()\nwid = info.id if info else 0\n", "k % count != wid", OTHER_WORKERS),
        ("info = get_worker_info()\nshard = self.rank * info.num_workers + info.id\n", "k % n != shard", OTHER_PARTS),
    ],
)
def test_whose_samples_are_dropped_is_told(before: str, test: str, whose: str) -> None:
    body = before + in_loop(f"pixels = decode(blob)\nif {test}:\n    continue\nyield pixels")
    assert told(body) == {"pixels = decode(blob)": whose}


def test_a_yield_of_its_own_samples_alone_drops_the_others() -> None:
    body = in_loop("pixels = decode(blob)\nif k % self.world_size == self.rank:\n    yield pixels")
    assert told(body) == {"pixels = decode(blob)": OTHER_RANKS}


@pytest.mark.parametrize(
    "taken",
    [
        "yield from itertools.islice(self.all_of_them(), self.rank, None, self.world_size)",
        "for k, each in enumerate(self.all_of_them()):\n    if k % self.world_size == self.rank:\n        yield each",
    ],
)
def test_a_generator_that_prepares_all_samples_is_told(taken: str) -> None:
    generator = (
        "def all_of_them(self):\n    for blob in self.blobs:\n        raw = decode(blob)\n        yield decode(raw)"
    )
    assert told(f"{taken}\n\n{generator}") == {"raw = decode(blob)": OTHER_RANKS, "yield decode(raw)": OTHER_RANKS}
    assert told(f"{taken}\n\n{generator}\n\nfor each in self.all_of_them():\n    print(each)") == {}


@pytest.mark.parametrize(
    "body",
    [
        "if k % self.world_size != self.rank:\n    continue\npixels = decode(blob)\nyield pixels",
        f"if cured and k % self.world_size != self.rank:\n    continue\npixels = decode(blob)\n{DROPS}",
        f"pixels = stored(blob)\n{DROPS}",
        f"pixels = jitter(blob)\n{DROPS}",
        f"pixels = self.counted(blob)\n{DROPS}",
        f"pixels = self.augment(blob)\n{DROPS}",
        f"pixels = self.rng.normal(blob)\n{DROPS}",
        f"pixels = pickle.load(self.handle)\n{DROPS}",
        f"pixels = self.codec.decode(blob)\n{DROPS}",
        f"codec = self.codec\npixels = codec.decode(blob)\n{DROPS}",
        f"pixels = self.seen.setdefault(blob, k)\n{DROPS}",
        f"pixels = float(self.fresh)\n{DROPS}",
        f"pixels = np.maximum(blob, peak, peak)\n{DROPS}",
        f"pixels = np.stack([*blob])\n{DROPS}",
        f"pixels = max(blob)\n{DROPS}",
        f"pixels = self.scale(blob)\n{DROPS}",
        f"pixels = list(blob)\n{DROPS}",
        f"pixels = [decode(part) for part in blob]\n{DROPS}",
        f"pixels = blob.decode()\n{DROPS}",
        f"pixels = self.ids[blob]\n{DROPS}",
        f"pixels = blob in self.seen\n{DROPS}",
        f"pixels = json.loads(blob, object_hook=self.hook)\n{DROPS}",
        f"pixels = decode(blob)\nblob.clear()\n{DROPS}",
        f"pixels = next(blob)\n{DROPS}",
        f"pixels = blob.read(4)\n{DROPS}",
        f"pixels = unknown(blob)\n{DROPS}",
        f"pixels = decode(blob)\nif pixels is None:\n    continue\n{DROPS}",
        f"pixels = decode(blob)\nself.total += len(pixels)\n{DROPS}",
        f"pixels = state = decode(blob + state)\n{DROPS}",
        f"self.last = pixels = decode(blob)\n{DROPS}",
        "pixels = decode(blob)\nif len(pixels) % self.world_size != self.rank:\n    continue\nyield pixels",
        "pixels = decode(blob)\nif k % 10 != 0:\n    continue\nyield pixels",
        "pixels = decode(blob)\nif k % self.world_size != self.rank:\n    self.skipped += len(pixels)\n    continue",
    ],
)
def test_what_others_need_too_is_not_told(body: str) -> None:
    assert told(in_loop(body)) == {}


@pytest.mark.parametrize(
    ("before", "after"), [("try:", "except ValueError:\n    return"), ("nonlocal pixels\nwith opened():", "")]
)
def test_where_something_else_may_need_it_nothing_is_told(before: str, after: str) -> None:
    loop = textwrap.indent(in_loop(f"pixels = decode(blob)\n{DROPS}"), "    ")
    assert told(f"{before}\n{loop}\n{after}") == {}


def test_a_dataset_that_may_be_given_no_rank_drops_nothing() -> None:
    source = MODULE.replace("blobs, rank, world_size)", "blobs, rank=0, world_size=1)")
    loop = in_loop(f"pixels = decode(blob)\n{DROPS}")
    source = source.format(textwrap.indent("def __iter__(self):\n" + textwrap.indent(loop, "    "), "    "))
    given = "\ndataset = Stream(blobs, dist.get_rank(), 2)\n"

    assert lines_of_dropped_samples(ast.parse(source)) == {}
    assert lines_of_dropped_samples(ast.parse(source + given)) != {}


def test_what_is_used_after_the_loop_is_not_told() -> None:
    loop = in_loop(f"pixels = decode(blob)\n{DROPS}")
    assert told(f"{loop}\nself.last = pixels") == {}
