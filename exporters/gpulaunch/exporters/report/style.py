"""Style sheet of the page, for light, dark and print; and our one script, which draws with the library."""

from __future__ import annotations

from typing import Final

_LIGHT: Final = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#8a4fa3", "#3b93d0"),
    *("#a6761d", "#cc79a7", "#4d4d4d", "#8a8000", "#5d9147", "#8c8c8c"),
)
_DARK: Final = (
    *("#4aa8e0", "#f0b432", "#35c79a", "#f08040", "#b98ad0", "#8fd0ff"),
    *("#cfa35a", "#e8a3c8", "#c8c8c8", "#d0c640", "#98c783", "#8c8c8c"),
)


def _palette(colours: tuple[str, ...]) -> str:
    return "".join(f"--c{index}:{colour};" for index, colour in enumerate(colours))


STYLE: Final = (
    f":root{{color-scheme:light dark;--paper:#fff;--ink:#1b1b1b;--soft:#595959;--line:#c8c8c8;--band:#f3f4f6;"
    f"--link:#0b5cad;{_palette(_LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{--paper:#14171a;--ink:#e8e8e8;--soft:#a9b0b6;--line:#434a50;"
    f"--band:#1d2226;--link:#7db8f0;{_palette(_DARK)}}}}}"
    + "".join(
        f".c{index}{{fill:var(--c{index});background:var(--c{index})}}"
        f".l{index}{{fill:none;stroke:var(--c{index});stroke-width:1.6}}"
        for index in range(len(_LIGHT))
    )
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
main,header,footer{max-width:70rem;margin:0 auto;padding:0 1rem}
a{color:var(--link)}
a:focus-visible,[tabindex]:focus-visible,summary:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem;top:1rem;background:var(--paper);padding:.5rem}
h1{font-size:1.6rem;margin:1rem 0 .3rem}h2{font-size:1.3rem;margin:2.2rem 0 .6rem;border-bottom:1px solid var(--line)}
h3{font-size:1.08rem;margin:1.6rem 0 .4rem}
.lead{font-size:1.05rem}.soft,caption{color:var(--soft)}
nav ul{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.6rem 0}
.wide{overflow-x:auto;margin:.8rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:.2rem 0;caption-side:top}
th,td{text-align:left;vertical-align:top;padding:.2rem .6rem;border-bottom:1px solid var(--line)}
thead th{background:var(--band)}th{font-weight:600}tbody th{font-weight:500}
.n{text-align:right;white-space:nowrap}.code{font-family:ui-monospace,monospace}
td,th{max-width:34rem}thead th,.n{overflow-wrap:normal}tbody th,td:not(.n){min-width:4rem}
figure{margin:1rem 0}figcaption{font-weight:600;margin-bottom:.3rem}
svg.still{width:100%;max-width:760px;height:auto;display:block}
svg.still text{font:12px system-ui,sans-serif;fill:currentColor}svg.still .end{text-anchor:end}
svg.still rect,svg.still path[class^=c]{stroke:var(--paper);stroke-width:.6}
.frame{fill:none;stroke:var(--line)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1rem;padding:0;margin:.3rem 0;font-size:.88rem}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.35em;print-color-adjust:exact;-webkit-print-color-adjust:exact}
svg{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.replaced{display:none!important}.live:not(.replaced)~.legend{display:none}.live{width:100%}
footer{margin:2rem auto;color:var(--soft)}
@media print{:root{color-scheme:light;--paper:#fff;--ink:#000;--soft:#333;--line:#999;--band:#eee}
nav,.skip,.live{display:none!important}svg.still.replaced{display:block!important}
.live:not(.replaced)~.legend{display:flex}
.wide{overflow:visible}table{font-size:.72rem}tr,figure{break-inside:avoid}h2,h3{break-after:avoid}}
"""
)

# Numbers and names are JSON, passed to the library as data; its markup (<b>, <a>) is disabled by
# escaping "<" in every name.
DRAW: Final = """
(function () {
  "use strict";
  if (!window.Plotly) return;
  var charts = JSON.parse(document.getElementById("charts").textContent);
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function plain(text) { return text.replace(/&/g, "&amp;").replace(/</g, "&lt;"); }
  function traces(chart) {
    if (chart.kind === "spans") {
      return [{
        type: "bar", orientation: "h", hoverinfo: "text", showlegend: false,
        y: chart.spans.map(function (span) { return plain(span.label); }),
        base: chart.spans.map(function (span) { return span.begin; }),
        x: chart.spans.map(function (span) { return span.end - span.begin; }),
        hovertext: chart.spans.map(function (span) { return plain(span.label + ": " + span.text); }),
        marker: { color: chart.spans.map(function (span) { return css("--c" + span.colour); }) }
      }];
    }
    return chart.series.map(function (series) {
      var colour = css("--c" + series.colour), name = plain(series.name);
      if (chart.kind === "bars") {
        return { type: "bar", orientation: "h", name: name, x: series.values, y: chart.labels.map(plain),
                 marker: { color: colour } };
      }
      var trace = { type: "scatter", mode: "lines", name: name, x: chart.times, y: series.values,
                    line: { color: colour, width: 1.6 } };
      if (chart.kind === "stack") {
        trace.stackgroup = "all"; trace.fillcolor = colour; trace.line = { color: colour, width: 0, shape: "hvh" };
      }
      return trace;
    });
  }
  function layout(chart) {
    var rows = chart.labels.length || chart.spans.length, lying = chart.kind === "bars" || chart.kind === "spans";
    var axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), automargin: true };
    function titled(text, more) { return Object.assign({}, axis, { title: { text: plain(text) } }, more || {}); }
    var time = chart.time_unit + " since the beginning";
    return {
      barmode: "stack", autosize: true, height: lying ? 130 + 24 * rows : 300, margin: { l: 70, r: 20, t: 10, b: 45 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
      hovermode: lying ? "closest" : "x",
      paper_bgcolor: css("--paper"), plot_bgcolor: css("--paper"), font: { color: css("--ink"), size: 12 },
      xaxis: titled(lying ? (chart.kind === "spans" ? time : chart.unit) : time),
      yaxis: lying ? titled("", { autorange: "reversed", type: "category" }) : titled(chart.unit)
    };
  }
  function draw() {
    charts.forEach(function (chart) {
      var figure = document.getElementById("figure-" + chart.id), still = figure.querySelector("svg.still");
      var live = figure.querySelector("div.live");
      live.classList.remove("replaced");  // what is not shown has no width
      try {
        window.Plotly.react(live, traces(chart), layout(chart), { displayModeBar: false, responsive: true });
        still.classList.add("replaced");
      } catch (error) {
        live.classList.add("replaced");
        still.classList.remove("replaced");
      }
    });
  }
  draw();
  dark.addEventListener("change", draw);
})();
"""
