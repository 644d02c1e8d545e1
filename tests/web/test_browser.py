"""The page in a browser, as people meet it: before, during and after a run, small, large and hostile."""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scenes
from kept_run import GC, SYNC, state
from reported import with_text
from scenes import EVIL, Scene, Served
from tab import CHROMIUM, Tab

from gpulaunch.exporters.view.model import RunView, StallView
from gpulaunch.exporters.web import live_documents

Serve = Callable[..., Served]
Look = Callable[..., Tab]
Stage = Callable[..., Scene]

SECTIONS = ("losses", "steps", "memory", "copies", "loader", "gpus", "failures", "goodput", "cost", "run", "notes")


def text_of(page: Any, section: str) -> str:
    return str(page.locator(f"#{section}").inner_text())


def figures(page: Any) -> dict[str, str]:
    names, values = (page.locator(f".figures {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def rows(page: Any, section: str, caption: str) -> list[list[str]]:
    """The rows of the table whose caption begins so."""
    found: list[list[str]] = page.eval_on_selector_all(
        f"#{section} table",
        """(tables, caption) => tables.filter((table) => table.caption.textContent.startsWith(caption)).flatMap(
            (table) => [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent)))""",
        caption,
    )
    return found


def legend(page: Any, chart: str) -> list[str]:
    return list(page.locator(f"#figure-{chart} .legendtext").all_text_contents())


# --- the states of a run --------------------------------------------------------------------------------------------


def test_before_the_first_look_the_page_says_so_and_then_goes_on(serve: Serve, look: Look, stage: Stage) -> None:
    served = serve(stage(scenes.starting))
    tab = look(served.url)
    page = tab.open()
    tab.until("starting")
    assert "the first look at the run is not over yet" in page.locator("#connection").inner_text()
    for _ in range(3):
        with page.expect_response("**/api/page.json"):
            pass
    tab.until("starting")

    served.board.publish(state(10.0))
    tab.until("live")
    assert figures(page)["Steps"] == "100"


def test_a_run_without_ranks_has_sentences_and_no_empty_charts(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.empty)).url)
    tab.open()
    page = tab.until("live")
    assert "No rank has started yet." in text_of(page, "steps")
    assert "No GPU was found." in text_of(page, "gpus")
    assert "No batch from a torch DataLoader was observed." in text_of(page, "loader")
    assert "No rule found a problem." in text_of(page, "losses")
    assert page.locator("figure").count() == 0
    assert page.locator("table tbody:not(:has(tr))").count() == 0
    assert figures(page)["Steps/s"] == "-"


def test_a_run_that_goes_on_is_followed_and_only_news_is_read_out(serve: Serve, look: Look, stage: Stage) -> None:
    served = serve(stage(scenes.live, findings=(GC,)))
    tab = look(served.url)
    tab.open()
    page = tab.until("live")
    assert page.title() == "demo: running - gpulaunch"
    assert figures(page)["Steps"] == "900"
    assert [row[:2] for row in rows(page, "steps", "Progress by rank")] == [["0", "900"], ["1", "900"]]
    tab.draw("rate-by-rank")
    focused = page.locator("#steps summary >> nth=0")
    focused.focus()
    page.evaluate("""() => {
        window.told = [];
        for (const one of document.querySelectorAll("[aria-live], [role=status], [role=alert], [role=log]"))
            new MutationObserver(() => window.told.push(one.id)).observe(one, {childList: true, subtree: true,
                characterData: true});
    }""")

    served.board.publish(state(91.0, findings=(GC,), gpu=True))
    tab.until_so("document.querySelector('.figures dd').textContent === '910'")
    assert page.evaluate("window.told") == []

    served.board.publish(state(92.0, findings=(SYNC, GC), gpu=True))
    tab.until_so("document.querySelector('#announcement').textContent !== ''")
    assert page.locator("#announcement").inner_text() == "Found: sync-every-step train.py:88"
    assert page.evaluate("[...new Set(window.told)]") == ["announcement"]
    assert focused.evaluate("node => node === document.activeElement"), "an update takes nobody's place away"


