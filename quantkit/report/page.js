"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const fileNames = JSON.parse(document.getElementById("file-names").textContent);

  // Labels beside points where they overlap neither points nor each other: Vega's label transform, which Vega-Lite lacks.
  const withLabels = (spec) => {
    const all = (marks) => marks.flatMap((mark) => [mark, ...all(mark.marks || [])]);
    const marks = all(spec.marks);
    const mark = marks.find((candidate) => candidate.name === "names_marks");
    const avoided = ["points_marks", "bars_marks", "zero_marks"].filter((name) => marks.some((m) => m.name === name));
    const anchors = ["top-right", "right", "top", "bottom-right", "top-left", "bottom-left", "left", "bottom"];
    const distances = [5, 12, 20];
    mark.encode.update.align = { value: "center" };
    delete mark.encode.update.dx;
    delete mark.encode.update.dy;
    mark.transform = [{
      // Before a long page is laid out, its charts have no width yet.
      type: "label", size: { signal: "[max(width, 1), max(height, 1)]" }, avoidMarks: avoided,
      offset: distances.flatMap((distance) => anchors.map(() => distance)),
      anchor: distances.flatMap(() => anchors),
    }];
    return spec;
  };

  const draw = async (place, name, cells, labelledBy) => {
    const { spec, labels } = charts[name];
    await vegaEmbed(place, cells ? { ...spec, data: { values: cells } } : spec, {
      renderer: "svg", actions: false, ast: true, mode: "vega-lite", tooltip: { disableDefaultStyle: true },
      patch: labels ? withLabels : undefined,
    });
    const svg = place.querySelector("svg");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-labelledby", labelledBy);
    // The table has the numbers; a reader of the screen need not walk through every mark.
    for (const child of svg.children) child.setAttribute("aria-hidden", "true");
    place.removeAttribute("aria-roledescription");
    place.removeAttribute("aria-label");
    place.removeAttribute("role");
    if (labels) tellLeftOut(name, svg);
  };

  // Names of points for whose labels there is no room.
  const tellLeftOut = (name, svg) => {
    const texts = [...svg.querySelectorAll(".names_marks text, .mark-text.names_marks text")];
    const leftOut = texts.filter((t) => t.textContent && t.getAttribute("opacity") === "0").map((t) => t.textContent);
    const note = document.getElementById(`${name}-left-out`);
    note.hidden = leftOut.length === 0;
    note.textContent = `No room for ${leftOut.length} of ${texts.length} labels: ${leftOut.join(", ")}. Point at a mark to see its file.`;
  };

  // Maps of one file, or of all: each under the file's name.
  const drawMaps = async (name, files) => {
    const area = document.getElementById(name);
    const { cells } = charts[name];
    area.replaceChildren();
    for (const i of cells.length ? files : [null]) {
      const map = area.appendChild(document.createElement("div"));
      map.className = "map";
      let labelledBy = `${name}-caption`;
      if (i !== null) {
        const title = map.appendChild(document.createElement("p"));
        title.className = "file-name";
        title.id = `${name}-${i}-name`;
        title.textContent = fileNames[i];
        labelledBy += ` ${title.id}`;
      }
      const place = map.appendChild(document.createElement("div"));
      place.className = "chart";
      await draw(place, name, i === null ? null : cells[i], labelledBy);
    }
  };

  const chooser = document.getElementById("choose-file");
  const chosenFiles = () => {
    if (!chooser) return [0];
    return chooser.value === "all" ? fileNames.map((_, i) => i) : [Number(chooser.value)];
  };
  const isMap = (name) => document.getElementById(name).classList.contains("maps");
  const drawChosen = () =>
    Promise.all(Object.keys(charts).filter((name) => charts[name].cells.length).map((name) => drawMaps(name, chosenFiles())));

  const tellScrolling = () => {
    for (const hint of document.querySelectorAll(".hint")) {
      const area = hint.previousElementSibling;
      hint.hidden = area.scrollWidth <= area.clientWidth + 1;
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
  const drawAll = Object.keys(charts).map((name) =>
    isMap(name) ? drawMaps(name, chosenFiles()) : draw(document.getElementById(name), name, null, `${name}-caption`));
  const finished = (drawing) =>
    drawing.then(
      () => {
        tellScrolling();
        document.documentElement.dataset.drawn = "yes";
      },
      (error) => {
        document.documentElement.dataset.drawn = String(error);
        throw error;
      },
    );
  window.addEventListener("resize", tellScrolling);
  document.addEventListener("toggle", tellScrolling, true);
  finished(Promise.all(drawAll)).then(() => {
    if (!chooser) return;
    const choose = () => {
      document.documentElement.dataset.drawn = "no";
      finished(drawChosen());
    };
    chooser.addEventListener("change", choose);
    if (chooser.value !== "0") choose();
  });
})();
