// Tenants and API keys: listed page by page; made, rotated and revoked after a dialog that says what is touched.
import { $, Pages, ago, ask, call, field, heldKey, holdKey, keyShown, moment, node, row } from "./parts.js";

const SCOPES = { chat: "chat, responses and messages", sessions: "sessions and conversations", read: "reading, and nothing else", admin: "everything" };
const STATES = { active: "works", ending: "works until", expired: "ended", revoked: "revoked" };
const COLOURS = { active: "good", ending: "warn" };
const DAY_S = 86_400;
const seconds = () => Date.now() / 1000;

export function keysPage({ graceHours, remember }) {
  const of = $("of-tenant");

  const tenants = new Pages({
    body: $("tenants"), more: $("more-tenants"), columns: 4, empty: () => "No tenant yet.",
    path: { route: "/admin/v1/tenants", query: () => ({ limit: 100 }) },
    line: (t) => {
      const known = [...of.options].some((option) => option.value === t.id);
      if (!known) of.append(option(t.id, t.id));
      return row([node("td", t.id, "id"), node("td", t.name), node("td", moment(t.created_at)), node("td", t.working_keys, "n")]);
    },
  });

  const keys = new Pages({
    body: $("keys"), more: $("more-keys"), columns: 8,
    empty: () => (of.value ? `Tenant ${of.value} has no key yet: "New key" makes one.` : 'No key yet: "New key" makes one.'),
    path: { route: "/admin/v1/keys", query: () => ({ limit: 50, tenant: of.value }) },
    line: keyLine,
  });

  function keyLine(k) {
    const state = node("td", k.state === "ending" ? `${STATES.ending} ${moment(k.expires_at)}` : STATES[k.state], `says ${COLOURS[k.state] ?? "quiet"}`);
    if (k.replaced_by) state.append(node("small", ` replaced by ${k.replaced_by}`, "quiet"));
    if (k.replaces) state.append(node("small", ` in the place of ${k.replaces}`, "quiet"));
    if (isMine(k)) state.append(node("small", " this page's", "quiet"));
    const does = node("td");
    if (k.state === "active") does.append(button("Rotate", `Rotate ${k.id}`, () => rotate(k)));
    if (k.state === "active" || k.state === "ending") does.append(" ", button("Revoke", `Revoke ${k.id}`, () => revoke(k)));
    const used = k.last_used_at === null ? "never" : ago(seconds(), k.last_used_at);
    return row([node("td", `${k.id}…`, "id"), node("td", k.tenant), node("td", k.name, "id"), node("td", k.scopes.join(" ")), state, node("td", used), node("td", moment(k.expires_at)), does]);
  }

  const isMine = (k) => heldKey().startsWith(k.id);
  const named = (k) => `${k.id}…, "${k.name}" of tenant ${k.tenant}`;
  const used = (k) => (k.last_used_at === null ? "It was never used." : `It was used last ${ago(seconds(), k.last_used_at)}.`);

  function rotate(k) {
    const hours = input("number", "hours", { min: 0, max: 720, step: "any", required: true, value: String(graceHours()) });
    const mine = isMine(k) ? ["This page uses it, and goes on with the new one."] : [];
    ask({
      title: "Rotate a key", verb: "Rotate", force: "Even so: it is the last admin key that works",
      lines: [`Makes a new key in the place of ${named(k)}, with its scopes (${k.scopes.join(", ")}) and its end.`, used(k), ...mine],
      fields: [field("Hours that the old key works on", hours, "0 ends it at once")],
      act: async (said) => {
        const body = { grace_s: Number(said.get("hours")) * 3600, force: said.has("force") };
        const made = await call("POST", `/admin/v1/keys/${k.id}/rotate`, body);
        if (isMine(k)) holdKey(made.key);
        reload();
        const end = `${k.id}… ${made.old.state === "ending" ? "works until" : "ended"} ${moment(made.old.expires_at)} UTC.`;
        return keyShown("The new key, shown this once", made.key, [`For ${named(made)}. ${end}`]);
      },
    });
  }

  function revoke(k) {
    const mine = isMine(k) ? ["This page uses it: it will ask you for another one."] : [];
    ask({
      title: "Revoke a key", verb: "Revoke", force: "Even so: nobody can use the admin API then, until the command makes a key",
      lines: [`Ends ${named(k)}, for good. Whoever uses it is refused, within two seconds at every gateway.`, used(k), ...mine],
      act: async (said) => {
        await call("POST", `/admin/v1/keys/${k.id}/revoke`, { force: said.has("force") });
        reload();
      },
    });
  }

  function create() {
    const whose = node("select");
    whose.name = "tenant";
    whose.append(...[...of.options].filter((each) => each.value).map((each) => option(each.value, each.value)));
    whose.value = of.value || "default";
    const boxes = node("fieldset");
    boxes.append(node("legend", "It may do"));
    for (const [scope, what] of Object.entries(SCOPES)) {
      const box = input("checkbox", "scope", { value: scope, checked: scope === "chat" || scope === "sessions" });
      const label = node("label");
      label.append(box, ` ${scope}: ${what}`);
      boxes.append(label);
    }
    ask({
      title: "New key", verb: "Make key",
      lines: ["Whoever has the key acts for its tenant. It is shown once."],
      fields: [field("Tenant", whose), field("What it is for", input("text", "name", { maxLength: 128, required: true })), boxes, field("Ends after days", input("number", "days", { min: 0.01, max: 3650, step: "any" }), "empty: never")],
      act: async (said) => {
        const body = { tenant: said.get("tenant"), name: said.get("name"), scopes: said.getAll("scope") };
        if (said.get("days")) body.ttl_seconds = Number(said.get("days")) * DAY_S;
        const made = await call("POST", "/admin/v1/keys", body);
        reload();
        return keyShown("The new key, shown this once", made.key, [`For ${named(made)}: ${made.scopes.join(", ")}.`]);
      },
    });
  }

  function reload() {
    keys.load();
    tenants.load();
  }

  $("new-key").addEventListener("click", create);
  $("new-tenant").addEventListener("submit", async (submitted) => {
    submitted.preventDefault();
    const form = submitted.target;
    const said = $("tenants-said");
    const [id, name] = [form.elements.id.value.trim(), form.elements.name.value.trim()];
    try {
      await call("POST", "/admin/v1/tenants", name ? { id, name } : { id });
      said.className = "good";
      said.textContent = `Tenant ${id} is made; it has no key yet.`;
      form.reset();
      tenants.load();
    } catch (error) {
      said.className = "bad";
      said.textContent = error.message;
    }
  });
  of.addEventListener("change", () => {
    remember({ tenant: of.value });
    keys.load();
  });

  return (query) => {
    const wanted = query.get("tenant") ?? "";
    if (wanted && ![...of.options].some((each) => each.value === wanted)) of.append(option(wanted, wanted));
    of.value = wanted;
    reload();
  };
}

function option(value, text) {
  const made = node("option", text);
  made.value = value;
  return made;
}

function input(type, name, more = {}) {
  return Object.assign(node("input"), { type, name, ...more });
}

function button(text, label, press) {
  const made = node("button", text);
  made.setAttribute("aria-label", label);
  made.addEventListener("click", press);
  return made;
}
