// The dashboard: one stream of snapshots, rendered as text nodes only, and the pages beside it. The key stays in this tab.
import { auditPage } from "./audit.js";
import { keysPage } from "./keys.js";
import { $, ago, headers, heldKey, holdKey, node, number, orElse, row } from "./parts.js";

let live = new AbortController(); // of the stream that is followed
let graceS = 21_600; // until a snapshot tells what is set
const pages = {
  now: () => {},
  tenants: keysPage({ graceHours: () => graceS / 3600, remember }),
  audit: auditPage({ remember }),
};

function bar(used, of, label) {
  const made = node("progress");
  made.max = of;
  made.value = used;
  made.setAttribute("aria-label", label);
  return made;
}

function counts(c) {
  const failed = c.turns.failed ?? 0;
  const shown = [["sessions", c.sessions], ["running", c.running], ["turns answered", c.turns.completed ?? 0], ["failed", failed], ["tenants", c.tenants]];
  return shown.map(([name, value]) => {
    const pair = node("div");
    pair.append(node("dt", name), node("dd", number(value), name === "failed" && failed ? "bad" : ""));
    return pair;
  });
}

const STATES = { ready: "answers", trial: "answers; one turn at a time until one succeeds", resting: "rests after failed turns", down: "does not answer", connecting: "has not answered yet", draining: "is drained", drained: "drained: takes no turns" };

function replica(r) {
  const card = node("article", null, "card");
  card.append(node("h3", r.fallback ? `${r.name} (fallback)` : r.name));
  const well = r.state === "ready" || r.state === "trial";
  const why = well || r.draining || !r.last_error ? "" : `: ${r.last_error}`;
  card.append(node("p", `${STATES[r.state] ?? r.state}${why}`, well ? "good" : r.draining ? "warn" : "bad"));
  if (r.draining) {
    const d = r.draining;
    const parts = [`${number(d.moved)} sessions moved`, `${number(d.sessions_left)} left`, `${number(d.running)} turns running`];
    if (d.failed) parts.push(`${number(d.failed)} not moved`);
    card.append(node("p", `${d.reason ? `${d.reason}: ` : ""}${parts.join(" · ")}`));
  }
  const models = r.models.map((m) => (r.fingerprints[m] ? `${m} (${r.fingerprints[m].slice(0, 12)})` : m));
  card.append(node("p", `${r.kind ?? "?"} · ${models.join(", ") || "no model"} · window ${number(r.window)}`, "quiet"));
  const places = r.max_in_flight === null ? "" : ` of ${number(r.max_in_flight)}`;
  card.append(node("p", `${number(r.in_flight)}${places} turns from here, ${number(r.queued)} in line · ${number(r.running)} running there, ${number(r.waiting)} waiting`));
  if (r.kv_blocks_total) {
    const busy = (r.kv_blocks_used ?? 0) + (r.kv_blocks_cached ?? 0);
    const line = node("p");
    const text = ` ${number(r.kv_blocks_used)} used, ${number(r.kv_blocks_cached)} cached of ${number(r.kv_blocks_total)} KV blocks`;
    line.append(bar(busy, r.kv_blocks_total, "KV blocks in use or cached"), text);
    card.append(line);
  } else if (r.kv_used_ratio !== null) {
    card.append(node("p", `KV ${Math.round(r.kv_used_ratio * 100)}% used`));
  }
  const c = r.cache;
  const right = c.right_share === null ? "no prediction judged yet" : `${Math.round(c.right_share * 100)}% of ${number(c.predictions)} predictions right`;
  const feed = `feed ${c.feed.state}${c.feed.problem ? `: ${c.feed.problem}` : ""}`;
  card.append(node("p", `cache: ${c.trust} · ${number(c.resident_tokens)} tokens believed resident · ${right} · ${feed}`, c.trust === "degraded" || c.feed.problem ? "warn" : "quiet"));
  for (const [model, why] of Object.entries(r.why_chat)) card.append(node("p", `${model} goes by chat messages: ${why}`, "quiet"));
  if (r.unseen.length) card.append(node("p", `cannot see: ${r.unseen.join(", ")}`, "quiet"));
  return card;
}

