"""Style and script of the page, both inside of it: nothing is loaded from anywhere."""

STYLE = """
:root {
  color-scheme: light dark;
  --surface: #ffffff; --page: #f6f7f9; --ink: #1f2329; --muted: #59636e; --grid: #e4e8ec; --line: #d3d9df;
  --front: #8a949e; --ours: #0072b2; --peer: #c04f00; --recipe: #00805d; --exact: #4d5661;
  --keys: #0072b2; --values: #e69f00; --low: #e69f00; --high: #0072b2; --good: #00704f; --bad: #b23c00;
}
@media (prefers-color-scheme: dark) {
  :root:not([data-theme="light"]) {
    --surface: #1b1f24; --page: #121518; --ink: #e8ebee; --muted: #a3adb8; --grid: #2c333a; --line: #3a434c;
    --front: #8b96a1; --ours: #5cb8f0; --peer: #f4934d; --recipe: #2fc79a; --exact: #c3cbd3;
    --keys: #5cb8f0; --values: #e9ad2f; --low: #c98a0a; --high: #3a95d0; --good: #46d3a5; --bad: #ff9c66;
  }
}
:root[data-theme="dark"] {
  color-scheme: dark;
  --surface: #1b1f24; --page: #121518; --ink: #e8ebee; --muted: #a3adb8; --grid: #2c333a; --line: #3a434c;
  --front: #8b96a1; --ours: #5cb8f0; --peer: #f4934d; --recipe: #2fc79a; --exact: #c3cbd3;
  --keys: #5cb8f0; --values: #e9ad2f; --low: #c98a0a; --high: #3a95d0; --good: #46d3a5; --bad: #ff9c66;
}
:root[data-theme="light"] { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main, header, footer { max-width: 74rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 1.5rem; position: relative; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 7rem .3rem 0; }
h2 { font-size: 1.3rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1.05rem; margin: 0 0 .6rem; }
h1, h2, h3, p, dd, code { overflow-wrap: anywhere; }
a { color: var(--ours); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .4rem 0; padding: 0; }
section.card { background: var(--surface); border: 1px solid var(--line); border-radius: 8px; padding: 1rem;
  margin: 0 0 1rem; min-width: 0; }
.card > * + * { margin-top: .9rem; }
.note, footer { color: var(--muted); font-size: .87rem; }
footer { padding-bottom: 3rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; font-size: .87rem; }
dt { color: var(--muted); } dd { margin: 0; min-width: 0; }
code { font: .92em ui-monospace, Menlo, Consolas, monospace; }
figure { margin: 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 38rem; max-width: 60rem; height: auto; margin: 0 auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; max-width: 100%; }
.scroll:focus-visible, button:focus-visible, summary:focus-visible { outline: 2px solid var(--ours); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; position: sticky; left: 0; }
th, td { padding: .3rem .65rem; border-bottom: 1px solid var(--grid); text-align: left; white-space: nowrap; }
thead th { vertical-align: bottom; white-space: normal; min-width: 5.5rem; border-bottom: 2px solid var(--line);
  font-weight: 600; }
tbody th { font-weight: 400; position: sticky; left: 0; background: var(--surface); z-index: 1; }
thead th:first-child { position: sticky; left: 0; background: var(--surface); z-index: 2; }
td.wrap { white-space: normal; min-width: 16rem; }
td.number, td.none, td.score, th.number { text-align: right; }
td.none { color: var(--muted); }
.interval, .difference { color: var(--muted); font-size: .92em; }
.difference { display: inline-block; min-width: 4.6em; margin-left: .4em; text-align: right; }
.pass strong { color: var(--good); } .fail strong { color: var(--bad); }
tbody tr:hover > * { background: color-mix(in srgb, var(--ours) 9%, var(--surface)); }
th button { all: unset; cursor: pointer; font: inherit; display: inline-block; }
th button:focus-visible { outline: 2px solid var(--ours); outline-offset: 2px; }
th button::after { content: " \\2195"; color: var(--muted); font-weight: 400; }
th[aria-sort="ascending"] button::after { content: " \\2191"; color: var(--ink); }
th[aria-sort="descending"] button::after { content: " \\2193"; color: var(--ink); }
.sign { display: inline-block; width: .65em; height: .65em; margin-right: .5em; background: var(--exact); }
.sign.ours { background: var(--ours); border-radius: 50%; }
.sign.peer { background: var(--peer); }
.sign.recipe { background: var(--recipe); transform: rotate(45deg) scale(.88); }
.sign.exact { clip-path: polygon(50% 0, 63% 35%, 100% 38%, 71% 60%, 81% 100%, 50% 78%, 19% 100%, 29% 60%, 0 38%, 37% 35%);
  transform: scale(1.3); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 0; }
.heat { display: flex; flex-wrap: wrap; gap: 1rem 1.6rem; }
.heat thead th { min-width: 3.5rem; text-align: right; } .heat thead th:first-child { text-align: left; }
.heat td.score { background: color-mix(in srgb, color-mix(in oklab, var(--high) calc(var(--part) * 100%), var(--low)) 42%,
  var(--surface)); border: 1px solid var(--surface); }
summary { cursor: pointer; color: var(--muted); font-size: .87rem; }
details > .scroll, details > dl { margin-top: .6rem; }
#theme { position: absolute; right: 1rem; top: 1.5rem; padding: .35rem .8rem; font: inherit; font-size: .85rem;
  color: var(--ink); background: var(--surface); border: 1px solid var(--line); border-radius: 6px; cursor: pointer; }
#theme[hidden] { display: none; }
@media (max-width: 36rem) {
  main, header, footer { padding-left: .6rem; padding-right: .6rem; }
  section.card { padding: .7rem; } #theme { right: .6rem; }
  tbody th { min-width: 9rem; max-width: 11rem; white-space: normal; }
  .heat tbody th { min-width: 0; }
}
@media print { #theme { display: none; } .scroll, figure { overflow: visible; } }
"""

SCRIPT = """
"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { button.textContent = dark() ? "Light colours" : "Dark colours"; };
  try {
    const kept = localStorage.getItem("kv_hf-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch (error) { /* a page from a file may have no storage */ }
  button.hidden = false;
  name();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
    try { localStorage.setItem("kv_hf-theme", root.dataset.theme); } catch (error) { /* as above */ }
  });
  const key = (cell) => {
    const given = cell.dataset.value ?? cell.dataset.derived ?? cell.dataset.sort;
    const text = given ?? cell.textContent.trim();
    if (given === undefined && cell.classList.contains("none")) return null;
    const number = Number(text);
    return text !== "" && !Number.isNaN(number) ? number : text;
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), undefined, { numeric: true });
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const inner = document.createElement("button");
      inner.type = "button";
      inner.append(...head.childNodes);
      head.append(inner);
      inner.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const lines = [...table.tBodies[0].rows].map((line) => [key(line.cells[column]), line]);
        lines.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null)
          : down ? compare(b, a) : compare(a, b));
        table.tBodies[0].append(...lines.map(([, line]) => line));
      });
    });
  }
})();
"""