def test_what_appears_leaves_the_rest_in_place(
    serve: Serve, look: Look, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chart and a paragraph come before others: these stay open, drawn and focused, and so they do when it goes."""
    views = itertools.chain(
        [lambda view: replace(view, ranks=tuple(replace(rank, phase_ratios_now={}) for rank in view.ranks))],
        [lambda view: replace(view, hang_suspicions=2)],
        itertools.repeat(lambda view: replace(view, nodes=())),
    )
    changed(monkeypatch, lambda view: next(views)(view))
    served = serve(stage(scenes.live))
    tab = look(served.url)
    tab.open()
    page = tab.until("live")
    tab.draw("phases-by-rank")
    assert page.locator("#figure-phases-now").count() == 0
    page.evaluate("""() => {
        window.kept = ["#figure-phases-by-rank", "#figure-rate-by-rank", "#failures .wide", "#failures figure"].map(
            (each) => document.querySelector(each));
    }""")
    same = "window.kept.every((one) => one.isConnected)"
    summary = page.locator("#figure-phases-by-rank summary")
    summary.click()
    summary.focus()

    served.board.publish(state(91.0, gpu=True))
    page.locator("#figure-phases-now").wait_for()
    assert "Warnings of missing progress: 2." in text_of(page, "failures")
    assert page.evaluate(same)
    assert summary.evaluate("node => node === document.activeElement")
    assert page.locator("#figure-phases-by-rank table").is_visible()
    assert page.locator("#figure-phases-by-rank .main-svg").first.is_visible()

    served.board.publish(state(92.0, gpu=True))
    page.locator("#figure-sidecar-cores").wait_for(state="detached")
    assert page.evaluate(same)


def test_a_run_that_is_over_stays_readable(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.finished)).url)
    tab.open()
    page = tab.until("live")
    assert page.locator("h1 .badge").inner_text() == "finished"
    assert page.locator("#connection").inner_text() == "Over"
    assert ["exit code", "0"] in rows(page, "run", "Run details")


def test_a_run_that_was_stopped_has_not_failed(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.stopped)).url)
    tab.open()
    page = tab.until("live")
    assert page.locator("h1 .badge").inner_text() == "stopped"
    assert re.match(r"Stopped after .* by SIGINT; ", page.locator(".lead").inner_text())
    assert page.title() == "demo: stopped - gpulaunch"
    assert [[row[0], row[3]] for row in rows(page, "failures", "Attempts: ")] == [["0", "stopped"]]
    evidence = rows(page, "losses", "Evidence of finding 1")
    assert evidence[:3] == [["blocked per step", "12.3 ms"], ["bytes per step", "2 KiB"], ["kind", "item"]]
    newest = rows(page, "failures", "Events, newest first")[0]
    assert newest[1:] == ["finding gone", "0", "rule gc-pauses"]


def test_what_went_wrong_is_told_with_its_cause(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.faulty)).url)
    tab.open()
    page = tab.until("live")
    first, newest = rows(page, "failures", "Attempts: ")
    assert [newest[0], newest[3]] == ["1", "running"]
    assert [first[0], first[3]] == ["0", "failed"]
    assert first[4:6] == ["segfault", "rank 1 was killed by SIGSEGV"]
    assert ["what to do", "look at its stack in stacks.txt"] in rows(page, "failures", "First cause of attempt 0")
    assert "Restarts by first cause: segfault 1." in text_of(page, "failures")
    assert figures(page)["Restarts"] == "1"
    collectors = rows(page, "cost", "Collectors of the sidecar")
    assert ["gpu", "0", "no", "no NVIDIA driver"] in [[*row[:3], row[5]] for row in collectors]
    assert [row[3] for row in rows(page, "losses", "Findings")] == ["12 min 00 s"]
    assert "rank ended" in text_of(page, "failures")


def test_an_attempt_whose_launcher_was_killed_lasted_no_longer_than_until_the_next(
    serve: Serve, look: Look, stage: Stage
) -> None:
    tab = look(serve(stage(scenes.lost_before)).url)
    tab.open()
    page = tab.until("live")
    assert rows(page, "failures", "Timeline of attempts") == [
        ["attempts/0", "lost, end time unknown"],
        ["attempt 0", "running after 1 min 09 s"],
    ]


def test_of_many_ranks_the_ends_are_drawn_and_any_one_apart(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.large)).url)
    tab.open()
    page = tab.until("live")
    assert len(rows(page, "steps", "Progress by rank")) == 64
    tab.draw("rate-by-rank")
    assert legend(page, "rate-by-rank") == ["lowest rank", "median", "highest rank"]
    page.get_by_label("Rank to show apart").select_option("rank 17")
    page.locator("#figure-rate-by-rank .legendtext >> nth=3").wait_for()
    assert legend(page, "rate-by-rank")[3:] == ["rank 17"]


def test_a_hundred_thousand_steps_are_as_many_points_as_a_hundred(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.long_run)).url, viewport={"width": 1280, "height": 6000})
    tab.open()
    page = tab.until("live")
    assert figures(page)["Steps"] == "100,000"
    tab.draw("rate-by-rank")
    points = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].flatMap(one => one.data.map("
        "line => (line.x ?? line.y).length))"
    )
    assert points
    assert max(points) <= 180
    assert 30 <= page.evaluate("document.querySelector('#figure-rate-by-rank .live').data[0].x.length")


# --- text of other people -------------------------------------------------------------------------------------------


def test_markup_of_other_people_is_text(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.hostile)).url)
    tab.open()
    page = tab.until("live")
    tab.draw("dearest-lines")
    assert_inert(page)
    shown = EVIL.replace("\u202e", r"\u202e").replace("\x1b", r"\x1b")
    assert page.locator("h1").inner_text() == f"{shown} running"
    assert shown in text_of(page, "losses")
    assert "script>'" in " ".join(page.locator("#figure-dearest-lines .ytick").all_text_contents())
    assert "\u202e" not in page.locator("body").inner_text()


def test_even_a_run_of_nothing_but_markup_is_text(
    serve: Serve, look: Look, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every string of the view, and every name in it that a program may choose, is hostile."""
    changed(monkeypatch, lambda view: with_text(view, lambda _: EVIL))
    tab = look(serve(stage(scenes.faulty)).url)
    tab.open()
    page = tab.until("live")
    for figure in page.locator("figure").all():
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()
    assert_inert(page)
    assert page.locator("main").inner_text().count("<img src=x") > 50


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[RunView], RunView]) -> None:
    """The page shows the run with this change."""
    make = live_documents.view_of_state
    monkeypatch.setattr(live_documents, "view_of_state", lambda *args, **how: change(make(*args, **how)))


