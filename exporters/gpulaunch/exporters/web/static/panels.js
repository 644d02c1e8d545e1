// The panels, one function each: a section and the run in, elements out. Field names are those of run.json.

import { element, part, say, setText, table, tiles } from "./build.js";
import { bars, overTime } from "./charts.js";
import { DASH, bytes, clock, inUnit, inert, known, number, percent, ranks as rankList, seconds, words } from "./format.js";

const FEW = 8;
const MOST_ROWS = 64;
const MOST_SITES = 50;
const MOST_EVENTS = 50;

/** The ranks that a table shows: all, or of very many those with the longest steps. */
function shown(view) {
  if (view.ranks.length <= MOST_ROWS) return view.ranks;
  return [...view.ranks].sort((a, b) => (b.step_seconds_now ?? 0) - (a.step_seconds_now ?? 0)).slice(0, MOST_ROWS);
}

function captionOf(view, what) {
  return view.ranks.length <= MOST_ROWS ? `${what}, by rank` : `${what}, of the ${MOST_ROWS} ranks with the longest steps (of ${view.ranks.length})`;
}

/** A line for each of few ranks; of many the lowest, the middle and the highest at each moment, and the one chosen. */
function byRank(view, chosen, curveOf) {
  const all = view.ranks.map((rank) => ({ name: `rank ${rank.rank}`, values: curveOf(rank) ?? [], rank: rank.rank }));
  const some = all.filter((one) => one.values.length === view.times_s.length && one.values.some(known));
  if (some.length <= FEW) return some.map((one) => ({ ...one, at: one.rank }));
  const sorted = view.times_s.map((_, at) => some.map((one) => one.values[at]).filter(known).sort((a, b) => a - b));
  const lines = [
    { name: "lowest rank", values: sorted.map((values) => values[0] ?? null), at: 1 },
    { name: "median", values: sorted.map((values) => values[values.length >> 1] ?? null), at: 0 },
    { name: "highest rank", values: sorted.map((values) => values.at(-1) ?? null), at: 2 },
  ];
  const apart = some.find((one) => one.rank === chosen);
  return apart ? [...lines, { ...apart, at: 3 }] : lines;
}

function keysOf(maps, order = []) {
  const found = new Set(maps.flatMap((map) => Object.keys(map ?? {})));
  return [...order.filter((key) => found.has(key)), ...[...found].filter((key) => !order.includes(key)).sort()];
}

export function now(section, view) {
  const stood = view.findings.filter((finding) => finding.active).length;
  const restarts = Object.values(view.restarts).reduce((total, count) => total + count, 0);
  tiles(section, "tiles", [
    ["Steps", number(view.steps)],
    ["Steps a second", number(view.steps_per_second_now)],
    ["A step takes", seconds(view.step_seconds_now)],
    ["Samples a second", number(view.samples_per_second_now)],
    ["Waiting for data", percent(view.phase_ratios_now.data_wait)],
    ["Goodput", `${isBound(view) ? "at most " : ""}${percent(view.goodput_ratio)}`],
    ["Ranks", number(view.world_size ?? (view.ranks.length || null))],
    ["Attempt", view.attempt === null ? DASH : String(view.attempt)],
    ["Restarts", number(restarts)],
    ["Findings that stand", number(stood)],
    ["Newest checkpoint seen", view.checkpoint_step === null ? DASH : `step ${number(view.checkpoint_step)}`],
    ["Has run for", seconds(view.elapsed_seconds)],
  ]);
}

