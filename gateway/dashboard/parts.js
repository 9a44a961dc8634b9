// What the pages share: nodes made of text only, calls that carry the key in a header, and one dialog that asks first.
export const $ = (id) => document.getElementById(id);
const KEY = "turnkeep.key";

// The key stays in this tab: no cookie is ever set, so no other page can act with it.
export const heldKey = () => sessionStorage.getItem(KEY) ?? "";
export const holdKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const headers = () => (heldKey() ? { authorization: `Bearer ${heldKey()}` } : {});

export function node(tag, text, cls) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (cls) made.className = cls;
  return made;
}

export const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));

export function ago(now, at) {
  const s = Math.max(0, Math.round(now - at));
  return s < 60 ? `${s} s ago` : s < 3600 ? `${Math.floor(s / 60)} min ago` : `${Math.floor(s / 3600)} h ago`;
}

export const moment = (at) => (at === null ? "–" : `${new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ")}`);

export function row(cells) {
  const made = node("tr");
  made.append(...cells);
  return made;
}

export function orElse(rows, columns, text, cls = "quiet") {
  if (rows.length) return rows;
  const cell = node("td", text, cls);
  cell.colSpan = columns;
  return [row([cell])];
}

export class Refused extends Error {
  constructor(status, error) {
    super(error.request_id ? `${error.message} (request ${error.request_id})` : error.message);
    this.status = status;
    this.code = error.code;
  }
}

export async function call(method, path, body) {
  const sent = { method, headers: headers() };
  if (body !== undefined) {
    sent.headers["content-type"] = "application/json";
    sent.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path, sent);
  } catch (error) {
    throw new Refused(0, { message: `the gateway does not answer (${error.message})` });
  }
  const told = await answer.json().catch(() => ({}));
  const error = told.error ?? { message: `status ${answer.status}` };
  if (answer.status === 401) dispatchEvent(new CustomEvent("keyrefused", { detail: error.message }));
  if (!answer.ok) throw new Refused(answer.status, error);
  return told;
}

// A table that is read page by page. It says that it loads, that there is nothing, or what went wrong.
export class Pages {
  constructor({ body, more, columns, empty, path, line }) {
    Object.assign(this, { body, more, columns, empty, path, line, turn: 0 });
    more.addEventListener("click", () => this.read(this.next));
  }

  load() {
    this.body.replaceChildren(...orElse([], this.columns, "Loading…"));
    return this.read(null);
  }

  async read(cursor) {
    const turn = ++this.turn; // a later reading goes before this one
    this.more.hidden = true;
    const query = new URLSearchParams(Object.entries(this.path.query()).filter(([, value]) => value !== ""));
    if (cursor) query.set("cursor", cursor);
    try {
      const page = await call("GET", `${this.path.route}?${query}`);
      if (turn !== this.turn) return;
      const rows = page.data.map(this.line);
      if (cursor) this.body.append(...rows);
      else this.body.replaceChildren(...orElse(rows, this.columns, this.empty()));
      this.next = page.next_cursor;
      this.more.hidden = !page.has_more;
    } catch (error) {
      if (turn !== this.turn) return;
      const [told] = orElse([], this.columns, `${error.message} `, "bad");
      const again = node("button", "Try again");
      again.addEventListener("click", () => (cursor ? (told.remove(), this.read(cursor)) : this.load()));
      told.firstChild.append(again);
      if (cursor) this.body.append(told);
      else this.body.replaceChildren(told);
    }
  }
}

export function field(label, input, hint) {
  const made = node("label", `${label} `);
  made.append(input);
  if (hint) made.append(node("small", hint, "quiet"));
  return made;
}

// Asks first: `lines` say what is touched, `act` does it and may return what is shown in its place. What is refused is
// said there, and where only force would help, a box for it appears.
export function ask({ title, lines, fields = [], verb, act, force }) {
  const dialog = $("dialog");
  const form = node("form");
  const said = node("p", null, "bad");
  said.setAttribute("role", "alert");
  const even = node("input");
  even.type = "checkbox";
  even.name = "force";
  const forced = field("", even);
  forced.append(` ${force ?? ""}`);
  forced.hidden = true;
  const go = node("button", verb);
  const leave = node("button", "Cancel");
  leave.type = "button";
  leave.autofocus = !fields.length; // Enter, pressed once too often, does nothing
  leave.addEventListener("click", () => dialog.close());
  const buttons = node("p", null, "line");
  buttons.append(go, leave);
  form.append(heading(title), ...lines.map((line) => node("p", line)), ...fields, forced, said, buttons);
  form.addEventListener("submit", async (submitted) => {
    submitted.preventDefault();
    go.disabled = true;
    said.textContent = "";
    try {
      const shown = await act(new FormData(form));
      if (shown) dialog.replaceChildren(...shown);
      else dialog.close();
    } catch (error) {
      said.textContent = error.message;
      forced.hidden = !(force && error.code === "last_admin_key");
    } finally {
      go.disabled = false;
    }
  });
  dialog.replaceChildren(form);
  dialog.showModal();
}

function heading(title) {
  const made = node("h2", title);
  made.id = "dialog-title";
  return made;
}

// A key, this once: it goes only when somebody says so, not by Escape.
export function keyShown(title, key, lines) {
  const dialog = $("dialog");
  const shown = node("input");
  shown.readOnly = true;
  shown.value = key;
  shown.size = 48;
  const copy = node("button", "Copy");
  const state = node("span", null, "quiet");
  state.setAttribute("role", "status");
  copy.addEventListener("click", async () => {
    shown.select();
    try {
      await navigator.clipboard.writeText(key);
      state.textContent = "copied";
    } catch {
      state.textContent = "selected: copy it with the keyboard"; // without https there is no clipboard
    }
  });
  const stay = (event) => event.preventDefault();
  dialog.addEventListener("cancel", stay);
  const done = node("button", "I have kept it");
  done.addEventListener("click", () => dialog.close());
  const gone = () => {
    dialog.removeEventListener("cancel", stay);
    if (!dialog.open) dialog.replaceChildren(); // open: another one came before this was heard
  };
  dialog.addEventListener("close", gone, { once: true });
  const line = node("p", null, "line");
  line.append(copy, done, state);
  return [heading(title), ...lines.map((each) => node("p", each)), field("API key", shown), line];
}
