// Asks for the run once a second while the page is looked at, and shows it.

import { element, setText } from "./build.js";
import { AVAILABLE, redraw } from "./charts.js";
import { clock, inert } from "./format.js";
import * as panels from "./panels.js";

const EVERY_MS = 1000;
const HIDDEN_MS = 30000;
const OVER_MS = 10000; // of a run that is over nothing changes soon
const LONGEST_MS = 30000;
const PATIENCE_MS = 15000;

const byId = (id) => document.getElementById(id);
let timer = 0;
let failures = 0;
let answeredAt = null;
let token = takeToken();
let told = null;
let tag = null;
let view = null;
let standing = null;

/** From the address (which does not keep it), or from this tab's memory. */
function takeToken() {
  const told = new URLSearchParams(location.hash.slice(1)).get("token");
  if (told === null) return sessionStorage.getItem("token") ?? "";
  history.replaceState(null, "", location.pathname + location.search);
  sessionStorage.setItem("token", told);
  return told;
}

async function ask() {
  clearTimeout(timer);
  let wait = EVERY_MS;
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch("api/run.json", { headers, credentials: "omit", signal: AbortSignal.timeout(PATIENCE_MS) });
    byId("token").hidden = answer.status !== 401;
    if (answer.status === 401) {
      connected("locked", token ? "The token is not the right one" : "A token is needed");
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const same = tag !== null && tag === answer.headers.get("ETag");
    if (!same) told = await answer.json();
    tag = answer.headers.get("ETag");
    failures = 0;
    answeredAt = Date.now() / 1000;
    if (told.starting) connected("starting", "Connected; the first look at the run is not over yet");
    else {
      view = told;
      connected("live", view.status === "running" ? "Live" : "Over");
      if (!same) show();
      if (view.status !== "running") wait = OVER_MS;
    }
  } catch (error) {
    failures += 1;
    console.info(`no answer: ${error}`);
    if (failures > 1 || answeredAt === null) connected("silent", answeredAt === null ? "Not answering" : `Not answering since ${clock(answeredAt)}; what is shown is from then`);
    wait = Math.min(LONGEST_MS, EVERY_MS * 2 ** Math.min(failures, 5));
  }
  timer = setTimeout(ask, document.hidden ? Math.max(wait, HIDDEN_MS) : wait);
}

/** Say how the connection is: a change is read out, the passing of time is not. */
function connected(state, text) {
  byId("connection").dataset.state = state;
  setText(byId("connection"), text);
}

function show() {
  const chosen = follow();
  setText(byId("name"), view.name || "gpulaunch");
  document.title = inert(`${view.name || "run"}: ${view.status} - gpulaunch`);
  setText(byId("status"), view.stopped_by ? `${view.status} by ${view.stopped_by}` : view.status);
  byId("status").dataset.status = view.status;
  const nodes = view.num_nodes > 1 ? ` on ${view.num_nodes} nodes` : "";
  const facts = [view.phase, view.world_size ? `${view.world_size} ranks${nodes}` : "", view.run_id && `run ${view.run_id}`, typed(view.command), view.exit_code === null ? "" : `exit code ${view.exit_code}`];
  setText(byId("headline"), facts.filter(Boolean).join(" \u00b7 "));
  setText(byId("error"), view.error);
  byId("error").hidden = !view.error;
  setText(byId("stall"), view.stall ? `No progress since ${clock(view.stall.since_s)}: ${view.stall.what}` : "");
  byId("stall").hidden = !view.stall;
  setText(byId("seen"), view.seen_s === null ? "" : `as of ${clock(view.seen_s)}`);
  for (const name of ["now", "steps", "phases", "loader", "copies", "memory", "devices", "history", "profiler", "notes"]) panels[name](byId(name), view, chosen);
  announce(panels.findings(byId("findings"), view));
}

/** A command as it was typed: not where the shell found it. */
function typed([program = "", ...words]) {
  return [program.split("/").at(-1), ...words].join(" ");
}

/** The rank that is shown apart; there is a choice where not all have lines of their own. */
function follow() {
  const many = view.ranks.length > 8;
  byId("follow").hidden = !many;
  if (!many) return null;
  const select = byId("rank");
  if (select.options.length !== view.ranks.length + 1) {
    const before = select.value;
    select.replaceChildren(element("option", { value: "" }, "none"), ...view.ranks.map((rank) => element("option", { value: rank.rank }, `rank ${rank.rank}`)));
    select.value = before;
  }
  return select.value === "" ? null : Number(select.value);
}

/** Read out what has been found since the last look. */
function announce(active) {
  const fresh = standing === null ? [] : active.filter((one) => !standing.has(one));
  if (fresh.length) setText(byId("announcement"), `Found: ${fresh.join("; ")}`);
  standing = new Set(active);
}

byId("charts-missing").hidden = AVAILABLE;
byId("rank").addEventListener("change", () => view && show());
byId("token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("secret").value.trim();
  sessionStorage.setItem("token", token);
  byId("secret").value = "";
  ask();
});
document.addEventListener("visibilitychange", () => document.hidden || ask());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
ask();