export function findings(section, view) {
  say(section, "none", view.findings.length ? "" : view.watched || view.live ? "Nothing to change has been found." : "Nothing is known: no profiler looks at this run.");
  const list = part(section, "list", () => element("ul", { class: "found" }));
  while (list.children.length > view.findings.length) list.lastElementChild.remove();
  view.findings.forEach((finding, at) => {
    const item = list.children[at] ?? list.appendChild(element("li", {}, element("h3"), element("p", { class: "path" }), element("p"), element("p", { class: "quiet" })));
    const [title, place, advice, more] = item.children;
    item.dataset.active = String(finding.active);
    const cost = finding.seconds_per_hour > 0 ? `${seconds(finding.seconds_per_hour)} of each hour` : "";
    setText(title, [words(finding.rule.replaceAll("-", " ")), cost, finding.active ? "" : finding.earlier ? "earlier run" : "no longer"].filter(Boolean).join(" \u2014 "));
    setText(place, [placeOf(finding), finding.subject].filter(Boolean).join("  "));
    place.hidden = !place.textContent;
    setText(advice, finding.advice);
    const evidence = Object.entries(finding.evidence).map(measured);
    const facts = [`ranks ${rankList(finding.ranks)}`, `confidence ${percent(finding.confidence)}`, `rule ${finding.rule}`, `since ${clock(finding.first_seen_s)}`];
    if (known(finding.lost_seconds)) facts.push(`lost while it stood ${seconds(finding.lost_seconds)}`);
    setText(more, [...facts, ...evidence].join("; "));
  });
  return view.findings.filter((finding) => finding.active).map((finding) => `${finding.rule} ${placeOf(finding)}`.trim());
}

/** What was measured, in the unit that its name has. */
function measured([name, value]) {
  const parts = name.split("_");
  const at = typeof value === "number" ? parts.findIndex((one) => ["seconds", "bytes", "ratio", "hertz"].includes(one)) : -1;
  if (at < 0) return `${words(name)} ${typeof value === "number" ? number(value) : value}`;
  return `${parts.filter((_, place) => place !== at || !at).join(" ")} ${inUnit(parts[at], value)}`; // bytes_per_step is called so
}

function placeOf(finding) {
  return finding.file ? `${finding.file}${finding.line ? `:${finding.line}` : ""}` : "";
}

export function steps(section, view, chosen) {
  say(section, "none", view.ranks.length ? "" : "No rank has begun yet.");
  overTime(section, "rate", { title: "Steps a second", times: view.times_s, unit: "steps/s", series: byRank(view, chosen, (rank) => rank.steps_per_second) });
  overTime(section, "length", { title: "Mean length of a step", times: view.times_s, unit: "seconds", series: byRank(view, chosen, (rank) => rank.step_mean_seconds) });
  table(
    section,
    "ranks",
    captionOf(view, "Steps"),
    [["Rank", "number"], ["Steps", "number"], ["A second", "number"], ["A step takes", "number"], ["Samples", "number"], ["Last step", "number"], ["Ends with", "text"]],
    shown(view).map((rank) => [
      rank.rank, number(rank.steps), number(rank.steps_per_second_now), seconds(rank.step_seconds_now), number(rank.samples), clock(rank.last_step_s),
      rank.armed ? words(rank.step_source ?? "\u2013") : "no probe",
    ]),
  );
}

export function phases(section, view) {
  const over = keysOf([view.phase_ratios], view.phases);
  const rows = shown(view).filter((rank) => Object.keys(rank.phase_ratios_now).length || Object.keys(rank.phase_seconds).length);
  const ratios = rows.map((rank) => rank.phase_ratios_now); // none of a rank that makes no steps any more, while the run goes on
  const names = keysOf(ratios, view.phases).filter((phase) => ratios.some((ratio) => ratio[phase] > 0));
  const spent = keysOf(rows.map((rank) => rank.phase_seconds), view.phases).filter((phase) => rows.some((rank) => rank.phase_seconds[phase] > 0));
  say(section, "none", names.length || spent.length || over.length ? "" : "Not known yet: no step has been measured.");
  overTime(section, "time", { title: "Phases over time, all ranks", times: view.times_s, unit: "ratio", stacked: true, series: over.map((phase) => ({ name: words(phase), values: view.phase_ratios[phase], at: placeIn(view.phases, phase) })) });
  bars(section, "ranks", { title: view.status === "running" ? "Phases by rank, now" : "Phases by rank", groupTitle: "Rank", groups: rows.map((rank) => String(rank.rank)), unit: "ratio", series: names.map((phase) => ({ name: words(phase), values: ratios.map((ratio) => ratio[phase] ?? null), at: placeIn(view.phases, phase) })) });
  table(
    section,
    "totals",
    captionOf(view, "Time in each phase, whole run"),
    [["Rank", "number"], ...spent.map((phase) => [words(phase), "number"])],
    rows.map((rank) => [rank.rank, ...spent.map((phase) => seconds(rank.phase_seconds[phase]))]),
  );
}

