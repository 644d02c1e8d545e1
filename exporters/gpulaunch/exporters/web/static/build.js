// Elements made of text that may hold anything: everything goes through textContent, nothing is ever parsed as HTML.
// What is there already is changed in place, so that focus, selection and the place of a screen reader stay.

import { inert } from "./format.js";

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, String(value));
  }
  made.append(...children.map((child) => (child instanceof Node ? child : inert(child))));
  return made;
}

export function setText(node, text) {
  const shown = inert(text);
  if (node.textContent !== shown) node.textContent = shown;
}

/** The child of a section with this key, made when it is asked for first. Children stand in the order of their making. */
export function part(section, key, make) {
  let found = section.querySelector(`:scope > [data-part="${key}"]`);
  if (!found) {
    found = make();
    found.dataset.part = key;
    section.append(found);
  }
  return found;
}

/** Show a sentence in a section; "" takes it away. */
export function say(section, key, text, kind = "quiet") {
  const line = part(section, key, () => element("p", { class: kind }));
  setText(line, text);
  line.hidden = !text;
}

/** Names with values. */
export function tiles(section, key, pairs) {
  const list = part(section, key, () => element("dl", { class: "tiles" }));
  while (list.children.length > pairs.length) list.lastElementChild.remove();
  pairs.forEach(([name, value], at) => {
    const pair = list.children[at] ?? list.appendChild(element("div", {}, element("dt"), element("dd")));
    setText(pair.firstElementChild, name);
    setText(pair.lastElementChild, value);
  });
}

/**
 * A table. `columns`: [title, kind] with kind "number", "time", "path", "prose" or "text"; the first one names the row. `rows`: texts.
 * Without rows there is none.
 */
export function table(section, key, caption, columns, rows) {
  const frame = part(section, key, () =>
    element("div", { class: "scroll", tabindex: "0", role: "group" }, element("table", {}, element("caption"), element("thead", {}, element("tr")), element("tbody"))),
  );
  frame.hidden = rows.length === 0;
  frame.setAttribute("aria-label", inert(caption));
  fill(frame.firstElementChild, caption, columns, rows);
}

export function fill(whole, caption, columns, rows) {
  setText(whole.caption, caption);
  const head = whole.tHead.rows[0];
  while (head.children.length > columns.length) head.lastElementChild.remove();
  columns.forEach(([title, kind], at) => {
    const cell = head.children[at] ?? head.appendChild(element("th", { scope: "col" }));
    cell.className = kind === "number" ? "number" : "";
    setText(cell, title);
  });
  const body = whole.tBodies[0];
  while (body.rows.length > rows.length) body.lastElementChild.remove();
  rows.forEach((texts, at) => {
    const row = body.rows[at] ?? body.appendChild(element("tr"));
    while (row.children.length > columns.length) row.lastElementChild.remove();
    columns.forEach(([, kind], column) => {
      const cell = row.children[column] ?? row.appendChild(column ? element("td") : element("th", { scope: "row" }));
      cell.className = kind === "text" ? "" : kind;
      setText(cell, texts[column] ?? "");
    });
  });
}
