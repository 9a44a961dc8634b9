// The audit log: who did what, filtered and read page by page.
import { $, Pages, moment, node, row } from "./parts.js";

const NAMES = ["tenant", "action", "since", "until"];

export function auditPage({ remember }) {
  const form = $("audit-filter");
  const asked = () => Object.fromEntries(NAMES.map((name) => [name, form.elements[name].value.trim()]));
  const second = (text) => (text ? Date.parse(`${text}Z`) / 1000 : "");

  const lines = new Pages({
    body: $("audit"), more: $("more-audit"), columns: 8,
    empty: () => (Object.values(asked()).some(Boolean) ? "Nothing that fits." : "Nothing was done yet that is told here."),
    path: { route: "/admin/v1/audit", query: () => ({ limit: 50, ...asked(), since: second(asked().since), until: second(asked().until) }) },
    line: (l) => {
      const details = Object.entries(l.details).map(([name, value]) => `${name} ${value ?? "–"}`).join(", ");
      const outcome = node("td", l.outcome, l.outcome === "done" ? "" : "warn");
      return row([node("td", moment(l.at)), node("td", l.tenant ?? "–"), node("td", l.who), node("td", l.action), node("td", l.target, "id"), outcome, node("td", details), node("td", l.request_id ?? "–", "id")]);
    },
  });

  form.addEventListener("submit", (submitted) => {
    submitted.preventDefault();
    remember(asked());
    lines.load();
  });

  return (query) => {
    for (const name of NAMES) form.elements[name].value = query.get(name) ?? "";
    lines.load();
  };
}