def test_what_no_probe_has_seen_is_a_dash(
    serve: Serve, look: Look, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(view: RunView) -> RunView:
        of_steps = ("step_source", "steps", "samples", "steps_per_second_now", "step_seconds_now", "last_step_s")
        unseen = replace(view.ranks[1], armed=False, **dict.fromkeys(of_steps))
        unknown = {**view.goodput_seconds, "productive": None, "checkpoint_stall": None}
        return replace(view, ranks=(view.ranks[0], unseen), steps=None, goodput_ratio=None, goodput_seconds=unknown)

    changed(monkeypatch, without)
    tab = look(serve(stage(scenes.live)).url)
    tab.open()
    page = tab.until("live")
    assert [figures(page)[name] for name in ("Steps", "Goodput")] == ["-"] * 2
    assert rows(page, "steps", "Progress by rank")[1] == ["1", *["-"] * 5, "no probe"]
    assert "No step was observed: the productive time is unknown." in text_of(page, "goodput")


def test_a_standstill_is_on_the_page_until_it_is_over(
    serve: Serve, look: Look, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = "rank 1 is in data.py:31 sleep(), rank 0 waits for it in backward"
    stalls: list[StallView | None] = [StallView(what=what, since_s=0.0, due_s=None), None]
    changed(monkeypatch, lambda view: replace(view, stall=stalls.pop(0) if len(stalls) > 1 else stalls[0]))
    served = serve(stage(scenes.live))
    tab = look(served.url)
    tab.open()
    page = tab.until("live")
    assert re.search(rf"No progress for .*: {re.escape(what)}\.$", page.locator(".alarm").inner_text())
    served.board.publish(state(91.0, gpu=True))
    page.locator(".alarm").wait_for(state="detached")


def assert_inert(page: Any) -> None:
    assert page.evaluate("window.owned") is None
    assert page.locator("body img, body script, body iframe, main a, svg a, svg image").count() == 0
    assert page.locator("[onerror], [onload], [onclick]").count() == 0


def test_what_these_tests_look_for_would_be_seen(serve: Serve, browser: Any, stage: Stage) -> None:
    """Controls: a request to elsewhere, markup that was parsed, text without contrast."""
    served = serve(stage(scenes.live))
    tab = Tab(browser, served.url)
    try:
        tab.open()
        page = tab.until("live")
        assert (tab.strangers, tab.complaints) == ([], [])
        elsewhere = f"http://127.0.0.2:{served.address[1]}/x.png"
        page.evaluate("url => fetch(url).catch(() => null)", elsewhere)
        assert "Content Security Policy" in " ".join(tab.complaints)

        page.evaluate("evil => document.body.insertAdjacentHTML('beforeend', evil)", EVIL)
        with pytest.raises(AssertionError):
            assert_inert(page)
        assert page.evaluate("window.owned") is None, "what is parsed by mistake does not run, either"

        page.evaluate("document.querySelector('#steps h2').style.color = 'rgb(200, 200, 200)'")
        assert any(one["contrast"] < 4.5 for one in page.evaluate(CONTRASTS))

        tab.strangers.clear()
        page.goto("about:blank")
        page.set_content(f'<img src="{elsewhere}">')
        assert tab.strangers == [elsewhere]
    finally:
        tab.context.close()


# --- charts ---------------------------------------------------------------------------------------------------------


def test_without_the_chart_library_the_charts_are_still(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.live), plotly=False).url)
    tab.open()
    page = tab.until("live")
    drawn = page.locator("figure").count()
    assert drawn > 10
    assert page.locator("svg.still:visible").count() == drawn
    assert page.locator(".live:visible").count() == 0


