"""Flame graphs: boxes that add up, a file that a browser reads, and names that are only ever text."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from speedscope_format import faults_of

from gpulaunch.exporters.files.flame import Box, Stack, boxes_of, speedscope
from gpulaunch.exporters.files.flame_svg import flame_svg

SVG = "{http://www.w3.org/2000/svg}"
STACKS: list[Stack] = [
    (("main (train.py:1)", "forward (net.py:5)", "linear (torch/nn/functional.py:9)"), 6),
    (("main (train.py:1)", "forward (net.py:5)"), 1),
    (("main (train.py:1)", "log (train.py:8)"), 3),
]
HOSTILE = """</title></text><script>alert(1)</script><g onclick='a()' x="&amp;]]><!--"""

stacks_ = st.dictionaries(
    st.lists(st.sampled_from(["a", "b", "c (x.py:3)"]), min_size=1, max_size=6).map(tuple),
    st.integers(1, 50),
    max_size=12,
)


def drawn(stacks: list[Stack]) -> ElementTree.Element:
    return ElementTree.fromstring(flame_svg(boxes_of(stacks), title="title", note="note"))


def boxes_in(svg: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in svg.iter(f"{SVG}g") if group.get("class") == "box"]


# -- boxes


def test_equal_callers_are_one_box() -> None:
    assert boxes_of(STACKS) == (
        Box(label="main (train.py:1)", depth=0, begin=0, samples=10),
        Box(label="forward (net.py:5)", depth=1, begin=0, samples=7),
        Box(label="log (train.py:8)", depth=1, begin=7, samples=3),
        Box(label="linear (torch/nn/functional.py:9)", depth=2, begin=1, samples=6),
    )


def test_the_same_function_below_two_callers_is_two_boxes() -> None:
    boxes = boxes_of([(("a", "f"), 1), (("b", "f"), 2)])

    assert [(box.label, box.begin, box.samples) for box in boxes if box.depth] == [("f", 0, 1), ("f", 1, 2)]


@given(stacks_)
def test_boxes_add_up(stacks: dict[tuple[str, ...], int]) -> None:
    """Every box lies within one of the depth above, none overlaps, and a sample is in one box at each depth it has."""
    boxes = boxes_of(stacks.items())
    rows: dict[int, list[Box]] = {}
    for box in boxes:
        rows.setdefault(box.depth, []).append(box)

    for depth, row in rows.items():
        assert sum(box.samples for box in row) == sum(count for stack, count in stacks.items() if len(stack) > depth)
        assert all(left.begin + left.samples <= right.begin for left, right in pairwise(row))
        for box in row if depth else []:
            below = [one for one in rows[depth - 1] if one.begin <= box.begin < one.begin + one.samples]
            assert len(below) == 1
            assert box.begin + box.samples <= below[0].begin + below[0].samples


# -- the picture


def test_each_box_is_as_wide_as_its_samples_and_says_so() -> None:
    boxes = boxes_in(drawn(STACKS))

    widths = [float(box.find(f"{SVG}rect").get("width", "0")) for box in boxes]  # type: ignore[union-attr]
    assert [round(width / widths[0], 2) for width in widths] == [1.0, 0.7, 0.3, 0.6]
    assert [box.findtext(f"{SVG}title") for box in boxes] == [
        "main (train.py:1): 10 of 10 samples, 100.0 %",
        "forward (net.py:5): 7 of 10 samples, 70.0 %",
        "log (train.py:8): 3 of 10 samples, 30.0 %",
        "linear (torch/nn/functional.py:9): 6 of 10 samples, 60.0 %",
    ]
    assert boxes[0].findtext(f"{SVG}text") == "main (train.py:1)"


def test_what_is_too_narrow_to_see_is_left_out() -> None:
    boxes = boxes_in(drawn([(("main", "often"), 100_000), (("main", "once", "within"), 1)]))

    assert [box.findtext(f"{SVG}title", "").split(":")[0] for box in boxes] == ["main", "often"]


def test_a_name_that_does_not_fit_is_cut() -> None:
    boxes = boxes_in(drawn([(("main", "x" * 400), 1), (("main", "narrow"), 29), (("main", "wide"), 970)]))

    assert [box.findtext(f"{SVG}text") for box in boxes] == ["main", "na..", "wide", ""]


def test_an_empty_graph_is_a_picture_too() -> None:
    assert boxes_in(drawn([])) == []


@pytest.mark.parametrize("name", [HOSTILE, "\"'<>&", "%s %(width)d {x}", "a: b: c", "-->", "]]>"])
def test_a_name_of_any_content_is_text_and_nothing_else(name: str) -> None:
    text = flame_svg(boxes_of([((name,), 4)]), title=name, note=name)
    svg = ElementTree.fromstring(text)
    plain = drawn([(("harmless",), 4)])

    assert [element.tag for element in svg.iter()] == [element.tag for element in plain.iter()]
    (box,) = boxes_in(svg)
    assert box.findtext(f"{SVG}title") == f"{name}: 4 of 4 samples, 100.0 %"
    assert box.findtext(f"{SVG}text") == name
    assert svg.findtext(f"{SVG}script") == plain.findtext(f"{SVG}script")
    assert svg.findtext(f"{SVG}title") == name


def test_nothing_is_loaded_from_anywhere() -> None:
    text = flame_svg(boxes_of(STACKS), title="t", note="n")

    assert [word for word in ("href", "@import", "url(", "innerHTML", "eval(") if word in text] == []
    assert text.count("http") == 1  # the name space


# -- the script

