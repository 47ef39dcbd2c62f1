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