def test_a_chart_has_the_same_values_as_a_table(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.live)).url)
    tab.open()
    page = tab.until("live")
    figure = page.locator("#figure-phases-now")
    label = figure.locator("[role=img].live").get_attribute("aria-label")
    assert "All ranks together: data wait 37.5 %, forward 37.5 %, backward 25.0 %" in label
    table = figure.locator("tbody tr")
    assert not table.first.is_visible()
    figure.locator("summary").click()
    assert table.all_inner_texts() == ["rank 0\t0\t75\t25", "rank 1\t75\t0\t25"]
    over_time = page.locator("#figure-rate-by-rank")
    over_time.locator("summary").click()
    rows = over_time.locator("tbody tr").all_inner_texts()  # at once: a refresh replaces the rows
    assert 10 <= len(rows) <= 25
    assert rows[-1].split("\t")[1:] == ["10", "10"]


def test_a_rank_that_makes_no_steps_has_no_phases_of_now(serve: Serve, look: Look, stage: Stage) -> None:
    """While the run goes on; what it had spent them on is in the table."""
    tab = look(serve(stage(scenes.standing)).url)
    tab.open()
    page = tab.until("live")
    now = rows(page, "steps", "Phases of a step by rank, last")
    assert [(name, "-" in shares) for name, *shares in now] == [("rank 0", False), ("rank 1", True)]
    assert all("s" in row[1] for row in rows(page, "steps", "Time in each phase by rank"))


# --- the connection -------------------------------------------------------------------------------------------------


def test_who_stops_answering_is_told_and_asked_again(serve: Serve, look: Look, stage: Stage) -> None:
    """By a clock of the test's own: it waits longer after each try."""
    tab = look(serve(stage(scenes.live)).url)
    tab.page.clock.install()
    tab.open()
    page = tab.until("live")
    page.route("**/api/page.json", lambda route: route.abort())
    for _ in range(2):
        with page.expect_event("requestfailed"):
            page.clock.fast_forward(5000)
    tab.until("silent")
    assert re.match(r"Not answering since \d\d:\d\d:\d\d; what is shown is from then", page.inner_text("#connection"))
    assert figures(page)["Steps"] == "900"
    page.unroute("**/api/page.json")
    page.clock.fast_forward(30_000)
    tab.until("live")
    assert {"Failed to load resource: net::ERR_FAILED"} == set(tab.complaints)
    tab.complaints.clear()


def test_a_page_that_is_not_looked_at_asks_seldom(serve: Serve, look: Look, stage: Stage) -> None:
    """By a clock of the test's own: some seconds of looking, and as many of not looking."""
    tab = look(serve(stage(scenes.live)).url)
    asked: list[str] = []
    answered: list[str] = []
    for event, seen in (("request", asked), ("requestfinished", answered), ("requestfailed", answered)):
        tab.page.on(event, lambda request, seen=seen: seen.append(request.url) if "page.json" in request.url else None)
    tab.page.clock.install()
    tab.open()
    page = tab.until("live")
    page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 1)

    def pass_seconds(count: int) -> int:
        before = len(asked)
        for _ in range(count):
            page.clock.run_for(1000)
            page.wait_for_timeout(50)  # of the real clock
            while len(answered) < len(asked):
                page.wait_for_timeout(50)
        return len(asked) - before

    assert pass_seconds(12) >= 4
    page.evaluate("window.away = true; Object.defineProperty(document, 'hidden', {get: () => window.away})")
    pass_seconds(2)  # the one that was due already
    assert pass_seconds(12) <= 1
    with page.expect_request("**/api/page.json"):  # looked at again, it asks at once
        page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")


