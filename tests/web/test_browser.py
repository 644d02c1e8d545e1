"""The page in a browser, as people meet it: before, during and after a run, small, large and hostile."""

from __future__ import annotations

import itertools
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scenes
from kept_run import GC, SYNC, state
from scenes import EVIL, Scene, Served
from tab import CHROMIUM, Tab

Serve = Callable[..., Served]
Look = Callable[..., Tab]
Stage = Callable[..., Scene]

PANELS = ("now", "findings", "steps", "phases", "loader", "copies", "memory", "devices", "history", "profiler")


def text_of(page: Any, panel: str) -> str:
    return str(page.locator(f"#{panel}").inner_text())


def tiles(page: Any) -> dict[str, str]:
    names, values = (page.locator(f"#now {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def rows(page: Any, panel: str, part: str) -> list[list[str]]:
    cells = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    found: list[list[str]] = page.eval_on_selector_all(f'#{panel} [data-part="{part}"] tbody tr', cells)
    return found


def opened_table(figure: Any) -> Any:
    """Rows of the table below a chart, which is filled by the event that follows the click."""
    figure.locator("summary").click()
    found = figure.locator("tbody tr")
    found.first.wait_for()
    return found


# --- the states of a run --------------------------------------------------------------------------------------------


def test_before_the_first_look_the_page_says_so_and_then_goes_on(serve: Serve, look: Look, stage: Stage) -> None:
    served = serve(stage(scenes.starting))
    tab = look(served.url)
    page = tab.open()
    tab.until("starting")
    assert "the first look at the run is not over yet" in page.locator("#connection").inner_text()

    served.board.publish(state(10.0))
    tab.until("live")
    assert tiles(page)["Steps"] == "100"


def test_a_run_without_ranks_has_sentences_and_no_empty_charts(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.empty)).url)
    tab.open()
    page = tab.until("live")
    assert "No rank has begun yet." in text_of(page, "steps")
    assert "No GPU is seen." in text_of(page, "devices")
    assert "No dataloader has been seen." in text_of(page, "loader")
    assert "Nothing to change has been found." in text_of(page, "findings")
    assert page.locator("figure:visible").count() == 0
    assert page.locator("table:visible tbody:not(:has(tr))").count() == 0
    assert tiles(page)["Steps a second"] == "\u2013"


def test_a_run_that_goes_on_is_followed_and_only_news_is_read_out(serve: Serve, look: Look, stage: Stage) -> None:
    served = serve(stage(scenes.live, findings=(GC,)))
    tab = look(served.url)
    tab.open()
    page = tab.until("live")
    assert page.title() == "demo: running - gpulaunch"
    assert tiles(page)["Steps"] == "900"
    assert [row[:2] for row in rows(page, "steps", "ranks")] == [["0", "900"], ["1", "900"]]
    tab.see("#steps")
    focused = page.locator("#steps summary >> nth=0")
    focused.focus()
    page.evaluate("""() => {
        window.told = [];
        for (const one of document.querySelectorAll("[aria-live], [role=status], [role=alert], [role=log]"))
            new MutationObserver(() => window.told.push(one.id)).observe(one, {childList: true, subtree: true,
                characterData: true});
    }""")

    served.board.publish(state(91.0, findings=(GC,), gpu=True))
    tab.until_so("document.querySelector('#now dd').textContent === '910'")
    assert page.evaluate("window.told") == []

    served.board.publish(state(92.0, findings=(SYNC, GC), gpu=True))
    tab.until_so("document.querySelector('#announcement').textContent !== ''")
    assert page.locator("#announcement").inner_text() == "Found: sync-every-step train.py:88"
    assert page.evaluate("[...new Set(window.told)]") == ["announcement"]
    assert focused.evaluate("node => node === document.activeElement"), "an update takes nobody's place away"


def test_a_run_that_is_over_stays_readable(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.finished)).url)
    tab.open()
    page = tab.until("live")
    assert page.locator("#status").inner_text() == "finished"
    assert page.locator("#connection").inner_text() == "Over"
    assert "exit code 0" in page.locator("#headline").inner_text()


