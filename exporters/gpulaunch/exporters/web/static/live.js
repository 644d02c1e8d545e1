// Asks for the run once a second while the page is looked at, and shows what is new of it.

const EVERY_MS = 1000;
const HIDDEN_MS = 30000;
const OVER_MS = 10000; // of a run that is over nothing changes soon
const LONGEST_MS = 30000;
const TIMEOUT_MS = 15000;

const byId = (id) => document.getElementById(id);
let timer = 0;
let failures = 0;
let answeredAt = "";
let token = takeToken();
let answered = null; // the last answer and its tag
let tag = null;
let run = null; // the last answer that has a run
let standing = null; // the findings that were active at the last look

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
    const answer = await fetch("api/page.json", { headers, credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) });
    byId("token").hidden = answer.status !== 401;
    if (answer.status === 401) {
      connected("locked", token ? "The token is not the right one" : "A token is needed");
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const same = tag !== null && tag === answer.headers.get("ETag");
    if (!same) answered = await answer.json();
    tag = answer.headers.get("ETag");
    failures = 0;
    answeredAt = new Date().toLocaleTimeString("en-GB");
    if (answered.starting) connected("starting", "Connected; the first look at the run is not over yet");
    else {
      run = answered;
      if (!same) show();
      connected("live", run.running ? "Live" : "Over");
      if (!run.running) wait = OVER_MS;
    }
  } catch (error) {
    failures += 1;
    console.info(`no answer: ${error}`);
    if (failures > 1 || !answeredAt) connected("silent", answeredAt ? `Not answering since ${answeredAt}; what is shown is from then` : "Not answering");
    wait = Math.min(LONGEST_MS, EVERY_MS * 2 ** Math.min(failures, 5));
  }
  timer = setTimeout(ask, document.hidden ? Math.max(wait, HIDDEN_MS) : wait);
}

/** Say how the connection is: a change is read out, the passing of time is not. */
function connected(state, text) {
  byId("connection").dataset.state = state;
  if (byId("connection").textContent !== text) byId("connection").textContent = text;
}

function show() {
  document.title = run.title;
  if (byId("made").textContent !== run.made) byId("made").textContent = run.made;
  // A document of its own runs no script and loads nothing; all text of others was escaped where it was written.
  updateChildren(byId("document"), new DOMParser().parseFromString(run.body, "text/html").body);
  offerRanks();
  draw();
  const fresh = standing === null ? [] : run.findings.filter((one) => !standing.has(one));
  if (fresh.length) byId("announcement").textContent = `Found: ${fresh.join("; ")}`;
  standing = new Set(run.findings);
}

function draw() {
  if (window.drawCharts) window.drawCharts(run.charts, byId("rank").value);
}

/** The rank that is drawn apart; there is a choice where not all have lines of their own. */
function offerRanks() {
  const select = byId("rank");
  byId("follow").hidden = run.ranks.length === 0 || !window.drawCharts;
  const names = run.ranks.map((rank) => `rank ${rank}`);
  if ([...select.options].slice(1).map((option) => option.value).join() === names.join()) return;
  const before = names.includes(select.value) ? select.value : "";
  select.replaceChildren(new Option("none", ""), ...names.map((name) => new Option(name)));
  select.value = before;
}

// What is there already is changed in place, so that focus, selection, open tables and the place of a screen reader stay.
// Children are matched by key, in order; what is new is inserted, and what is no longer there is removed.
function updateChildren(node, fresh) {
  const wanted = [...fresh.childNodes].filter(isShown);
  let next = node.firstChild;
  for (const child of wanted) {
    let same = next;
    while (same && keyOf(same) !== keyOf(child)) same = same.nextSibling;
    if (!same) {
      node.insertBefore(child, next);
      continue;
    }
    while (next !== same) {
      const passed = next;
      next = next.nextSibling;
      passed.remove();
    }
    next = same.nextSibling;
    if (same.nodeType === Node.ELEMENT_NODE) update(same, child);
    else if (same.data !== child.data) same.data = child.data;
  }
  while (next) {
    const rest = next;
    next = next.nextSibling;
    rest.remove();
  }
}

const isShown = (node) => node.nodeType === Node.ELEMENT_NODE || node.data.trim() !== "";
const keyOf = (node) => `${node.nodeName} ${node.id || node.dataset?.key || ""}`;

/** An open table stays open; what the chart library draws, and which of two pictures is seen, is its own affair. */
function update(mine, fresh) {
  const drawn = mine.matches("div.live, svg.still");
  for (const { name, value } of fresh.attributes) {
    if (!(drawn && name === "class") && mine.getAttribute(name) !== value) mine.setAttribute(name, value);
  }
  if (mine.matches("div.live")) return;
  for (const name of mine.getAttributeNames()) if (name !== "open" && !fresh.hasAttribute(name)) mine.removeAttribute(name);
  updateChildren(mine, fresh);
}

byId("rank").addEventListener("change", draw);
byId("token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("secret").value.trim();
  sessionStorage.setItem("token", token);
  byId("secret").value = "";
  ask();
});
document.addEventListener("visibilitychange", () => document.hidden || ask());
ask();