function placeIn(order, name) {
  const at = order.indexOf(name);
  return at < 0 ? order.length - 1 : at;
}

export function loader(section, view, chosen) {
  const rows = shown(view).filter((rank) => rank.loader);
  say(section, "none", rows.length ? "" : "No dataloader has been seen.");
  overTime(section, "ready", { title: "Batches that are ready", times: view.times_s, unit: "batches", series: byRank(view, chosen, (rank) => rank.loader_ready) });
  table(
    section,
    "ranks",
    captionOf(view, "Dataloader"),
    [["Rank", "number"], ["Batches", "number"], ["Waited", "number"], ["of it in transfer", "number"], ["of it out of order", "number"], ["Ready", "number"], ["Workers", "number"], ["Bytes", "number"]],
    rows.map(({ rank, loader: one }) => [
      rank, number(one.batches), seconds(one.wait_seconds), seconds(one.transfer_seconds), seconds(one.reorder_blocked_seconds), number(one.ready),
      `${number(one.workers_alive)} of ${number(one.workers_configured)}`, bytes(one.batch_bytes),
    ]),
  );
  const states = keysOf(rows.map((rank) => rank.loader.worker_seconds));
  table(section, "workers", captionOf(view, "Time of the workers"), [["Rank", "number"], ...states.map((state) => [words(state), "number"])], states.length ? rows.map((rank) => [rank.rank, ...states.map((state) => seconds(rank.loader.worker_seconds[state]))]) : []);
}

export function copies(section, view, chosen) {
  const sites = view.sites.slice(0, MOST_SITES);
  const rows = shown(view).flatMap((rank) => rank.copies.map((copy) => ({ rank: rank.rank, ...copy })));
  const waits = shown(view).flatMap((rank) => rank.syncs.map((sync) => ({ rank: rank.rank, ...sync })));
  say(section, "none", sites.length || rows.length || waits.length ? "" : "No copies to or from a GPU, and no waits for one, have been seen.");
  for (const direction of keysOf(view.ranks.map((rank) => rank.copy_bytes_per_second), ["h2d", "d2h", "d2d"])) {
    overTime(section, `rate-${direction}`, { title: `Copied a second, ${direction}`, times: view.times_s, unit: "bytes/s", series: byRank(view, chosen, (rank) => rank.copy_bytes_per_second[direction]) });
  }
  const dear = sites.filter((site) => site.blocked_seconds + site.gpu_seconds > 0).slice(0, 10);
  bars(section, "lines", {
    title: "Lines that cost most",
    groupTitle: "Line",
    across: true,
    groups: dear.map((site) => `${shortly(site.text)} (${site.kind})`),
    unit: "seconds",
    series: [
      { name: "blocked", values: dear.map((site) => site.blocked_seconds), at: 1 },
      { name: "on the GPU", values: dear.map((site) => site.gpu_seconds), at: 0 },
    ],
  });
  table(
    section,
    "sites",
    "By line, newest attempt, all ranks together",
    [["Line", "path"], ["What", "text"], ["Ranks", "text"], ["Times", "number"], ["Bytes", "number"], ["Blocked", "number"], ["On the GPU", "number"], ["Pinned", "number"]],
    sites.map((site) => [site.text || "elsewhere", words(site.kind), rankList(site.ranks), number(site.count), bytes(site.size_bytes), seconds(site.blocked_seconds), seconds(site.gpu_seconds), `${number(site.pinned)} of ${number(site.count)}`]),
  );
  table(
    section,
    "totals",
    "Copies, whole run",
    [["Rank", "number"], ["Direction", "text"], ["Host memory", "text"], ["Times", "number"], ["Bytes", "number"], ["Blocked", "number"], ["On the GPU", "number"]],
    rows.map((copy) => [copy.rank, copy.direction, copy.host_memory || DASH, number(copy.count), bytes(copy.size_bytes), seconds(copy.blocked_seconds), seconds(copy.gpu_seconds)]),
  );
  table(section, "waits", "Waits for the GPU, whole run", [["Rank", "number"], ["By", "text"], ["Times", "number"], ["Blocked", "number"]], waits.map((sync) => [sync.rank, sync.kind, number(sync.calls), seconds(sync.blocked_seconds)]));
}

