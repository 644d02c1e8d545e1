"""Draws a flame graph as a self-contained SVG file: click to zoom, search to highlight, hover for the numbers.

Names of functions and files are untrusted, so they are only ever text: escaped where they are written, and the script,
which is the same in every file, reads and sets text and numbers, never markup. A viewer that runs no scripts
still shows the graph, and the browser's own search finds the names.
"""

from __future__ import annotations

import html
import zlib
from collections.abc import Iterable
from colorsys import hls_to_rgb
from typing import Final

from gpulaunch.exporters.files.flame import Box

_WIDTH: Final = 1200
_MARGIN: Final = 10
_TOP: Final = 60
_ROW: Final = 17
_CHAR: Final = 6.7  # width of an 11 px monospaced letter; DejaVu and Liberation have 0.602 em
_NARROWEST: Final = 0.5
"""Narrower boxes, in pixels, are left out, and so is everything above them."""


def flame_svg(boxes: Iterable[Box], *, title: str, note: str) -> str:
    """Draw the boxes of one flame graph, the outermost frames on top.

    Args:
        boxes: from `flame.boxes_of`.
        title: the headline.
        note: additional information, in one line.
    """
    every = list(boxes)
    total = sum(box.samples for box in every if box.depth == 0)
    drawn = [box for box in every if box.samples * _WIDTH >= _NARROWEST * total]
    height = _TOP + _ROW * (2 + max((box.depth for box in drawn), default=0)) + _MARGIN
    wide = _WIDTH + 2 * _MARGIN
    return "\n".join(
        (
            '<?xml version="1.0" encoding="utf-8"?>',
            "<!-- generator: gpulaunch -->",
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height}" width="{wide}" height="{height}">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" width="{wide}" height="{height}"/>',
            f'<text class="head" x="{_MARGIN}" y="22">{html.escape(title)}</text>',
            f'<text x="{_MARGIN}" y="40">{html.escape(note)}</text>',
            f'<text id="found" x="{_MARGIN}" y="{height - _MARGIN}"> </text>',
            f'<text id="whole" class="button" x="{wide - 170}" y="22">whole graph</text>',
            f'<text id="search" class="button" x="{wide - 70}" y="22">search</text>',
            *(_drawn(box, total) for box in drawn),
            f"<script><![CDATA[{_NUMBERS}{_SCRIPT}]]></script>",
            "</svg>\n",
        )
    )


def _drawn(box: Box, total: int) -> str:
    x = _MARGIN + box.begin * _WIDTH / total
    width = box.samples * _WIDTH / total
    y = _TOP + _ROW * box.depth
    share = f"{box.samples} of {total} samples, {100 * box.samples / total:.1f} %"
    return (
        f'<g class="box" data-begin="{box.begin}" data-samples="{box.samples}" data-depth="{box.depth}">'
        f"<title>{html.escape(box.label)}: {share}</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 1}" fill="{_colour(box.label)}"/>'
        f'<text x="{x + 3:.2f}" y="{y + 12}">{html.escape(_cut(box.label, width))}</text></g>'
    )


def _cut(label: str, width: float) -> str:
    """Truncate a label to a width in pixels; the script does the same after a zoom."""
    letters = int((width - 6) / _CHAR)
    if letters < 3:
        return ""
    return label if len(label) <= letters else f"{label[: letters - 2]}.."


def _colour(label: str) -> str:
    """Return a colour: torch is blue, everything else is warm; a label always has the same shade."""
    shade = zlib.crc32(label.encode("utf-8", "replace"))
    hue = 205 + shade % 20 if "(torch/" in label else 25 + shade % 25
    rgb = hls_to_rgb(hue / 360, (68 + shade // 1024 % 12) / 100, (60 + shade // 32 % 15) / 100)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


_STYLE: Final = (
    "text{font:11px monospace;fill:#222}.head{font-size:15px;font-weight:bold}.paper{fill:#fff}"
    ".box{cursor:pointer}.box text{pointer-events:none}.box:hover rect{stroke:#222}"
    ".button{cursor:pointer;text-decoration:underline}.hit rect{fill:#d33cd3}.faded{opacity:.5}.away{display:none}"
)

# It must not contain `]]>`, and no text is inserted into it.
_NUMBERS: Final = f"var WIDTH = {_WIDTH}, MARGIN = {_MARGIN}, CHAR = {_CHAR};"
_SCRIPT: Final = """
(function () {
  "use strict";
  var all = Array.prototype.map.call(document.querySelectorAll("g.box"), function (g) {
    return {
      g: g, rect: g.querySelector("rect"), text: g.querySelector("text"),
      label: g.querySelector("title").textContent.replace(/: [^:]*$/, ""),
      begin: +g.getAttribute("data-begin"), samples: +g.getAttribute("data-samples"),
      depth: +g.getAttribute("data-depth")
    };
  });
  var total = all.reduce(function (sum, box) { return box.depth ? sum : sum + box.samples; }, 0);
  var found = document.getElementById("found");

  function end(box) { return box.begin + box.samples; }

  function zoom(to) {
    all.forEach(function (box) {
      var holds = box.depth < to.depth && box.begin <= to.begin && end(box) >= end(to);
      var inside = box.depth >= to.depth && box.begin >= to.begin && end(box) <= end(to);
      box.g.classList.toggle("away", !holds && !inside);
      box.g.classList.toggle("faded", holds);
      if (!holds && !inside) return;
      var x = MARGIN + (holds ? 0 : (box.begin - to.begin) / to.samples * WIDTH);
      var width = holds ? WIDTH : box.samples / to.samples * WIDTH;
      var letters = Math.floor((width - 6) / CHAR);
      box.rect.setAttribute("x", x);
      box.rect.setAttribute("width", width);
      box.text.setAttribute("x", x + 3);
      box.text.textContent = letters < 3 ? "" :
        box.label.length <= letters ? box.label : box.label.slice(0, letters - 2) + "..";
    });
  }

  function mark(wanted) {
    var until = 0, sum = 0, hits = [];
    all.forEach(function (box) {
      var hit = wanted !== "" && box.label.toLowerCase().indexOf(wanted) >= 0;
      box.g.classList.toggle("hit", hit);
      if (hit) hits.push(box);
    });
    hits.sort(function (a, b) { return a.begin - b.begin || b.samples - a.samples; });
    hits.forEach(function (box) {  // what is within another hit counts once
      if (end(box) > until) { sum += box.samples; until = end(box); }
    });
    found.textContent = wanted === "" ? " " : wanted + ": " + (100 * sum / total).toFixed(1) + " % of the samples";
  }

  function whole() { zoom({ begin: 0, samples: total, depth: 0 }); }

  all.forEach(function (box) { box.g.addEventListener("click", function () { zoom(box); }); });
  document.getElementById("whole").addEventListener("click", whole);
  document.getElementById("search").addEventListener("click", function () {
    mark((window.prompt("Part of a function's name or of a file's:") || "").toLowerCase());
  });
})();
"""
