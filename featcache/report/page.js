"use strict";
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const cell = row.cells[column];
    return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  heads.forEach((head, column) => {
    const first = body.rows[0];
    if (first && "v" in first.cells[column].dataset) head.className = "n";
    head.firstChild.addEventListener("click", () => {
      const wasDown = head.getAttribute("aria-sort") === "descending";
      const isNumber = head.className === "n";
      const up = head.hasAttribute("aria-sort") ? wasDown : !isNumber;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].sort((a, b) => compare(key(a, column), key(b, column)) * (up ? 1 : -1));
      body.append(...rows);
    });
  });
  const filter = table.closest(".table").querySelector("input");
  if (filter) filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