def test_a_run_that_was_stopped_has_not_failed(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.stopped)).url)
    tab.open()
    page = tab.until("live")
    assert page.locator("#status").inner_text() == "stopped by SIGINT"
    assert page.title() == "demo: stopped - gpulaunch"
    assert [row[:2] for row in rows(page, "history", "attempts")] == [["0", "stopped"]]
    assert "blocked per step 12.3 ms; bytes per step 2 KiB; kind item" in text_of(page, "findings")
    newest = rows(page, "history", "events")[0]
    assert newest[1:] == ["finding gone", "rule gc-pauses"]


def test_what_went_wrong_is_told_with_its_cause(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.faulty)).url)
    tab.open()
    page = tab.until("live")
    newest, first = rows(page, "history", "attempts")
    assert newest[:2] == ["1", "running"]
    assert first[:2] == ["0", "failed"]
    assert first[4:] == ["segfault: rank 1 was killed by SIGSEGV", "look at its stack in stacks.txt"]
    assert "Restarts: segfault 1." in text_of(page, "history")
    assert tiles(page)["Restarts"] == "1"
    assert ["gpu", "0", "no", "no NVIDIA driver"] in [row[:4] for row in rows(page, "profiler", "collectors")]
    assert "sync every step \u2014 12 min 0 s of each hour" in text_of(page, "findings")
    page.locator("#history summary", has_text="Events").click()
    assert "rank ended" in text_of(page, "history")


def test_an_attempt_whose_launcher_was_killed_lasted_no_longer_than_until_the_next(
    serve: Serve, look: Look, stage: Stage
) -> None:
    tab = look(serve(stage(scenes.lost_before)).url)
    tab.open()
    page = tab.until("live")
    page.eval_on_selector("#history [data-part=attempts-over-time] details", "details => { details.open = true; }")
    page.wait_for_selector("#history [data-part=attempts-over-time] tbody tr")
    assert rows(page, "history", "attempts-over-time") == [
        ["attempts/0, lost, at most", "\u2013", "3 d 0 h"],
        ["attempt 0, running", "69 s", "\u2013"],
    ]


def test_of_many_ranks_the_ends_are_drawn_and_any_one_apart(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.large)).url)
    tab.open()
    page = tab.until("live")
    assert len(rows(page, "steps", "ranks")) == 64
    chart = page.locator("#steps .chart >> nth=0")
    chart.locator(".legendtext >> nth=0").wait_for()
    assert chart.locator(".legendtext").all_text_contents() == ["lowest rank", "median", "highest rank"]
    page.get_by_label("Rank to show apart").select_option("17")
    chart.locator(".legendtext >> nth=3").wait_for()
    assert chart.locator(".legendtext").all_text_contents()[3:] == ["rank 17"]


def test_a_hundred_thousand_steps_are_as_many_points_as_a_hundred(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.long_run)).url, viewport={"width": 1280, "height": 6000})
    tab.open()
    page = tab.until("live")
    assert tiles(page)["Steps"] == "100,000"
    tab.see("#steps")
    points = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].flatMap(one => one.data.map("
        "line => (line.x ?? line.y).length))"
    )
    assert points
    assert max(points) <= 180
    assert 30 <= page.evaluate("document.querySelector('#steps .js-plotly-plot').data[0].x.length")


# --- text of other people -------------------------------------------------------------------------------------------


def test_markup_of_other_people_is_text(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.hostile)).url)
    tab.open()
    page = tab.until("live")
    tab.see("#copies")
    assert_inert(page)
    shown = EVIL.replace("\u202e", r"\u202e").replace("\x1b", r"\x1b")
    assert page.locator("#name").inner_text() == shown
    assert shown in text_of(page, "findings")
    assert "\u202e" not in page.locator("body").inner_text()


