// Charts, each with a table of the same values for who does not see them; without the chart library, the table alone.

import { element, fill, part, setText } from "./build.js";
import { axisTime, clock, inert, inUnit, known, scale } from "./format.js";

export const AVAILABLE = typeof window.Plotly === "object";

const ROWS = 12;
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const NUM_COLOURS = 12;
const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false };

const figures = new Map();
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const one = figures.get(entry.target);
      one.visible = entry.isIntersecting;
      if (one.visible && one.dirty) draw(one);
    }
  },
  { rootMargin: "300px" },
);

/** What the chart library would take for markup is text. */
function harmless(text) {
  return inert(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * Lines or areas over time. `series`: {name, values, at} with `at` the number of its colour; values are null where
 * they are not known. `stacked`: areas on top of each other, which make 1.
 */
export function overTime(section, key, { title, times, series, unit, stacked = false }) {
  const shown = series.filter((one) => one.values.some(known));
  const largest = Math.max(0, ...shown.flatMap((one) => one.values.filter(known).map(Math.abs)));
  const [divisor, label] = scale(unit, largest);
  const columns = [["Time", "time"], ...shown.map((one) => [one.name, "number"])];
  const every = Math.max(1, Math.floor(times.length / ROWS));
  const rows = () =>
    times
      .map((_, at) => at)
      .filter((at) => (times.length - 1 - at) % every === 0)
      .map((at) => [clock(times[at]), ...shown.map((one) => inUnit(unit, one.values[at]))]);
  const last = (one) => inUnit(unit, one.values.findLast(known));
  const named = shown.slice(0, 6).map((one) => `${one.name} ${last(one)}`);
  // An area begins where something is known: the library would draw what is not as zero.
  const drawn = times.map((_, at) => at).filter((at) => !stacked || shown.some((one) => known(one.values[at])));
  const dates = AVAILABLE ? drawn.map((at) => axisTime(times[at])) : [];
  show(section, key, title, `${title}. Last values: ${named.join(", ")}.`, columns, rows, shown.length > 0 && times.length > 1, () => ({
    traces: shown.map((one, at) => ({
      type: "scatter",
      mode: "lines",
      name: harmless(one.name),
      x: dates,
      y: drawn.map((at) => (known(one.values[at]) ? one.values[at] / divisor : null)),
      line: { color: colour(`--s${(one.at ?? at) % NUM_COLOURS}`), width: stacked ? 0.5 : 2, dash: stacked ? "solid" : DASHES[at % DASHES.length] },
      hovertemplate: `%{y:.4~g} ${label}`,
      ...(stacked ? { stackgroup: "all", fillcolor: colour(`--s${(one.at ?? at) % NUM_COLOURS}`) } : {}),
    })),
    layout: { xaxis: { type: "date" }, yaxis: { title: { text: label }, rangemode: "tozero", ...(unit === "ratio" ? { range: [0, 100] } : {}) } },
  }));
}

/** Bars. `groups`: their names; `series`: {name, values, at}, stacked; `across`: lying, with names to their left. */
export function bars(section, key, { title, groups, series, unit, across = false, groupTitle = "" }) {
  const shown = series.filter((one) => one.values.some((value) => known(value) && value > 0));
  const sums = groups.map((_, at) => shown.reduce((sum, one) => sum + (one.values[at] || 0), 0));
  const [divisor, label] = scale(unit, Math.max(0, ...sums));
  const columns = [[groupTitle, "text"], ...shown.map((one) => [one.name, "number"])];
  const rows = () => groups.map((name, at) => [name, ...shown.map((one) => inUnit(unit, one.values[at]))]);
  const summary = `${title}. ${groups.length} ${groups.length === 1 ? "bar" : "bars"}; the table below has the values.`;
  show(section, key, title, summary, columns, rows, shown.length > 0, () => ({
    traces: shown.map((one, at) => {
      const values = one.values.map((value) => (known(value) ? value / divisor : null));
      const places = groups.map((_, index) => index);
      return {
        type: "bar",
        name: harmless(one.name),
        orientation: across ? "h" : "v",
        x: across ? values : places,
        y: across ? places : values,
        text: groups.map(harmless),
        textposition: "none",
        marker: { color: colour(`--s${(one.at ?? at) % NUM_COLOURS}`) },
        hovertemplate: `${across ? "" : `${groupTitle} `}%{text}: %{${across ? "x" : "y"}:.4~g} ${label}`,
      };
    }),
    layout: {
      barmode: "stack",
      [across ? "yaxis" : "xaxis"]: { title: { text: across ? "" : groupTitle }, tickmode: "array", tickvals: ticks(groups.length), ticktext: ticks(groups.length).map((at) => harmless(groups[at])), autorange: across ? "reversed" : true, automargin: true, zeroline: false },
      // Lying bars have no room for a title below their axis.
      [across ? "xaxis" : "yaxis"]: { rangemode: "tozero", ...(across ? { ticksuffix: ` ${label}` } : { title: { text: label } }) },
      height: across ? 70 + 20 * Math.ceil(shown.length / 3) + 26 * groups.length : undefined,
    },
  }));
}

function ticks(count) {
  const every = Math.max(1, Math.ceil(count / 16));
  return Array.from({ length: Math.ceil(count / every) }, (_, at) => at * every);
}

function show(section, key, title, summary, columns, rows, any, make) {
  const figure = part(section, key, create);
  const one = figures.get(figure);
  figure.hidden = !any;
  if (!any) return;
  setText(one.caption, title);
  setText(one.name, `: ${title}`);
  one.frame.setAttribute("aria-label", inert(title));
  one.refresh = () => one.details.open && fill(one.table, title, columns, rows());
  one.refresh();
  if (!AVAILABLE) return;
  one.chart.setAttribute("aria-label", inert(summary));
  one.make = make;
  one.dirty = true;
  if (one.visible) draw(one);
}

function create() {
  const chart = element("div", { class: "chart", role: "img", hidden: !AVAILABLE });
  const caption = element("figcaption");
  const table = element("table", {}, element("caption"), element("thead", {}, element("tr")), element("tbody"));
  const name = element("span", { class: "unseen" });
  const frame = element("div", { class: "scroll", tabindex: "0", role: "group" }, table);
  const details = element("details", { open: !AVAILABLE }, element("summary", {}, "As a table", name), frame);
  const figure = element("figure", {}, caption, chart, details);
  const one = { chart, caption, table, details, name, frame, visible: false, dirty: false, refresh: () => {}, make: null };
  details.addEventListener("toggle", () => one.refresh());
  figures.set(figure, one);
  watcher.observe(figure);
  return figure;
}

function draw(one) {
  one.dirty = false;
  const { traces, layout } = one.make();
  const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line"), fixedrange: true };
  const height = layout.height ?? 240;
  one.chart.style.height = `${height}px`;
  window.Plotly.react(
    one.chart,
    traces,
    {
      ...layout,
      height,
      margin: { l: 56, r: 8, t: 24, b: 36 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--text"), family: "system-ui, sans-serif", size: 12 },
      showlegend: traces.length > 1,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
      dragmode: false,
      hovermode: layout.barmode ? "closest" : "x unified",
      hoverlabel: { bgcolor: colour("--panel"), font: { color: colour("--text") } },
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
    },
    CONFIG,
  );
}

/** Draw everything again: the colours have changed. */
export function redraw() {
  for (const one of figures.values()) {
    if (!one.make) continue;
    one.dirty = true;
    if (one.visible) draw(one);
  }
}

