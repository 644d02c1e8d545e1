// Draws the charts with Plotly, each when it comes into view, in place of the still picture that is in the page anyway.
// Numbers and names are passed to the library as data; its own markup (<b>, <a>) is disabled by escaping every name.

(function () {
  "use strict";
  if (!window.Plotly) return;

  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]; // colours alone are not for everyone
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const figures = new Map(); // by the figure's element
  let requested = ""; // the name of the series that is drawn on request

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const one = figures.get(entry.target);
        if (!one) continue;
        one.visible = entry.isIntersecting;
        if (one.visible && one.dirty) draw(entry.target, one);
      }
    },
    { rootMargin: "300px" },
  );

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

  function traces(chart) {
    if (chart.kind === "spans") {
      return [
        {
          type: "bar",
          orientation: "h",
          hoverinfo: "text",
          showlegend: false,
          y: chart.spans.map((span) => plain(span.label)),
          base: chart.spans.map((span) => span.begin),
          x: chart.spans.map((span) => span.end - span.begin),
          hovertext: chart.spans.map((span) => plain(`${span.label}: ${span.text}`)),
          marker: { color: chart.spans.map((span) => colour(`--s${span.colour}`)) },
        },
      ];
    }
    // An area is drawn where something is known: the library takes what is unknown for zero.
    const known = chart.times.map((_, at) => chart.kind !== "stack" || chart.series.some((series) => series.values[at] !== null));
    const places = (values) => (chart.kind === "bars" ? values : values.filter((_, at) => known[at]));
    return chart.series
      .filter((series) => !series.on_request || series.name === requested)
      .map((series, at) => {
        const own = colour(`--s${series.colour}`);
        const name = plain(series.name);
        if (chart.kind === "bars") {
          const rows = chart.labels.map((_, at) => at); // two rows may have one label
          return { type: "bar", orientation: "h", name, x: series.values, y: rows, text: chart.labels.map(plain), textposition: "none", hovertemplate: "%{text}: %{x:.4~g}", marker: { color: own } };
        }
        const line = { type: "scatter", mode: "lines", name, x: places(chart.times), y: places(series.values), hovertemplate: "%{y:.4~g}" };
        if (chart.kind === "stack") return { ...line, stackgroup: "all", fillcolor: own, line: { color: own, width: 0, shape: "hvh" } };
        return { ...line, line: { color: own, width: 1.6, dash: DASHES[at % DASHES.length] } };
      });
  }

  function layout(chart, shown) {
    const lying = chart.kind === "bars" || chart.kind === "spans";
    const names = chart.labels.map(plain);
    const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
    const time = plain(`${chart.time_unit} since the start`);
    const rows = chart.kind === "bars" ? { tickmode: "array", tickvals: names.map((_, at) => at), ticktext: names } : { type: "category" };
    return {
      uirevision: chart.id, // what the reader has zoomed or hidden stays so when new data comes
      barmode: "stack",
      autosize: true,
      height: lying ? 110 + 24 * (names.length || chart.spans.length) : 260,
      margin: { l: 60, r: 16, t: 24, b: 40 },
      paper_bgcolor: colour("--panel"),
      plot_bgcolor: colour("--panel"),
      font: { color: colour("--text"), family: "system-ui, sans-serif", size: 12 },
      showlegend: shown.length > 1,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
      hovermode: lying ? "closest" : "x unified",
      hoverlabel: { bgcolor: colour("--panel"), font: { color: colour("--text") } },
      xaxis: { ...axis, title: { text: chart.kind === "bars" ? plain(chart.unit) : time } },
      yaxis: lying ? { ...axis, ...rows, autorange: "reversed" } : { ...axis, rangemode: "tozero", title: { text: plain(chart.unit) } },
    };
  }

  function draw(figure, one) {
    one.dirty = false;
    const still = figure.querySelector("svg.still");
    const live = figure.querySelector("div.live");
    live.classList.remove("replaced"); // what is not shown has no width
    try {
      const shown = traces(one.chart);
      window.Plotly.react(live, shown, layout(one.chart, shown), { displayModeBar: false, responsive: true, showTips: false });
      still.classList.add("replaced");
    } catch (error) {
      live.classList.add("replaced");
      still.classList.remove("replaced");
    }
  }

  function again() {
    for (const [figure, one] of figures) {
      one.dirty = true;
      if (one.visible) draw(figure, one);
    }
  }

  /** Take these charts as those of the page. `rank`: the series of this name is drawn though it is drawn on request. */
  window.drawCharts = function (charts, rank = "") {
    requested = rank;
    const before = new Map(figures);
    figures.clear();
    for (const chart of charts) {
      const figure = document.getElementById(`figure-${chart.id}`);
      if (!figure) continue;
      const known = before.get(figure);
      before.delete(figure);
      figures.set(figure, { chart, visible: known ? known.visible : false, dirty: true });
      if (!known) watcher.observe(figure);
      else if (known.visible) draw(figure, figures.get(figure));
    }
    for (const figure of before.keys()) {
      watcher.unobserve(figure);
      window.Plotly.purge(figure.querySelector("div.live")); // it listens to the window
    }
  };

  dark.addEventListener("change", again);
  const own = document.getElementById("charts");
  if (own) window.drawCharts(JSON.parse(own.textContent));
})();