/** The last two parts of a path are what one knows it by. */
function shortly(text) {
  if (!text) return "elsewhere";
  const found = inert(text).split("/").slice(-2).join("/");
  return found.length > 32 ? `...${found.slice(-29)}` : found;
}

export function memory(section, view, chosen) {
  for (const role of keysOf(view.ranks.map((rank) => rank.rss_bytes), ["trainer", "workers"])) {
    overTime(section, `rss-${role}`, { title: `Resident memory, ${role}`, times: view.times_s, unit: "bytes", series: byRank(view, chosen, (rank) => rank.rss_bytes[role]) });
  }
  for (const state of keysOf(view.ranks.map((rank) => rank.gpu_bytes), ["allocated", "reserved"])) {
    overTime(section, `gpu-${state}`, { title: `GPU memory, ${state}`, times: view.times_s, unit: "bytes", series: byRank(view, chosen, (rank) => rank.gpu_bytes[state]) });
  }
  overTime(section, "available", { title: "Memory available on the nodes", times: view.times_s, unit: "bytes", series: view.nodes.slice(0, FEW).map((node) => ({ name: nodeName(node), values: node.memory_available_bytes, at: node.node })) });
  const rows = shown(view);
  say(section, "none", rows.length || view.nodes.length ? "" : "Nothing is known yet.");
  table(
    section,
    "ranks",
    captionOf(view, "Memory now"),
    [["Rank", "number"], ["Trainer", "number"], ["Workers", "number"], ["In shared memory", "number"], ["GPU allocated", "number"], ["GPU reserved", "number"], ["GPU peak", "number"], ["Pinned", "number"], ["Retries", "number"], ["Out of memory", "number"]],
    rows.map(({ rank, memory: one }) => [
      rank, bytes(one.rss_bytes.trainer), bytes(one.rss_bytes.workers), bytes(one.shm_inflight_bytes), bytes(one.gpu_bytes.allocated), bytes(one.gpu_bytes.reserved),
      bytes(one.gpu_bytes.peak_allocated), bytes(one.pinned_bytes), number(one.alloc_retries), number(one.ooms),
    ]),
  );
  table(
    section,
    "nodes",
    "Nodes now",
    [["Node", "text"], ["Memory available", "number"], ["of", "number"], ["Page cache", "number"], ["Swap used", "number"], ["/dev/shm used", "number"], ["of", "number"], ["cgroup used", "number"], ["of", "number"]],
    view.nodes.slice(0, MOST_ROWS).map((node) => [
      nodeName(node),
      ...["memory_available_bytes", "memory_total_bytes", "page_cache_bytes", "swap_used_bytes", "shm_used_bytes", "shm_size_bytes", "cgroup_used_bytes", "cgroup_limit_bytes"].map((name) => bytes(node.values[name])),
    ]),
  );
}

function nodeName(node) {
  return node.host ? `${node.host} (${node.node})` : `node ${node.node}`;
}