def test_a_token_is_asked_for_and_not_kept_in_the_address(serve: Serve, look: Look, stage: Stage) -> None:
    token = "0123456789abcdef"
    served = serve(stage(scenes.live), token=token)
    tab = look(served.url)
    page = tab.open()
    tab.until("locked")
    page.get_by_label("Token").fill("not this one, no")
    page.get_by_role("button", name="Show the run").click()
    tab.until_so("document.querySelector('#connection').textContent === 'The token is not the right one'")
    page.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")
    tab.until("live")
    assert figures(page)["Steps"] == "900"
    assert not page.locator("#token").is_visible()
    assert len(tab.complaints) == 2
    assert all("401 (Unauthorized)" in complaint for complaint in tab.complaints)
    tab.complaints.clear()

    other = look(served.url)
    other.open(f"#token={token}")
    page = other.until("live")
    assert token not in page.url
    assert token not in page.content()


# --- for whom it is -------------------------------------------------------------------------------------------------


def test_text_has_contrast_in_both_schemes_also_when_they_change(serve: Serve, look: Look, stage: Stage) -> None:
    """Of every element with text of its own, on the ground that is behind it, as it is computed."""
    tab = look(serve(stage(scenes.faulty)).url, color_scheme="dark")
    tab.open()
    page = tab.until("live")
    tab.draw("rate-by-rank")
    for scheme, ground, ink in (
        ("dark", "rgb(20, 23, 27)", "rgb(232, 234, 237)"),
        ("light", "rgb(244, 245, 247)", "rgb(27, 31, 36)"),
    ):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate(CONTRASTS)
        assert len(found) > 100
        assert [one for one in found if one["contrast"] < 4.5] == []
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        tab.until_so(f"getComputedStyle(document.querySelector('#figure-rate-by-rank .xtick text')).fill === '{ink}'")


CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.slice(0, 3).map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || node.closest("svg") || !node.checkVisibility()) continue;
    const [one, other] = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    found.push({text: node.textContent.slice(0, 40), contrast: (one + 0.05) / (other + 0.05)});
  }
  return found;
}"""


def test_everything_has_a_name_and_a_role(serve: Serve, look: Look, stage: Stage) -> None:
    """As somebody meets it who does not see it: landmarks, headings in order, named regions, charts and fields."""
    tab = look(serve(stage(scenes.large)).url)
    tab.open()
    page = tab.until("live")
    tab.draw("rate-by-rank")
    assert page.get_attribute("html", "lang") == "en"
    for role in ("banner", "navigation", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1, role
    for section in SECTIONS:
        title = page.locator(f"#{section} h2").inner_text()
        assert page.get_by_role("region", name=title, exact=True).count() == 1
    levels = page.eval_on_selector_all("h1, h2, h3, h4", "all => all.map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    nameless = """all => all.filter((one) => one.checkVisibility() && !(one.getAttribute("aria-label") ||
        one.labels?.length || one.textContent.trim())).map((one) => one.outerHTML.slice(0, 80))"""
    assert page.eval_on_selector_all("a, button, select, input, summary, [role=img], [role=group]", nameless) == []
    untitled = "all => all.filter((one) => one.checkVisibility() && !one.caption?.textContent).length"
    assert page.eval_on_selector_all("table", untitled) == 0
    assert page.eval_on_selector_all("th", "all => all.filter((one) => !one.scope).length") == 0
    chart = re.compile(r"^Steps per second by rank\. Last values: lowest rank 10 \(rank 0\), median 10,")
    assert page.get_by_role("img", name=chart).count() == 1
    progress = page.get_by_role("table", name=re.compile("^Progress by rank"))
    assert progress.get_by_role("rowheader").count() == 64
    live = "all => Object.fromEntries(all.map((one) => [one.id, one.ariaLive ?? one.role]))"
    assert page.eval_on_selector_all("[aria-live], [role=status], [role=alert], [role=log], [role=timer]", live) == {
        "announcement": "polite",
        "connection": "status",
    }


def test_the_keyboard_reaches_everything_and_one_sees_where_it_is(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.live)).url)
    tab.open()
    page = tab.until("live")
    tab.draw("rate-by-rank")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the run"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    focusable = "a, button, select, input, summary, [tabindex='0']"
    wanted = page.locator(focusable).evaluate_all("all => all.filter((one) => one.checkVisibility()).length")
    seen = []
    for _ in range(wanted - 1):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("""() => {
            const one = document.activeElement, style = getComputedStyle(one);
            return [one.tagName, [...document.querySelectorAll("*")].indexOf(one), style.outlineStyle,
                style.outlineWidth];
        }""")
        )
    assert [tag for tag, *_ in seen][:10] == ["A"] * 10
    assert "BODY" not in [tag for tag, *_ in seen], "nothing that takes the focus is passed over"
    assert {tuple(outline) for _, _, *outline in seen} == {("solid", "3px")}
    assert all(before < after for (_, before, *_), (_, after, *_) in itertools.pairwise(seen)), "in the page's order"

    page.locator("#figure-rate-by-rank summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#figure-rate-by-rank table").is_visible()
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_who_wants_no_motion_gets_none(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.live)).url, reduced_motion="reduce")
    tab.open()
    page = tab.until("live")
    scrolling = "getComputedStyle(document.documentElement).scrollBehavior"
    assert page.evaluate(scrolling) == "auto"
    moving = "all => all.filter((one) => getComputedStyle(one).animationName !== 'none').length"
    assert page.eval_on_selector_all("body *", moving) == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(scrolling) == "smooth"


def test_on_a_narrow_screen_nothing_is_beside_the_page(serve: Serve, look: Look, stage: Stage) -> None:
    """WCAG 2.2, 1.4.10: 320 pixels wide, only tables and charts scroll sideways, each in itself."""
    tab = look(serve(stage(scenes.faulty)).url, viewport={"width": 320, "height": 4000})
    tab.open()
    page = tab.until("live")
    tab.draw("rate-by-rank")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


# --- pictures ---------------------------------------------------------------------------------------------------------

TAKES_PICTURES = Path(__file__).parents[2] / "docs/screenshots/states.py"
PICTURES_S = 400.0


def test_pictures_of_the_states_can_be_taken(browser: Any, tmp_path: Path) -> None:
    """For people to look at: of one of them here, light and dark, and the whole page with all of its charts."""
    assert CHROMIUM is not None
    words = [sys.executable, TAKES_PICTURES, tmp_path / "out", "--only", "finished", "--browser", CHROMIUM]
    taken = subprocess.run(words, capture_output=True, text=True, timeout=PICTURES_S)
    assert (taken.returncode, taken.stderr) == (0, "")

    pictures = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(pictures) == ["finished-dark.png", "finished-light.png"]
    assert {picture[:8] for picture in pictures.values()} == {b"\x89PNG\r\n\x1a\n"}
    ((width, height),) = {struct.unpack(">II", picture[16:24]) for picture in pictures.values()}
    assert width == 1200
    assert height > 3 * width
    assert len(set(pictures.values())) == 2


# --- a real run -----------------------------------------------------------------------------------------------------

SCRIPT = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
"""


@pytest.mark.torch
def test_a_real_run_of_two_ranks_is_followed_from_its_own_endpoint(gpulaunch: Any, look: Look, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = gpulaunch.start("--nproc", "2", "--name", "two-of-them", "--metrics-addr", "127.0.0.1:0", script)
    address = re.compile(r"http://127\.0\.0\.1:\d+/")
    run.wait_until(lambda run: address.search(run.stderr))
    found = address.search(run.stderr)
    assert found is not None
    tab = look(found[0])
    page = tab.open()
    tab.until("live")
    tables = "[...document.querySelectorAll('#steps table')]"
    progress = f"{tables}.filter((one) => one.caption.textContent.startsWith('Progress by rank'))"
    cells = f"{progress}.flatMap((one) => [...one.tBodies[0].rows]).map((row) => row.cells[1].textContent)"
    steps = f"{cells}.map((cell) => Number(cell.replaceAll(',', '')))"
    tab.until_so(f"{steps}.length === 2 && Math.min(...{steps}) > 20")
    before = page.evaluate(steps)
    tab.until_so(f"Math.min(...{steps}) > {max(before)}")
    tab.draw("rate-by-rank")
    assert page.locator("h1").inner_text() == "two-of-them running"
    assert "train.py" in dict(rows(page, "run", "Run details"))["command"]
    page.goto("about:blank")  # the endpoint goes with the run
    run.signal(2)
    run.wait()