# As much of a browser as the script needs.
BROWSER = """
const text = require("fs").readFileSync(process.argv[2], "utf8");
function element(attributes, textContent) {
  const classes = new Set(), listeners = {};
  return {
    textContent, attributes, classes, listeners,
    getAttribute: (name) => attributes[name], setAttribute: (name, value) => { attributes[name] = value; },
    addEventListener: (what, call) => { listeners[what] = call; },
    classList: { toggle: (name, on) => { if (on) classes.add(name); else classes.delete(name); } },
  };
}
const boxes = [];
const groups = text.matchAll(/<g class="box" ([^>]*)><title>(.*?)<.title><rect ([^>]*)\\/><text ([^>]*)>(.*?)<.text>/g);
const pairs = (source) => Object.fromEntries([...source.matchAll(/([a-z-]+)="([^"]*)"/g)].map((m) => [m[1], m[2]]));
for (const [, of, title, rect, at, shown] of groups) {
  const g = element(pairs(of), "");
  g.parts = { title: element({}, title), rect: element(pairs(rect), ""), text: element(pairs(at), shown) };
  g.querySelector = (name) => g.parts[name];
  boxes.push(g);
}
const named = { found: element({}, ""), whole: element({}, ""), search: element({}, "") };
let wanted = "";
global.window = { prompt: () => wanted };
global.document = { querySelectorAll: () => boxes, getElementById: (id) => named[id] };
eval(text.match(/CDATA\\[([^]*)\\]\\]>/)[1]);
const state = () => boxes.map((g) => [g.parts.title.textContent.split(" ")[0], [...g.classes].join(),
                                      Math.round(g.parts.rect.attributes.width), g.parts.text.textContent]);
const said = [];
for (const step of JSON.parse(process.argv[3])) {
  if (step.search !== undefined) {
    wanted = step.search;
    named.search.listeners.click();
    said.push(named.found.textContent);
  } else if (step.whole) named.whole.listeners.click();
  else boxes[step.click].listeners.click();
}
console.log(JSON.stringify({ state: state(), said }));
"""


def browse(tmp_path: Path, *steps: dict[str, object]) -> dict[str, list[object]]:
    """Draw, do these steps in the script's world, and give what is seen then."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    (tmp_path / "flame.svg").write_text(flame_svg(boxes_of(STACKS), title="t", note="n"))
    (tmp_path / "browser.js").write_text(BROWSER)
    argv = [node, str(tmp_path / "browser.js"), str(tmp_path / "flame.svg"), json.dumps(steps)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    seen: dict[str, list[object]] = json.loads(done.stdout)
    return seen


def test_a_click_makes_a_box_as_wide_as_the_picture(tmp_path: Path) -> None:
    seen = browse(tmp_path, {"click": 1})

    assert seen["state"] == [
        ["main", "faded", 1200, "main (train.py:1)"],
        ["forward", "", 1200, "forward (net.py:5)"],
        ["log", "away", 360, "log (train.py:8)"],
        ["linear", "", 1029, "linear (torch/nn/functional.py:9)"],
    ]
    assert browse(tmp_path, {"click": 1}, {"whole": True}) == browse(tmp_path)


def test_a_search_marks_what_it_finds_and_counts_no_sample_twice(tmp_path: Path) -> None:
    """Both boxes have an `n` and an `e` in net and linear: one lies within the other."""
    seen = browse(tmp_path, {"search": "NE"})

    assert [box[1] for box in seen["state"]] == ["", "hit", "", "hit"]  # type: ignore[index]
    assert seen["said"] == ["ne: 70.0 % of the samples"]
    assert browse(tmp_path, {"search": "log"})["said"] == ["log: 30.0 % of the samples"]
    assert browse(tmp_path, {"search": "nowhere"})["said"] == ["nowhere: 0.0 % of the samples"]
    assert [box[1] for box in browse(tmp_path, {"search": "log"}, {"search": ""})["state"]] == [""] * 4  # type: ignore[index]


# -- speedscope


def test_speedscope_gets_each_profile_with_frames_in_common() -> None:
    content = speedscope({"all": STACKS, "forward": STACKS[:1]}, name="run", exporter="gpulaunch")

    assert content["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert content["shared"]["frames"] == [
        {"name": "main", "file": "train.py", "line": 1},
        {"name": "forward", "file": "net.py", "line": 5},
        {"name": "linear", "file": "torch/nn/functional.py", "line": 9},
        {"name": "log", "file": "train.py", "line": 8},
    ]
    kind = {"type": "sampled", "unit": "none", "startValue": 0}
    assert content["profiles"] == [
        {**kind, "name": "all", "endValue": 10, "samples": [[0, 1], [0, 1, 2], [0, 3]], "weights": [1, 6, 3]},
        {**kind, "name": "forward", "endValue": 6, "samples": [[0, 1, 2]], "weights": [6]},
    ]


@pytest.mark.parametrize("label", ["(elsewhere)", "plain", "f (x)", "f (x:y)", "f (x.py:12345678901)"])
def test_a_label_without_a_place_is_a_name(label: str) -> None:
    content = speedscope({"all": [((label,), 1)]}, name="run", exporter="gpulaunch")

    assert content["shared"]["frames"] == [{"name": label}]


@given(stacks_)
def test_every_sample_has_its_frames(stacks: dict[tuple[str, ...], int]) -> None:
    content = json.loads(json.dumps(speedscope({"all": stacks.items()}, name="run", exporter="gpulaunch")))
    assert faults_of(content) == []
    (profile,) = content["profiles"]
    frames = [
        frame["name"] + (f" ({frame['file']}:{frame['line']})" if "file" in frame else "")
        for frame in content["shared"]["frames"]
    ]

    again = {
        tuple(frames[number] for number in sample): weight
        for sample, weight in zip(profile["samples"], profile["weights"], strict=True)
    }
    assert again == stacks
    assert profile["endValue"] == sum(stacks.values())
