"""A page as a browser would take it apart, and what every page must keep to. Not a test module."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise

VOID = {"meta", "link", "br", "hr", "img", "input"}
KNOWN = set(
    "html head meta title style body a header h1 h2 h3 h4 p ul li nav main section div figure figcaption svg desc rect "
    "path text span details summary table caption thead tbody tr th td footer script dl dt dd".split()
)
LOADS = {"src", "href", "action", "data", "poster", "srcset", "background", "formaction", "xlink:href", "style"}


@dataclass
class Page(HTMLParser):
    """Elements, and what is wrong with them."""

    wrong: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    refers: list[str] = field(default_factory=list)
    headings: list[tuple[int, str]] = field(default_factory=list)
    scripts: list[tuple[str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    policy: str = ""
    text: str = ""
    title: str = ""
    tables: list[list[list[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in KNOWN:
            self.wrong.append(f"<{tag}>")
        for name, value in attrs:
            if name.startswith("on"):
                self.wrong.append(f"{tag} has {name}")
            if name in LOADS and not (value or "").startswith("#"):
                self.wrong.append(f"{tag} loads {name}={value}")
            if name == "id":
                self.ids.append(value or "")
            if name in ("aria-labelledby", "aria-describedby"):
                self.refers += (value or "").split()
            if name == "href":
                self.refers.append((value or "").removeprefix("#"))
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given.get("content") or ""
        if tag == "svg" and (given.get("role"), "aria-labelledby" in given) != ("img", True):
            self.wrong.append("a chart without a name")
        if tag == "script":
            self.scripts.append((given.get("type") or "", ""))
        if tag == "table":
            self.tables.append([])
        if tag == "tr" and self.tables:
            self.tables[-1].append([])
        if tag in ("th", "td") and self.tables:
            self.tables[-1][-1].append("")
        if tag == "th" and given.get("scope") not in ("col", "row"):
            self.wrong.append("a th without scope")
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            self.wrong.append(f"</{tag}> ends {self._open[-1:]}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            kind, source = self.scripts[-1]
            self.scripts[-1] = (kind, source + data)
            return
        if inside == "style":
            return
        self.text += data
        if inside == "title" and "svg" not in self._open:
            self.title += data
        if re.fullmatch(r"h[1-6]", inside):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)
        if inside in ("th", "td"):
            self.tables[-1][-1][-1] += data

    def handle_comment(self, data: str) -> None:
        self.wrong.append(f"a comment: {data:.40}")

    def finish(self) -> Page:
        self.close()
        if self._open:
            self.wrong.append(f"left open: {self._open}")
        return self


def parse(content: str) -> Page:
    """Take a page apart, and check what must hold for each."""
    page = Page()
    page.feed(content)
    page.finish()
    assert page.wrong == []
    assert len(page.ids) == len(set(page.ids)), sorted(each for each in page.ids if page.ids.count(each) > 1)
    assert set(page.refers) <= set(page.ids), set(page.refers) - set(page.ids)
    assert page.counts["table"] == page.counts["caption"]
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below <= above + 1 for above, below in pairwise(levels)), levels
    assert all(len({len(row) for row in table}) == 1 for table in page.tables)
    assert "default-src 'none'" in page.policy
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for kind, script in page.scripts
        if kind != "application/json"
    ]
    assert re.findall(r"script-src ([^;]*);", page.policy) == [" ".join(digests) or "'none'"]
    ours = content
    for _, script in page.scripts[1:2]:  # the library may write what it likes
        ours = ours.replace(script, "")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", ours)
    return page
