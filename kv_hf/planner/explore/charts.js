/* The drawings, as SVG: each function returns an element for a width in pixels. Decides no figure. */
"use strict";

const Charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const PARTS = [
    ["weights", "Weights"], ["payload", "Codes or numbers"], ["scales", "Scales"], ["tail", "Exact tokens"],
    ["waste", "Room without tokens"], ["other", "Tables, states, indexer"],
  ];
  const LINE_ORDER = ["dynamic", "paged_exact", "static", "paged_fp8", "paged_int8", "paged_k8v4", "paged_int4", "paged_k5v3", "paged_int3", "paged_int2", "mix"];
  let patterns = 0;

  function svg(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  const text = (x, y, words, attributes = {}) => svg("text", { x, y, ...attributes }, words);

  function drawing(width, height, label) {
    return svg("svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label, class: "drawing",
    });
  }

  /* Return a pattern of stripes and its address. */
  function hatch() {
    const id = `hatch-${(patterns += 1)}`;
    const lines = svg("path", { d: "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2", class: "hatch-lines" });
    const pattern = svg("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 6, height: 6, class: "hatch-ground" }), lines);
    return [svg("defs", {}, pattern), `url(#${id})`];
  }

  /* Return the bytes of a plan by part as the bars show them: what holds tokens apart from what does not. */
  function partsOf(plan, withWeights) {
    const { report } = plan;
    const kept = (part) => report[part] - report.empty[part];
    return {
      weights: withWeights ? plan.weights : 0,
      payload: kept("payload"), scales: kept("scales"), tail: kept("tail"),
      waste: report.waste, other: kept("other") + report.tables,
    };
  }

  /* Return stacked bars: rows of { label, note, parts, total, error, over }. */
  function bars(rows, { width, limit, limitLabel, label }) {
    const wide = width >= 560;
    const [left, right] = wide ? [112, 158] : [0, 0];
    const [step, thick, first] = wide ? [34, 20, 30] : [46, 16, 40];
    const height = first + rows.length * step - (step - thick) + 10;
    const most = Math.max(1, ...rows.map((row) => row.total || 0));
    const inside = limit > 0 && limit <= most * 1.7;
    const room = width - left - right;
    const scale = (bytes) => (bytes / (inside ? Math.max(most, limit * 1.04) : most)) * room;
    const root = drawing(width, height, label);
    const [defs, striped] = hatch();
    root.append(defs);
    rows.forEach((row, index) => {
      const y = first + index * step;
      const middle = y + thick / 2;
      const name = text(wide ? left - 12 : 0, wide ? middle : y - 6, row.label, {
        class: "name", "text-anchor": wide ? "end" : "start", "dominant-baseline": wide ? "central" : "auto",
      });
      root.append(name);
      if (row.error) {
        root.append(text(wide ? left : width, wide ? middle : y - 6, "does not fit this model", {
          class: "faint", "text-anchor": wide ? "start" : "end", "dominant-baseline": wide ? "central" : "auto",
        }));
        return;
      }
      let x = left;
      for (const [part] of PARTS) {
        const size = scale(row.parts[part]);
        if (size <= 0) continue;
        const attributes = { x, y, width: Math.max(0.75, size - (size > 3 ? 1 : 0)), height: thick, class: `part ${part}` };
        if (part === "waste") attributes.fill = striped;
        root.append(svg("rect", attributes));
        x += size;
      }
      const words = `${row.words}${row.over ? " · too much" : ""}`;
      root.append(text(wide ? x + 8 : width, wide ? middle : y - 6, words, {
        class: row.over ? "total over" : "total", "text-anchor": wide ? "start" : "end",
        "dominant-baseline": wide ? "central" : "auto",
      }));
    });
    if (inside) {
      const x = left + scale(limit);
      const end = x > width * 0.6;
      // on a narrow page names lie between the bars
      const spans = wide ? [[18, height - 4]] : rows.map((_, i) => [first + i * step - 2, first + i * step + thick + 2]);
      for (const [y1, y2] of spans) root.append(svg("line", { x1: x, x2: x, y1, y2, class: "limit" }));
      root.append(text(end ? x - 6 : x + 6, 12, limitLabel, { class: "limit-label", "text-anchor": end ? "end" : "start" }));
    }
    return root;
  }

  /* Return places at least `gap` apart, in the order of `wanted`. */
  function spread(wanted, gap, low, high) {
    const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
    const places = [...wanted];
    let last = low - gap;
    for (const i of order) last = places[i] = Math.max(places[i], last + gap);
    let next = high + gap;
    for (const i of order.reverse()) next = places[i] = Math.min(places[i], next - gap);
    return places;
  }

  function memoryTicks(low, high, isLog) {
    const found = [];
    if (isLog) {
      const exponents = Math.log2(high) - Math.log2(low);
      const step = Math.max(1, Math.ceil(exponents / 6));
      for (let e = Math.floor(Math.log2(low)); e <= Math.log2(high); e += 1) {
        if (e % step === 0) found.push(2 ** e);
        if (exponents < 4) found.push(1.5 * 2 ** e);
      }
      return found.filter((at) => at >= low && at <= high);
    }
    let step = 2 ** Math.floor(Math.log2(high / 4));
    if (high / step > 6) step *= 2;
    for (let at = 0; at <= high; at += step) found.push(at);
    return found;
  }

  /* Return the contexts that the axis names, at most `most` of them. */
  function contextTicks(contexts, isLog, most) {
    const last = contexts[contexts.length - 1];
    const found = [];
    if (isLog) {
      const every = 2 ** Math.ceil((Math.log2(last) - Math.log2(contexts[0])) / most);
      for (let tokens = last; tokens >= contexts[0]; tokens /= every) if (Number.isInteger(Math.log2(tokens))) found.push(tokens);
      return found;
    }
    let step = 2 ** Math.floor(Math.log2(last / 4));
    while (last / step > most) step *= 2;
    for (let tokens = step; tokens <= last; tokens += step) found.push(tokens);
    return found;
  }

  /* Return curves: lines of { id, label, values } over `contexts`, with the device's memory and the place that is read. */
  function curves(lines, { width, contexts, isLog, limit, limitLabel, reading, label }) {
    const wide = width >= 600;
    const height = wide ? 360 : 280;
    const edge = { left: 62, right: wide ? 134 : 18, top: 22, bottom: 40 };
    const all = lines.flatMap((line) => line.values);
    const most = Math.max(...all, 1);
    const least = Math.max(1, Math.min(...all));
    const seen = Math.max(0, limit); // nothing is left where the weights alone are too much
    const far = least < 1.5 * seen && most > 2 * seen ? 2 * seen : Math.max(most * 1.05, most * 2 > seen ? seen * 1.15 : 0);
    const high = isLog ? Math.max(most, seen) * 1.25 : far;
    const low = isLog ? Math.min(least, seen || least) / 1.25 : 0;
    const [x0, x1] = [edge.left, width - edge.right];
    const [y0, y1] = [height - edge.bottom, edge.top];
    const along = (tokens) => (isLog ? Math.log2(tokens) : tokens);
    const [first, last] = [contexts[0], contexts[contexts.length - 1]].map(along);
    const px = (tokens) => x0 + ((along(tokens) - first) / (last - first || 1)) * (x1 - x0);
    const part = (bytes) => (isLog ? Math.log(bytes / low) / Math.log(high / low) : bytes / high);
    const py = (bytes) => y0 - part(Math.max(bytes, low)) * (y0 - y1);
    const root = drawing(width, height, label);
    const clip = `clip-${(patterns += 1)}`;
    root.append(svg("defs", {}, svg("clipPath", { id: clip },
      svg("rect", { x: x0, y: y1 - 2, width: x1 - x0 + 4, height: y0 - y1 + 4 }))));
    for (const at of memoryTicks(low, high, isLog)) {
      root.append(svg("line", { x1: x0, x2: x1, y1: py(at), y2: py(at), class: "grid" }));
      root.append(text(x0 - 8, py(at), at ? Words.bytes(at).replace(/\.0+ /, " ") : "0", {
        class: "tick", "text-anchor": "end", "dominant-baseline": "central",
      }));
    }
    for (const tokens of contextTicks(contexts, isLog, (x1 - x0) / 52)) {
      root.append(svg("line", { x1: px(tokens), x2: px(tokens), y1: y0, y2: y0 + 5, class: "axis" }));
      root.append(text(px(tokens), y0 + 18, Words.ticks(tokens), { class: "tick", "text-anchor": "middle" }));
    }
    root.append(svg("line", { x1: x0, x2: x1, y1: y0, y2: y0, class: "axis" }));
    root.append(text((x0 + x1) / 2, height - 5, "tokens per row", { class: "tick", "text-anchor": "middle" }));
    const drawn = svg("g", { "clip-path": `url(#${clip})` });
    // caches of the same size lie upon each other: wide lines below, dashed ones above
    for (const line of [...lines].sort((a, b) => LINE_ORDER.indexOf(a.id) - LINE_ORDER.indexOf(b.id))) {
      const points = line.values.map((bytes, i) => `${px(contexts[i]).toFixed(1)},${py(bytes).toFixed(1)}`);
      drawn.append(svg("polyline", { points: points.join(" "), class: `line ${line.id}` }));
    }
    root.append(drawn);
    if (seen && seen >= low && seen <= high) {
      root.append(svg("line", { x1: x0, x2: x1, y1: py(limit), y2: py(limit), class: "limit" }));
      root.append(text(x0 + 6, py(limit) - 6, limitLabel, { class: "limit-label" }));
    }
    const at = px(contexts[reading]);
    root.append(svg("line", { x1: at, x2: at, y1, y2: y0, class: "cursor" }));
    for (const line of lines) {
      const bytes = line.values[reading];
      if (bytes <= high) root.append(svg("circle", { cx: at, cy: py(bytes), r: 4, class: `dot ${line.id}` }));
    }
    if (wide) {
      const ends = lines.map((line) => {
        const i = line.values.findLastIndex((bytes) => bytes <= high);
        return { line, x: i < 0 ? null : px(contexts[i]), y: i < 0 ? y1 : py(line.values[i]), cut: i < line.values.length - 1 };
      });
      const labelled = ends.filter((end) => end.x !== null && (!end.cut || isLog));
      const places = spread(labelled.map((end) => end.y), 15, y1 + 4, y0 - 4);
      labelled.forEach((end, i) => {
        root.append(svg("line", { x1: x1 + 8, x2: x1 + 24, y1: places[i], y2: places[i], class: `line-mark ${end.line.id}` }));
        root.append(text(x1 + 30, places[i], end.line.label, { class: "line-label", "dominant-baseline": "central" }));
      });
      const cut = ends.filter((end) => end.x !== null && end.cut && !isLog);
      cut.sort((a, b) => a.x - b.x).forEach((end, i) => {
        const [x, y] = [Math.min(end.x, x1) - 6, y1 + 8 + 15 * i];
        root.append(svg("line", { x1: x - 16, x2: x, y1: y, y2: y, class: `line-mark ${end.line.id}` }));
        root.append(text(x - 22, y, end.line.label, { class: "line-label", "text-anchor": "end", "dominant-baseline": "central" }));
      });
    }
    root.append(svg("rect", { x: x0, y: y1, width: x1 - x0, height: y0 - y1, class: "catcher" }));
    root.contextAt = (x) => {
      const asked = first + ((x - x0) / (x1 - x0)) * (last - first);
      const away = (tokens) => Math.abs(along(tokens) - asked);
      return contexts.reduce((best, one, i) => (away(one) < away(contexts[best]) ? i : best), 0);
    };
    return root;
  }

  const MARKS = {
    circle: (x, y) => svg("circle", { cx: x, cy: y, r: 5.5 }),
    square: (x, y) => svg("rect", { x: x - 5, y: y - 5, width: 10, height: 10 }),
    diamond: (x, y) => svg("path", { d: `M${x},${y - 6.5} l6.5,6.5 l-6.5,6.5 l-6.5,-6.5 z` }),
  };
  const MARK_NAMES = Object.keys(MARKS);

  function mark(index, x, y) {
    const node = MARKS[MARK_NAMES[index % MARK_NAMES.length]](x, y);
    node.setAttribute("class", `mark model-${index % MARK_NAMES.length}`);
    return node;
  }

  /* Return divergences as marks: rows of { label, chosen, points: [{ model, kl, low, high }] }. */
  function dots(rows, { width, label, models }) {
    const wide = width >= 560;
    const left = wide ? 190 : 12;
    const [step, first] = wide ? [32, 16] : [46, 32];
    const height = first + rows.length * step + (wide ? 34 : 20);
    const [low, high] = [-6, 0];
    const px = (kl) => left + ((Math.max(low, Math.log10(Math.max(kl, 1e-12))) - low) / (high - low)) * (width - left - 16);
    const root = drawing(width, height, label);
    const bottom = height - 36;
    for (let e = low; e <= high; e += 1) {
      const x = px(10 ** e);
      if (!wide && e % 2) continue;
      root.append(svg("line", { x1: x, x2: x, y1: wide ? 0 : 14, y2: bottom, class: "grid" }));
      const words = e === low ? "≤ 10⁻⁶" : `10${["⁰", "⁻¹", "⁻²", "⁻³", "⁻⁴", "⁻⁵"][-e]}`;
      root.append(text(x, bottom + 16, e === 0 ? "1" : words, { class: "tick", "text-anchor": e === low && !wide ? "start" : e === high ? "end" : "middle" }));
    }
    root.append(text((left + width) / 2, height - 2, wide ? "mean KL divergence from the exact cache (nats per token)" : "mean KL divergence (nats per token)", { class: "tick", "text-anchor": "middle" }));
    rows.forEach((row, index) => {
      const y = first + index * step;
      if (row.chosen) root.append(svg("rect", { x: 0, y: y - (wide ? step / 2 : 28), width, height: step, rx: 4, class: "chosen" }));
      root.append(text(wide ? left - 16 : 4, wide ? y : y - 14, row.label, {
        class: row.chosen ? "name strong" : "name", "text-anchor": wide ? "end" : "start", "dominant-baseline": wide ? "central" : "auto",
      }));
      for (const point of row.points) {
        const x1 = px(Math.max(point.low, 1e-12));
        const x2 = px(point.high);
        const at = y + (point.model - (models - 1) / 2) * 5; // equal ones do not hide each other
        if (point.high > 1e-6) root.append(svg("line", { x1, x2, y1: at, y2: at, class: `whisker model-${point.model}` }));
        root.append(mark(point.model, px(point.kl), at));
      }
    });
    return root;
  }

  return { PARTS, bars, curves, dots, mark, partsOf, svg };
})();