def test_even_a_run_of_nothing_but_markup_is_text(serve: Serve, look: Look, stage: Stage) -> None:
    """Every string of the document, and every name in it, is hostile: whatever the server lets through."""
    tab = look(serve(stage(scenes.faulty)).url)

    def spoil(value: Any) -> Any:
        if isinstance(value, str):
            return EVIL
        if isinstance(value, list):
            return [spoil(each) for each in value]
        if isinstance(value, dict):
            return {name: spoil(each) for name, each in value.items()} | {EVIL: EVIL}
        return value

    def replace(route: Any) -> None:
        answer = route.fetch()
        spoiled = {name: spoil(each) for name, each in answer.json().items()}
        for rank in spoiled["ranks"]:
            rank["phase_ratios_now"][EVIL] = 0.25
            rank["rss_bytes"][EVIL] = [1.0] * len(spoiled["times_s"])
        spoiled["phase_ratios"][EVIL] = [0.5] * len(spoiled["times_s"])
        spoiled["goodput_seconds"][EVIL] = 5.0
        spoiled["restarts"] = {EVIL: 1}
        route.fulfill(response=answer, body=json.dumps(spoiled))

    tab.page.route("**/api/run.json", replace)
    tab.open()
    page = tab.until("live")
    tab.see("#phases")
    assert_inert(page)
    assert "<img src=x" in " ".join(page.locator("#phases .legendtext").all_text_contents())


def test_what_no_probe_has_seen_is_a_dash(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.live)).url)

    def without(route: Any) -> None:
        answer = route.fetch()
        told = answer.json()
        of_steps = ("step_source", "steps", "samples", "steps_per_second_now", "step_seconds_now", "last_step_s")
        told["ranks"][1] |= {**dict.fromkeys(of_steps), "armed": False}
        told["goodput_seconds"] |= {"productive": None, "checkpoint_stall": None}
        route.fulfill(response=answer, body=json.dumps({**told, "steps": None, "goodput_ratio": None}))

    tab.page.route("**/api/run.json", without)
    tab.open()
    page = tab.until("live")
    assert [tiles(page)[name] for name in ("Steps", "Goodput")] == ["\u2013"] * 2
    assert rows(page, "steps", "ranks")[1] == ["1", *["\u2013"] * 5, "no probe"]
    assert "How much of the time was productive is not known: no step was seen." in text_of(page, "history")


def test_a_standstill_is_on_the_page_until_it_is_over(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.live)).url)
    stall = {"what": "rank 1 is in data.py:31 sleep(), rank 0 waits for it in backward", "since_s": 0, "due_s": None}
    told: list[Any] = [stall, None]

    def standing(route: Any) -> None:
        answer = route.fetch()
        now = told.pop(0) if len(told) > 1 else told[0]
        tagged = {**answer.headers, "etag": f'"{now is None}"'}
        route.fulfill(response=answer, headers=tagged, body=json.dumps({**answer.json(), "stall": now}))

    tab.page.route("**/api/run.json", standing)
    tab.open()
    page = tab.until("live")
    assert page.locator("#stall").inner_text().startswith("No progress since ")
    assert page.locator("#stall").inner_text().endswith(stall["what"])
    page.locator("#stall").wait_for(state="hidden")


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

        page.evaluate("document.querySelector('#now h2').style.color = 'rgb(200, 200, 200)'")
        assert any(one["contrast"] < 4.5 for one in page.evaluate(CONTRASTS))

        tab.strangers.clear()
        page.goto("about:blank")
        page.set_content(f'<img src="{elsewhere}">')
        assert tab.strangers == [elsewhere]
    finally:
        tab.context.close()


# --- charts ---------------------------------------------------------------------------------------------------------


def test_without_the_chart_library_everything_is_in_open_tables(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.live), plotly=False).url)
    tab.open()
    page = tab.until("live")
    assert "pip install 'gpulaunch[web]'" in page.locator("#charts-missing").inner_text()
    assert page.locator(".chart:visible").count() == 0
    table = page.locator("#steps figure table >> nth=0")
    assert table.locator("thead").inner_text().split() == ["Time", "rank", "0", "rank", "1"]
    assert re.fullmatch(r"[\d-]* ?\d\d:\d\d:\d\d\t10\t10", table.locator("tbody tr >> nth=-1").inner_text().strip())


def test_a_chart_has_the_same_values_as_a_table(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.live)).url)
    tab.open()
    page = tab.until("live")
    figure = page.locator("#phases figure >> nth=0")
    label = figure.locator("[role=img]").get_attribute("aria-label")
    assert label.startswith("Phases over time, all ranks. Last values: data wait 38 %, forward 38 %, backward 25 %")
    table = opened_table(figure)
    assert table.last.inner_text().split("\t")[1:] == ["38 %", "38 %", "25 %"]
    assert 2 < table.count() <= 25