export function devices(section, view) {
  say(section, "none", view.devices.length ? "" : "No GPU is seen.");
  const some = view.devices.slice(0, 16);
  const named = (curve) => some.map((device, at) => ({ name: deviceName(view, device), values: device.curves[curve] ?? [], at }));
  const curves = [["utilization_ratio", "Utilization: time in which any kernel ran", "ratio"], ["sm_active_ratio", "Multiprocessors busy", "ratio"], ["memory_used_bytes", "Memory used", "bytes"], ["power_watts", "Power", "W"], ["pcie_receive_bytes_per_second", "PCIe, received", "bytes/s"], ["pcie_transmit_bytes_per_second", "PCIe, sent", "bytes/s"]];
  for (const [curve, title, unit] of curves) overTime(section, curve, { title, times: view.times_s, unit, series: named(curve) });
  table(
    section,
    "now",
    "Devices now",
    [["GPU", "text"], ["Model", "text"], ["Utilization", "number"], ["SMs busy", "number"], ["Memory", "number"], ["of", "number"], ["Power", "number"], ["Temperature", "number"], ["Clock", "number"], ["ECC, uncorrected", "number"], ["XID", "number"], ["Throttled", "text"]],
    view.devices.slice(0, MOST_ROWS).map((device) => {
      const { values } = device;
      const throttled = Object.entries(device.throttle_seconds).filter(([, value]) => value > 0);
      return [
        deviceName(view, device), device.model || DASH, percent(values.utilization_ratio), percent(values.sm_active_ratio), bytes(values.memory_used_bytes), bytes(values.memory_total_bytes),
        known(values.power_watts) ? `${number(values.power_watts)} W` : DASH, known(values.temperature_celsius) ? `${number(values.temperature_celsius)} \u00b0C` : DASH,
        known(values.clock_hertz) ? `${number(values.clock_hertz / 1e6)} MHz` : DASH, number(values.ecc_uncorrected), number(values.xid_errors),
        throttled.map(([reason, value]) => `${words(reason)} ${seconds(value)}`).join(", ") || DASH,
      ];
    }),
  );
}

function deviceName(view, device) {
  return (view.num_nodes ?? 1) > 1 ? `${device.gpu} of node ${device.node}` : device.gpu;
}

const LOST_UNKNOWN = "Lost work is not known: from where the program went on by itself is not seen. Name the directory of its checkpoints with --checkpoint-dir.";

function isBound(view) {
  return known(view.goodput_ratio) && view.goodput_seconds.lost_work === null;
}

function nameOf(attempt) {
  return attempt.earlier ? `attempts/${attempt.directory}` : `attempt ${attempt.number}`;
}

/** How long an attempt lasted. Where nobody says when it ended, it was over as another one began: that is the most. */
function lasted(view, at) {
  const { began_s: began, ended_s: ended } = view.attempts[at];
  if (!known(began)) return { length: null, bound: false };
  const begins = [view.began_s, ...view.attempts.slice(at + 1).map((later) => later.began_s)];
  const next = Math.min(...begins.filter((one) => known(one) && one > began)); // Infinity: there is none
  const now = view.ended_s ?? view.seen_s ?? began;
  const bound = !known(ended) && next < now;
  return { length: Math.max(0, (ended ?? Math.min(next, now)) - began), bound };
}

