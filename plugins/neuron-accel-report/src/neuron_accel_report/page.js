// SPDX-License-Identifier: Apache-2.0
// Draws the charts of a run report: lines of several runs, stacked areas, and a map of ranks by step. Each figure has the
// number of its chart; charts are drawn as wide as the figure is, and again when that changes. Values are shown for the
// step under the pointer, or the one that the arrow keys lead to. Text from files is only ever set as text.
"use strict";
(() => {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = 9, LEFT = 66, RIGHT = 14, TOP = 10, BOTTOM = 36;
  const DASHES = ["", "7 4", "2 3", "9 3 2 3", "12 4", "4 2"];
  const hidden = new Set();
  const drawn = [];

  function add(parent, name, attributes = {}, text = null) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    parent.appendChild(element);
    return element;
  }

  function html(parent, name, className, text = null) {
    const element = document.createElement(name);
    element.className = className;
    if (text !== null) element.textContent = text;
    parent.appendChild(element);
    return element;
  }

  // ---- numbers ----
  function short(value, digits = 4) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e15)) return Number(value.toPrecision(3)).toExponential();
    for (const [limit, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]])
      if (size >= limit) return Number((value / limit * (unit === " k" ? 10 : 1)).toPrecision(digits)) + unit;
    return String(Number(value.toPrecision(digits)));
  }

  function format(value, unit, digits = 4) {
    if (unit === "s") return Math.abs(value) >= 1 ? `${Number(value.toPrecision(digits))} s`
      : `${Number((value * 1e3).toPrecision(digits))} ms`;
    if (unit === "B") {
      for (const [power, name] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]])
        if (Math.abs(value) >= 2 ** power) return `${Number((value / 2 ** power).toPrecision(digits))} ${name}`;
      return `${Math.round(value)} B`;
    }
    if (unit === "%") return `${Number((value * 100).toPrecision(digits))} %`;
    return short(value, digits);
  }

  function colourOf(run) {
    return `var(--c${run % COLOURS})`;
  }

  function stepOf(first, width) {
    return width > 1 ? `steps ${first} to ${first + width - 1}` : `step ${first}`;
  }

  function ticks(low, high, count, whole = false, base = 10) {
    const raw = (high - low) / Math.max(count, 1) || 1;
    const power = base ** Math.floor(Math.log(raw) / Math.log(base));
    const steps = base === 10 ? [1, 2, 5, 10] : base === 60 ? [1, 2, 5, 10, 15, 20, 30, 60] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
    let size = power * steps.find(step => step * power >= raw * 0.999);
    if (whole) size = Math.max(1, size);
    const found = [];
    for (let n = Math.ceil(low / size - 1e-9); n * size <= high + size * 1e-9; n++) found.push(n * size);
    return found;
  }

  // ---- what all charts share ----
  function frame(figure, height, label) {
    figure.querySelectorAll("svg, .tip").forEach(element => element.remove());
    const width = Math.max(figure.clientWidth, 240);
    const svg = add(figure, "svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": label });
    return { svg, width, tip: html(figure, "div", "tip") };
  }

  function along(value, by) {  // a place on the horizontal axis
    if (by !== "time") return `${short(value, 3)}${by === "step" ? "" : " tokens"}`;
    const [size, unit] = value >= 36000 ? [3600, "h"] : value >= 600 ? [60, "min"] : [1, "s"];
    return `${short(value / size, 3)} ${unit}`;
  }

  function axes(svg, width, height, x, y, xRange, yTicks, unit, by = "step") {
    for (const tick of yTicks) {
      add(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick), class: "grid" });
      add(svg, "text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, format(tick, unit, 3));
    }
    for (const tick of ticks(xRange[0], xRange[1], (width - LEFT) / 90, by === "step", by === "time" ? 60 : 10)) {
      if (tick < xRange[0]) continue;
      const text = by === "step" ? String(Math.round(tick)) : along(tick, by).replace(" tokens", "");
      add(svg, "text", { x: x(tick), y: height - BOTTOM + 16, "text-anchor": "middle" }, text);
    }
    add(svg, "text", { x: width - RIGHT, y: height - 4, "text-anchor": "end", class: "quiet" }, by);
  }

  function scaleX(width, range) {
    const span = range[1] - range[0] || 1;
    return step => LEFT + (step - range[0]) / span * (width - LEFT - RIGHT);
  }

  function nearest(points, step) {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= step) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? low : high;
  }

  function place(tip, left, top, figure) {
    tip.style.display = "block";
    const room = figure.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(0, Math.min(left + 14, room))}px`;
    tip.style.top = `${Math.max(0, top)}px`;
  }

  function rowsOf(tip, head, rows) {
    tip.replaceChildren();
    html(tip, "strong", "", head);
    for (const [colour, text] of rows) {
      const row = html(tip, "div", "");
      if (colour !== null) html(row, "span", "swatch").style.background = colour;
      row.append(text);
    }
  }

  function highest(values) {  // what the scale shows: a few outliers, such as a compilation, do not flatten the rest
    const sorted = values.filter(value => value !== null).sort((a, b) => a - b);
    const most = sorted[sorted.length - 1], usual = sorted[Math.floor(sorted.length * 0.95)];
    return { most, shown: sorted.length >= 20 && most > 4 * usual && usual > 0 ? 1.5 * usual : most };
  }

  // ---- lines of runs ----
  function lines(figure, chart) {
    const by = figure.querySelector("select")?.value ?? "step", is = name => figure.querySelector(`[name=${name}]`)?.checked;
    const shown = chart.series.filter(series => !hidden.has(series.run) && series.points.length).map(series =>
      by === "step" ? series : { ...series, points: series.points.map((p, n) => [series.at[by][n], p[1], p[2], p[3], p[0]]) });
    const height = 230, { svg, width, tip } = frame(figure, height, chart.title);
    if (!shown.length) { add(svg, "text", { x: LEFT, y: 40 }, "nothing to show"); return null; }
    const log = is("log") && shown.every(series => series.points.every(p => p[2] > 0));
    const all = shown.flatMap(series => series.points);
    let low = all.reduce((found, p) => Math.min(found, p[2]), Infinity), cut = null;
    let high = all.reduce((found, p) => Math.max(found, p[3]), -Infinity);
    if (chart.cut && !log) {
      const { most, shown: limit } = highest(all.map(p => p[3]));
      if (limit < most) { high = limit; cut = most; }
    }
    if (chart.zero && !log) low = Math.min(0, low);
    if (high === low) { high += Math.abs(high) * 0.05 || 1; low -= chart.zero ? 0 : Math.abs(low) * 0.05; }
    const scale = log ? Math.log10 : value => value;
    const bottom = height - BOTTOM;
    const y = value => Math.max(TOP - 4, bottom - (scale(value) - scale(low)) / (scale(high) - scale(low)) * (bottom - TOP));
    const range = [Math.min(...shown.map(s => s.points[0][0])), Math.max(...shown.map(s => s.points[s.points.length - 1][0]))];
    const x = scaleX(width, range);
    const marks = log ? decades(low, high) : ticks(low, high, 5, false, chart.unit === "B" ? 1024 : 10);
    axes(svg, width, height, x, y, range, marks, chart.unit, by);
    const smooth = [];
    for (const series of shown) {
      const colour = colourOf(series.run), points = series.points;
      if (series.width > 1) {
        const up = points.map(p => `${x(p[0]).toFixed(1)},${y(p[3]).toFixed(1)}`);
        const down = points.map(p => `${x(p[0]).toFixed(1)},${y(p[2]).toFixed(1)}`).reverse();
        add(svg, "polygon", { points: [...up, ...down].join(" "), fill: colour, class: "band" });
      }
      const line = values => points.map((p, n) => `${x(p[0]).toFixed(1)},${y(values[n]).toFixed(1)}`).join(" ");
      add(svg, "polyline", {
        points: line(points.map(p => p[1])), class: is("smooth") ? "line raw" : "line",
        stroke: colour, "stroke-dasharray": DASHES[series.run % DASHES.length], "data-points": points.length,
      });
      if (is("smooth")) smooth.push({ points: line(smoothed(points)), class: "line", stroke: colour });
      if (points.length === 1)
        add(svg, "circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 3.5, fill: colour });
    }
    for (const line of smooth) add(svg, "polyline", line);  // on top of the others, of all runs
    if (cut !== null)
      add(svg, "text", { x: width - RIGHT, y: TOP + 10, "text-anchor": "end", class: "quiet" }, `cut off; the highest is ${format(cut, chart.unit)}`);
    const cross = add(svg, "line", { y1: TOP, y2: bottom, class: "cross", visibility: "hidden" });
    return {
      figure, tip, range, by, cross, toStep: left => range[0] + (left - LEFT) / (width - LEFT - RIGHT) * (range[1] - range[0]),
      x, points: shown[0].points,
      describe(step) {
        const first = shown[0].points[nearest(shown[0].points, step)];
        const head = stepOf(first[4] ?? first[0], shown[0].width);
        return [by === "step" ? head : `${head}, ${along(first[0], by)}`, shown.map(series => {
          const point = series.points[nearest(series.points, step)];
          const band = point[2] < point[3] ? ` (${format(point[2], chart.unit)} to ${format(point[3], chart.unit)})` : "";
          const name = runs.length > 1 ? `${runs[series.run]}: ` : "";
          const other = point[0] === first[0] ? "" : `, ${stepOf(point[4] ?? point[0], series.width)}`;
          return [colourOf(series.run), `${name}${format(point[1], chart.unit)}${band}${other}`];
        })];
      },
    };
  }

  function smoothed(points) {  // a mean in which each point counts for a tenth less than the next one
    let sum = 0, weight = 0;
    return points.map(p => {
      sum = 0.9 * sum + p[1]; weight = 0.9 * weight + 1;
      return sum / weight;
    });
  }

  function decades(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of high / low > 50 ? [1] : [1, 2, 3, 5])
        if (digit * 10 ** power >= low && digit * 10 ** power <= high) found.push(digit * 10 ** power);
    return found.length ? found : [low, high];
  }

  // ---- parts of a step, on top of each other ----
  function areas(figure, chart) {
    const height = 240, { svg, width, tip } = frame(figure, height, chart.title);
    const points = chart.points, names = chart.names, bottom = height - BOTTOM;
    if (!points.length) return null;
    const totals = points.map(p => p.slice(1).reduce((sum, value) => sum + value, 0));
    const { most, shown: high } = highest(totals);
    const y = value => Math.max(TOP - 4, bottom - value / (high || 1) * (bottom - TOP));
    // A point covers its steps: edges lie at the first step of a point, and the last one is as wide as the others.
    const range = [points[0][0], points[points.length - 1][0] + chart.width];
    const x = scaleX(width, range);
    axes(svg, width, height, x, y, range, ticks(0, high, 5, false, chart.unit === "B" ? 1024 : 10), chart.unit);
    let below = points.map(() => 0);
    names.forEach((name, index) => {
      const above = below.map((value, n) => value + points[n][index + 1]);
      const up = [], down = [];
      points.forEach((p, n) => {
        const end = n + 1 < points.length ? points[n + 1][0] : range[1];
        for (const edge of [p[0], end]) {
          up.push(`${x(edge).toFixed(1)},${y(above[n]).toFixed(1)}`);
          down.push(`${x(edge).toFixed(1)},${y(below[n]).toFixed(1)}`);
        }
      });
      add(svg, "polygon", {
        points: [...up, ...down.reverse()].join(" "), fill: chart.colours[index], class: "area", "data-points": points.length,
      });
      below = above;
    });
    if (high < most)
      add(svg, "text", { x: width - RIGHT, y: TOP + 10, "text-anchor": "end", class: "quiet" }, `cut off; the highest is ${format(most, chart.unit)}`);
    const cross = add(svg, "line", { y1: TOP, y2: bottom, class: "cross", visibility: "hidden" });
    return {
      figure, tip, range, by: "step", cross, x, points, toStep: left => range[0] + (left - LEFT) / (width - LEFT - RIGHT) * (range[1] - range[0]),
      describe(step) {
        const point = points[Math.max(0, points.findLastIndex(p => p[0] <= step))];
        const total = point.slice(1).reduce((sum, value) => sum + value, 0);
        const rows = names.map((name, index) =>
          [chart.colours[index], `${name}: ${format(point[index + 1], chart.unit)} (${Math.round(100 * point[index + 1] / (total || 1))} %)`]);
        return [`${stepOf(point[0], chart.width)}: ${format(total, chart.unit)}`, rows.reverse()];
      },
    };
  }

  // ---- ranks by step ----
  function map(figure, chart) {
    const ranks = chart.ranks, columns = chart.columns;
    const row = Math.max(7, Math.min(22, 440 / ranks.length)), height = TOP + row * ranks.length + BOTTOM;
    const { svg, width, tip } = frame(figure, height, chart.title);
    const range = [columns[0], columns[columns.length - 1] + chart.width], x = scaleX(width, range);
    const every = Math.ceil(12 / row);
    ranks.forEach((rank, index) => {
      const top = TOP + index * row, late = chart.late.includes(rank);
      add(svg, "rect", { x: LEFT, y: top, width: width - LEFT - RIGHT, height: row - 1, class: "empty" });
      if (index % every === 0 || late && row > 9)
        add(svg, "text", {
          x: LEFT - 8, y: top + row / 2 + 4, "text-anchor": "end", class: late ? "late" : "", "data-rank": rank,
        }, `${late ? "\u25b6 " : ""}rank ${rank}`);
      chart.values[index].forEach((value, n) => {
        if (value === null || value < chart.peak * 0.02) return;
        const end = n + 1 < columns.length ? columns[n + 1] : range[1];
        add(svg, "rect", {
          x: x(columns[n]).toFixed(1), y: top, width: Math.max(1, x(end) - x(columns[n])).toFixed(1), height: row - 1,
          class: "hot", "fill-opacity": Math.min(1, 0.08 + 0.92 * value / chart.peak).toFixed(3),
        });
      });
    });
    for (const tick of ticks(range[0], range[1] - 1, (width - LEFT) / 90, true))
      add(svg, "text", { x: x(tick), y: height - BOTTOM + 16, "text-anchor": "middle" }, String(Math.round(tick)));
    add(svg, "text", { x: width - RIGHT, y: height - 4, "text-anchor": "end", class: "quiet" }, "step");
    const cross = add(svg, "line", { y1: TOP, y2: height - BOTTOM, class: "cross", visibility: "hidden" });
    return {
      figure, tip, range, by: "step", cross, x, points: columns.map(column => [column]),
      toStep: left => range[0] + (left - LEFT) / (width - LEFT - RIGHT) * (range[1] - range[0]),
      describe(step, top) {
        const column = Math.max(0, columns.findLastIndex(first => first <= step));
        const at = stepOf(columns[column], chart.width);
        if (top === null) {
          const index = chart.values.reduce((best, values, n) => (values[column] ?? -1) > (chart.values[best][column] ?? -1) ? n : best, 0);
          top = TOP + index * row + 1;
        }
        const index = Math.max(0, Math.min(ranks.length - 1, Math.floor((top - TOP) / row)));
        const value = chart.values[index][column];
        const said = value === null ? "nothing is recorded" : value > 0
          ? `busy ${format(value, "s")} longer than the median rank` : "not later than the median rank";
        return [`rank ${ranks[index]}, ${at}`, [[null, said]]];
      },
    };
  }

  // ---- the pointer and the keys ----
  function point(view, step, top) {
    for (const other of drawn) {
      if (!other) continue;
      const inside = step !== null && other.by === view.by && step >= other.range[0] && step <= other.range[1];
      other.cross.setAttribute("visibility", inside ? "visible" : "hidden");
      if (inside) { other.cross.setAttribute("x1", other.x(step)); other.cross.setAttribute("x2", other.x(step)); }
      if (other !== view || !inside) other.tip.style.display = "none";
    }
    if (step === null || step < view.range[0] || step > view.range[1]) return;
    const [head, rows] = view.describe(step, top);
    rowsOf(view.tip, head, rows);
    place(view.tip, view.x(step), top === null ? TOP : Math.max(0, top - 20), view.figure);
  }

  function listen(figure, number) {
    figure.addEventListener("pointermove", event => {
      const view = drawn[number], svg = figure.querySelector("svg");
      if (!view || !svg) return;
      const box = svg.getBoundingClientRect();
      const left = event.clientX - box.left, top = event.clientY - box.top;
      const inside = left >= LEFT - 4 && left <= box.width - RIGHT + 4 && top >= 0 && top <= box.height;
      const step = Math.max(view.range[0], Math.min(view.range[1], view.toStep(left)));
      point(view, inside ? step : null, top);
    });
    figure.addEventListener("pointerleave", () => drawn[number] && point(drawn[number], null, null));
    figure.addEventListener("blur", () => drawn[number] && point(drawn[number], null, null));
    let at = 0;
    figure.addEventListener("keydown", event => {
      const view = drawn[number], move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!view || !move || event.target !== figure) return;
      event.preventDefault();
      at = Math.max(0, Math.min(view.points.length - 1, at + move));
      point(view, view.points[at][0], null);
    });
  }

  function draw(figure, number) {
    drawn[number] = { lines, areas, map }[charts[number].kind](figure, charts[number]);
  }

  function drawAll() {
    document.querySelectorAll("figure[data-chart]").forEach(figure => draw(figure, Number(figure.dataset.chart)));
  }

  document.querySelectorAll("figure[data-chart]").forEach(figure => {
    const number = Number(figure.dataset.chart);
    listen(figure, number);
    figure.querySelectorAll("input, select").forEach(choice => choice.addEventListener("change", () => draw(figure, number)));
    let width = figure.clientWidth;
    if (width) draw(figure, number);  // an observer is called after the page is loaded
    new ResizeObserver(() => {
      if (figure.clientWidth !== width) { width = figure.clientWidth; draw(figure, number); }
    }).observe(figure);
  });
  document.querySelectorAll("button[data-run]").forEach(button => button.addEventListener("click", () => {
    const run = Number(button.dataset.run), isShown = hidden.has(run);
    if (isShown) hidden.delete(run); else hidden.add(run);
    document.querySelectorAll(`button[data-run="${run}"]`).forEach(b => b.setAttribute("aria-pressed", String(isShown)));
    drawAll();
  }));
})();