def test_a_rank_that_makes_no_steps_has_no_phases_of_now(serve: Serve, look: Look, stage: Stage) -> None:
    """While the run goes on; what it had spent them on is in the table."""
    tab = look(serve(stage(scenes.standing)).url)
    tab.open()
    page = tab.until("live")
    figure = page.locator("#phases figure >> nth=1")
    drawn = {name: phases for name, *phases in (row.split("\t") for row in opened_table(figure).all_inner_texts())}
    assert any(value.endswith("%") for value in drawn["0"])
    assert not any(value.endswith("%") for value in drawn["1"]), drawn
    assert all("s" in row[1] for row in rows(page, "phases", "totals"))


# --- the connection -------------------------------------------------------------------------------------------------


def test_who_stops_answering_is_told_and_asked_again(serve: Serve, look: Look, stage: Stage) -> None:
    """By a clock of the test's own: it waits longer after each try."""
    tab = look(serve(stage(scenes.live)).url)
    tab.page.clock.install()
    tab.open()
    page = tab.until("live")
    page.route("**/api/run.json", lambda route: route.abort())
    for _ in range(2):
        with page.expect_event("requestfailed"):
            page.clock.fast_forward(5000)
    tab.until("silent")
    assert re.match(r"Not answering since \d\d:\d\d:\d\d; what is shown is from then", page.inner_text("#connection"))
    assert tiles(page)["Steps"] == "900"
    page.unroute("**/api/run.json")
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
        tab.page.on(event, lambda request, seen=seen: seen.append(request.url) if "run.json" in request.url else None)
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
    with page.expect_request("**/api/run.json"):  # looked at again, it asks at once
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
    assert tiles(page)["Steps"] == "900"
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
    tab.see("#steps")
    for scheme, ground, ink in (
        ("dark", "rgb(20, 23, 27)", "rgb(232, 234, 237)"),
        ("light", "rgb(244, 245, 247)", "rgb(27, 31, 36)"),
    ):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate(CONTRASTS)
        assert len(found) > 100
        assert [one for one in found if one["contrast"] < 4.5] == []
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        tab.until_so(f"getComputedStyle(document.querySelector('#steps .xtick text')).fill === '{ink}'")


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
    tab.see("#steps")
    assert page.get_attribute("html", "lang") == "en"
    for role in ("banner", "navigation", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1, role
    for panel in PANELS:
        title = page.locator(f"#{panel} h2").inner_text()
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
    assert page.get_by_role("img", name=re.compile(r"^Steps a second\. Last values: lowest rank 10,")).count() == 1
    assert page.get_by_role("table", name="Steps, by rank").get_by_role("rowheader").count() == 64
    live = "all => Object.fromEntries(all.map((one) => [one.id, one.ariaLive ?? one.role]))"
    assert page.eval_on_selector_all("[aria-live], [role=status], [role=alert], [role=log], [role=timer]", live) == {
        "announcement": "polite",
        "connection": "status",
    }


def test_the_keyboard_reaches_everything_and_one_sees_where_it_is(serve: Serve, look: Look, stage: Stage) -> None:
    tab = look(serve(stage(scenes.live)).url)
    tab.open()
    page = tab.until("live")
    tab.see("#steps")
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

    page.locator("#steps summary >> nth=0").focus()
    page.keyboard.press("Enter")
    assert page.locator("#steps figure table >> nth=0").is_visible()
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
    tab.see("#steps")
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
    table = "document.querySelectorAll('#steps [data-part=ranks] tbody tr')"
    steps = f"[...{table}].map((row) => Number(row.cells[1].textContent.replaceAll(',', '')))"
    tab.until_so(f"{steps}.length === 2 && Math.min(...{steps}) > 20")
    before = page.evaluate(steps)
    tab.until_so(f"Math.min(...{steps}) > {max(before)}")
    tab.see("#phases")
    assert page.locator("#name").inner_text() == "two-of-them"
    assert page.locator("#status").inner_text() == "running"
    assert "train.py" in page.locator("#headline").inner_text()
    page.goto("about:blank")  # the endpoint goes with the run
    run.signal(2)
    run.wait()