function session(s, now, trigger) {
  const use = node("td");
  if (s.window) {
    const share = s.tokens / s.window;
    if (share > trigger) use.className = "past";
    use.append(bar(s.tokens, s.window, "share of the window"), ` ${number(s.tokens)} of ${number(s.window)} (${Math.round(share * 100)}%)`);
  } else {
    use.textContent = `${number(s.tokens)} tokens`;
  }
  return row([node("td", s.id, "id"), node("td", s.tenant), node("td", number(s.turns), "n"), use, node("td", s.pin ?? "–"), node("td", s.status), node("td", ago(now, s.at))]);
}

function turn(t, now) {
  const state = node("td", t.error ? `${t.status}: ${t.error}` : t.status, t.status === "failed" ? "bad" : "");
  const n = (value) => node("td", number(value), "n");
  const seconds = t.duration_s === null ? "–" : t.duration_s.toFixed(2);
  return row([
    node("td", ago(now, t.created_at)), node("td", t.session, "id"), n(t.seq), state, n(t.prompt_tokens), n(t.cached_tokens), n(t.output_tokens),
    node("td", seconds, "n"), node("td", t.replica ?? "–"), node("td", t.reason ?? "–"), node("td", t.prefix_cause ?? "kept"),
  ]);
}

function show(s) {
  graceS = s.key_grace_s;
  $("counts").replaceChildren(...counts(s.counts));
  $("replicas").replaceChildren(...(s.replicas.length ? s.replicas.map(replica) : [node("p", "No replica yet.", "quiet")]));
  const sessions = s.sessions.map((x) => session(x, s.at, s.trigger_ratio));
  $("sessions").replaceChildren(...orElse(sessions, 7, "No session yet. Send a first message: the README has the line."));
  $("turns").replaceChildren(...orElse(s.turns.map((x) => turn(x, s.at)), 11, "No turn yet."));
  $("state").textContent = "live";
}

function ask(why) {
  live.abort();
  holdKey("");
  $("dialog").close();
  $("pages").hidden = true;
  $("view").hidden = true;
  $("login").hidden = false;
  $("refused").textContent = why;
  $("state").textContent = "";
  $("key").focus();
}

function take(text) {
  let kind = "message";
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) {
      const told = JSON.parse(line.slice(6));
      if (kind === "snapshot") show(told);
      else $("state").textContent = told.message;
    }
  }
}

async function follow() {
  const key = heldKey();
  live = new AbortController();
  const answer = await fetch("/admin/v1/live", { headers: headers(), signal: live.signal });
  if (answer.status === 401 || answer.status === 403) return ask(key ? (await answer.json()).error.message : "");
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  if ($("view").hidden) opened();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the stream ended");
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    parts.forEach(take);
  }
}

async function keepFollowing() {
  for (;;) {
    try {
      await follow();
      return;
    } catch (error) {
      if (!live.signal.aborted) $("state").textContent = `not live (${error.message}); trying again`;
      await new Promise((done) => setTimeout(done, live.signal.aborted ? 0 : 1500));
      if (live.signal.aborted) return;
    }
  }
}

function opened() {
  $("login").hidden = true;
  $("view").hidden = false;
  $("pages").hidden = false;
  turnTo();
}

// The page and its filters stand behind the # of the address: #tenants?tenant=acme
function place() {
  const [name, query] = location.hash.slice(1).split("?");
  return [name in pages ? name : "now", new URLSearchParams(query)];
}

function remember(query) {
  const said = new URLSearchParams(Object.entries(query).filter(([, value]) => value));
  const [name] = place();
  history.replaceState(null, "", `#${name}${said.size ? `?${said}` : ""}`);
}

function turnTo() {
  const [name, query] = place();
  for (const each of Object.keys(pages)) $(`page-${each}`).hidden = each !== name;
  for (const link of $("pages").children) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  pages[name](query);
}

$("login").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  holdKey($("key").value.trim());
  keepFollowing();
});
addEventListener("keyrefused", (refused) => ask(refused.detail));
addEventListener("hashchange", () => $("view").hidden || turnTo());
keepFollowing();