export function history(section, view) {
  const buckets = keysOf([view.goodput_seconds], view.goodput_buckets);
  const restarts = Object.entries(view.restarts).map(([kind, count]) => `${words(kind)} ${count}`);
  const said = [restarts.length ? `Restarts: ${restarts.join(", ")}.` : "No restart.", view.hangs ? `Hangs: ${view.hangs}.` : "", view.preempted ? "Preempted." : "", known(view.resumed_step) ? `Went on from step ${number(view.resumed_step)}.` : "", view.goodput_seconds.productive === null ? "How much of the time was productive is not known: no step was seen." : "", isBound(view) ? LOST_UNKNOWN : ""];
  say(section, "said", said.filter(Boolean).join(" "), "");
  overTime(section, "goodput", { title: "Goodput since the beginning", times: view.times_s, unit: "ratio", series: [{ name: "goodput", values: view.goodput_ratio_over_time, at: 2 }] });
  bars(section, "buckets", { title: "Where the time of the run went", groupTitle: "", across: true, groups: ["the run"], unit: "seconds", series: buckets.map((bucket) => ({ name: words(bucket), values: [view.goodput_seconds[bucket]], at: [2, 4, 3, 6, 1, 7, 0][view.goodput_buckets.indexOf(bucket)] ?? 8 })) });
  const lengths = view.attempts.map((attempt, at) => ({ attempt, ...lasted(view, at) })).slice(-20);
  bars(section, "attempts-over-time", {
    title: "How long each attempt lasted",
    groupTitle: "Attempt",
    across: true,
    groups: lengths.map(({ attempt, bound }) => `${nameOf(attempt)}, ${attempt.status}${bound ? ", at most" : ""}`),
    unit: "seconds",
    series: ["running", "finished", "failed", "lost", "stopped", "unknown"].map((status, at) => ({ name: status, values: lengths.map(({ attempt, length }) => (attempt.status === status ? length : null)), at: [0, 2, 7, 3, 6, 11][at] })),
  });
  table(
    section,
    "attempts",
    "Attempts, newest first",
    [["Attempt", "number"], ["Status", "text"], ["Began", "time"], ["Ended", "time"], ["First cause", "prose"], ["What to do", "prose"]],
    view.attempts.slice(-MOST_ROWS).reverse().map((attempt) => [attempt.earlier ? `${nameOf(attempt)} (earlier run)` : attempt.number, attempt.status, clock(attempt.began_s), clock(attempt.ended_s), attempt.cause ? `${words(attempt.cause.kind)}: ${attempt.cause.headline}` : DASH, attempt.cause?.advice || DASH]),
  );
  const events = part(section, "events", () => element("details", {}, element("summary", {}, "Events")));
  events.hidden = view.events.length === 0;
  table(events, "events", "Newest events first", [["When", "time"], ["What", "text"], ["Of it", "prose"]], view.events.slice(-MOST_EVENTS).reverse().map((event) => [clock(event.at_s), words(event.what), Object.entries(event.fields).filter(([, value]) => value !== null).map(([name, value]) => `${words(name)} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")]));
}

export function profiler(section, view) {
  say(section, "none", view.collectors.length || view.ranks.length ? "" : "Nothing is known yet.");
  overTime(section, "sidecar", { title: "Cores that the sidecar uses", times: view.times_s, unit: "cores", series: view.nodes.slice(0, FEW).map((node) => ({ name: nodeName(node), values: node.sidecar_cores, at: node.node })) });
  table(
    section,
    "cost",
    captionOf(view, "What being measured costs"),
    [["Rank", "number"], ["In the probe", "number"], ["Budget", "number"], ["Steps not observed", "number"], ["Out of service", "prose"]],
    shown(view).filter((rank) => rank.cost).map(({ rank, cost }) => [
      rank, seconds(cost.probe_seconds), percent(cost.budget_ratio), number(cost.unobserved_steps),
      [cost.parts_unavailable.map(words).join(", "), cost.fault].filter(Boolean).join(": ") || DASH,
    ]),
  );
  table(
    section,
    "collectors",
    "Collectors",
    [["Collector", "text"], ["Node", "number"], ["Works", "text"], ["Why not, or what failed last", "prose"], ["Errors", "number"], ["Took", "number"]],
    view.collectors.slice(0, 256).map((one) => [words(one.name), one.node, one.available ? "yes" : "no", one.reason || DASH, number(one.errors), seconds(one.spent_seconds)]),
  );
  table(
    section,
    "sidecars",
    "Sidecars",
    [["Node", "text"], ["Looked last", "time"], ["CPU time", "number"], ["Memory", "number"], ["Looks", "number"], ["Late", "number"]],
    view.nodes.slice(0, MOST_ROWS).map((node) => [nodeName(node), clock(node.seen_s), seconds(node.sidecar_cpu_seconds), bytes(node.sidecar_rss_bytes), number(node.refreshes), number(node.late_refreshes)]),
  );
}

export function notes(section, view) {
  section.hidden = view.notes.length === 0;
  const list = part(section, "list", () => element("ul"));
  while (list.children.length > view.notes.length) list.lastElementChild.remove();
  view.notes.forEach((note, at) => setText(list.children[at] ?? list.appendChild(element("li")), note));
}

