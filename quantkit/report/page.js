"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const views = {};

  // Labels beside points where they overlap neither points nor each other: Vega's label transform, which Vega-Lite lacks.
  const withLabels = (spec) => {
    const names = (found) => found.flatMap((mark) => [mark, ...names(mark.marks || [])]);
    const mark = names(spec.marks).find((each) => each.name === "names_marks");
    mark.encode.update.align = { value: "center" };
    delete mark.encode.update.dx;
    delete mark.encode.update.dy;
    mark.transform = [{
      // Before a long page is laid out, its charts have no width yet.
      type: "label", size: { signal: "[max(width, 1), max(height, 1)]" }, avoidMarks: ["points_marks", "bars_marks"],
      offset: [5, 5, 5, 5, 12, 12],
      anchor: ["top-right", "right", "top", "bottom-right", "top-left", "bottom-left", "left", "bottom"],
    }];
    return spec;
  };

  const draw = async (name) => {
    const { spec, labels } = charts[name];
    const place = document.getElementById(name);
    const result = await vegaEmbed(place, spec, {
      renderer: "svg", actions: false, ast: true, mode: "vega-lite", tooltip: { disableDefaultStyle: true },
      patch: labels ? withLabels : undefined,
    });
    views[name] = result.view;
    const svg = place.querySelector("svg");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-labelledby", `${name}-caption`);
    // The table has the numbers; a reader of the screen need not walk through every mark.
    for (const child of svg.children) child.setAttribute("aria-hidden", "true");
    place.removeAttribute("aria-roledescription");
    place.removeAttribute("aria-label");
    place.removeAttribute("role");
  };

  const chooser = document.getElementById("choose-file");
  const choose = () => {
    for (const [name, view] of Object.entries(views)) {
      if (charts[name].byFile) view.signal("file", Number(chooser.value)).runAsync();
    }
  };

  const sort = (table, column) => {
    const heads = [...table.tHead.rows[0].cells];
    const down = heads[column].getAttribute("aria-sort") === "ascending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
    };
    const compare = (a, b) =>
      typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
    rows.sort((a, b) => (down ? compare(b[0], a[0]) : compare(a[0], b[0])));
    table.tBodies[0].append(...rows.map((row) => row[1]));
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, i) => {
      head.querySelector("button").addEventListener("click", () => sort(table, i));
    });
  }
  Promise.all(Object.keys(charts).map(draw)).then(
    () => {
      if (chooser) {
        chooser.addEventListener("change", choose);
        choose();
      }
      document.documentElement.dataset.drawn = "yes";
    },
    (error) => {
      document.documentElement.dataset.drawn = String(error);
      throw error;
    },
  );
})();
