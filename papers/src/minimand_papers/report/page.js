"use strict";
// A click on a column's head sorts its table; a second click turns the order round.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        return cell.dataset.order === undefined ? cell.textContent : Number(cell.dataset.order.replace("inf", "Infinity"));
      };
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        const order = typeof x === "number" ? (x === y ? 0 : x - y) : x.localeCompare(y);
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}
