/* The page: holds what was chosen, and draws what follows from it. */
"use strict";

(() => {
  const { make, tableOf } = Controls;
  const data = JSON.parse(document.getElementById("data").textContent);
  const fields = State.fieldsOf(data);
  const at = (id) => document.getElementById(id);
  let figures = null;
  let reading = null; // tokens at which the curve is read; null: at the chosen context

  const TYPED_DEVICE = ["memory", "bandwidth"];

  // -- what was chosen -------------------------------------------------------------------------------------------

  function say(problems) {
    const box = at("notice");
    box.replaceChildren();
    box.hidden = !problems.length;
    if (!problems.length) return;
    const list = make("ul", {}, ...problems.map((problem) => make("li", { text: problem })));
    box.append(list, make("button", { type: "button", text: "Close", on: { click: () => say([]) } }));
  }

  function show(given, problems = []) {
    const settled = Model.settle(given, data);
    figures = Model.compute(settled.state, data);
    say([...problems, ...settled.problems]);
    const hash = State.toHash(figures.state, fields);
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    draw();
  }

  function change(name, value) {
    const given = { ...figures.state, [name]: value };
    if (TYPED_DEVICE.includes(name)) given.device = "own";
    if (name === "model") given.kv = 0;
    if (name === "context" || name === "model") reading = null;
    show(given);
  }

  function fromLink() {
    const { state, problems } = State.fromHash(location.hash, fields);
    const given = new URLSearchParams(location.hash.slice(1));
    if (!given.has("device") && TYPED_DEVICE.some((name) => given.has(name))) state.device = "own";
    reading = null;
    show(state, problems.map((problem) => `From the link: ${problem}. The default is used.`));
  }

  // -- words -----------------------------------------------------------------------------------------------------

  const size = (bytes) => (figures.state.exact === "1" ? Words.exactBytes(bytes) : Words.bytes(bytes));
  const limitOf = (withWeights) => figures.device.bytes - (withWeights ? 0 : figures.weights || 0);
  const nameOf = () => {
    const preset = Model.presetOf(figures.state, data);
    return preset ? preset.label : "Your model";
  };

  const swatch = (kind) => make("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
  const labelled = (one) => (one.note ? [one.label, make("small", { text: one.note })] : [one.label]);

  // -- parts of the page -----------------------------------------------------------------------------------------

  function drawSummary() {
    const { state, caches, weights, device, whole } = figures;
    const mix = caches[caches.length - 1];
    const dynamic = caches[0].plan;
    const load = `${Words.plural(state.batch, "row")} of ${Words.count(state.context)} tokens`;
    const devices = state.tp > 1 ? ` on each of ${state.tp} devices` : "";
    const words = [`${nameOf()}, ${load}${devices}: DynamicCache takes ${size(dynamic.report.total)}`];
    if (mix.error) words.push(`. Your mix does not go with this model: ${mix.error}.`);
    else words.push(` and your mix (${mix.note}) ${size(mix.plan.report.total)}, ${Words.compared(mix.plan.ratio)}.`);
    if (whole.max_positions && state.context > whole.max_positions) words.push(` The model was made for ${Words.count(whole.max_positions)} tokens.`);
    at("summary").textContent = words.join("");
    const facts = [["Weights", weights === null ? "not known" : size(weights)]];
    if (mix.plan) {
      const left = device.bytes - (weights || 0) - mix.plan.report.total;
      facts.push(["Cache, your mix", size(mix.plan.report.total)], ["Together", size((weights || 0) + mix.plan.report.total)]);
      facts.push([left >= 0 ? "Left on the device" : "Too much for the device", size(Math.abs(left))]);
    }
    const fit = facts[3] ? `${facts[3][0].toLowerCase()}: ` : "";
    at("mini").replaceChildren(make("span", {}, "your mix ", make("b", { text: mix.plan ? facts[1][1] : "–" })),
      make("span", { class: fit.startsWith("too") ? "over" : null }, fit, make("b", { text: facts[3] ? facts[3][1] : "" })));
    at("facts").replaceChildren(...facts.map(([name, value], i) =>
      make("div", { class: i === 3 ? (name.startsWith("Left") ? "good" : "bad") : null }, make("dt", { text: name }), make("dd", { text: value }))));
  }

  function drawBars() {
    const { caches, state } = figures;
    const withWeights = state.weights === "1";
    const limit = limitOf(withWeights);
    const room = limitOf(false);
    const rows = caches.map((one) => {
      if (one.error) return { label: one.label, error: one.error };
      const parts = Charts.partsOf(one.plan, withWeights);
      const total = one.plan.report.total + (withWeights ? one.plan.weights : 0);
      return { label: one.label, parts, total, words: Words.bytes(total), over: total > limit && room > 0 };
    });
    const words = rows.filter((row) => !row.error).map((row) => `${row.label} ${row.words}${row.over ? ", too much" : ""}`);
    const what = withWeights ? "Weights and cache" : "Cache without weights";
    const limitLabel = withWeights ? `device, ${Words.bytes(limit)}` : `left behind the weights, ${Words.bytes(Math.max(0, limit))}`;
    at("bars").replaceChildren(Charts.bars(rows, {
      width: at("bars").clientWidth, limit, limitLabel, label: `${what}: ${words.join("; ")}. The device’s ${limitLabel}.`,
    }));
    const used = Charts.PARTS.filter(([part]) => rows.some((row) => row.parts && row.parts[part] > 0));
    at("bars-legend").replaceChildren(...used.map(([part, name]) => make("li", {}, swatch(part), name)));
    at("bars-hint").textContent = room > 0 ? "" : `The weights alone are too much for the device, which has ${Words.bytes(figures.device.bytes)}: no cache fits.`;
  }

  function drawTable() {
    const { caches, state, whole } = figures;
    const head = ["Cache", "Bytes per token", "Total", "Ratio", "Largest context", "Largest batch", "Resident tokens", "Tokens/s, at most"];
    const hasLoss = Model.hasKeys(whole);
    if (hasLoss) head.push("KL, measured");
    const limit = (n) => (n === null ? "no limit" : Words.count(n));
    const mostRows = (n) => (n === null ? `${Words.count(Fit.MOST_ROWS)}+` : Words.count(n));
    const rows = caches.map((one) => {
      if (one.error) return Object.assign([labelled(one), make("span", { class: "faint", text: one.error })], { kind: one.id });
      const { plan } = one;
      const total = [size(plan.report.total)];
      if (!plan.fits && limitOf(false) > 0) total.push(make("small", { class: "over", text: "too much" }));
      const speed = plan.tokensPerSecond === null ? "–" : Words.speed(plan.tokensPerSecond);
      return Object.assign([
        labelled(one), size(plan.perToken), total, Words.ratio(plan.ratio), limit(plan.context), mostRows(plan.batch),
        limit(plan.resident), speed, ...(hasLoss ? [Accuracy.lossOf(one, data)] : []),
      ], { kind: one.id });
    });
    at("table").replaceChildren(tableOf(head, rows, "Figures of every cache"));
    const hints = [];
    if (whole.max_positions) hints.push(`The model was made for ${Words.count(whole.max_positions)} tokens.`);
    hints.push(`Largest context at ${Words.plural(state.batch, "row")}, largest batch at ${Words.count(state.context)} tokens, both behind the weights.`);
    hints.push("Tokens/s are what the memory’s bandwidth allows over all rows: a bound, not a forecast.");
    if (Model.hasKeys(whole)) hints.push(`KL: on ${data.accuracy.models.map((model) => model.title).join(", ")}, see below.`);
    if (caches.some((one) => one.plan && one.plan.report.total > Number.MAX_SAFE_INTEGER)) hints.push("Bytes beyond 8 PiB are rounded.");
    at("table-hint").textContent = hints.join(" ");
    const names = ["payload", "scales", "tail", "tables", "other"];
    const parts = caches.filter((one) => one.plan).map((one) => {
      const { report } = one.plan;
      return [one.label, ...names.map((name) => size(report[name])), size(report.waste), size(report.total)];
    });
    at("parts").replaceChildren(tableOf(
      ["Cache", "Codes or numbers", "Scales", "Exact tokens", "Tables", "States, indexer", "Of these without tokens", "Total"], parts, "Bytes by part"));
  }

  function readAt() {
    const { contexts, state } = figures;
    const tokens = reading === null ? state.context : reading;
    return contexts.reduce((best, one, i) => (Math.abs(one - tokens) < Math.abs(contexts[best] - tokens) ? i : best), 0);
  }

  function drawCurve() {
    const { state, contexts, weights } = figures;
    const withWeights = state.weights === "1";
    const more = withWeights ? weights || 0 : 0;
    const caches = figures.caches.filter((one) => one.plan);
    const lines = caches.map((one) => ({ id: one.id, label: one.label, values: one.curve.map((bytes) => bytes + more) }));
    const index = readAt();
    const limit = limitOf(withWeights);
    const limitLabel = `${withWeights ? "device" : "behind the weights"}, ${Words.bytes(Math.max(0, limit))}`;
    const drawing = Charts.curves(lines, {
      width: at("curve").clientWidth, contexts, isLog: state.scale === "log", limit, limitLabel, reading: index,
      label: `Memory of each cache from ${Words.count(contexts[0])} to ${Words.count(contexts[contexts.length - 1])} tokens per row, ${withWeights ? "with" : "without"} weights. The table below has the figures.`,
    });
    drawing.addEventListener("pointermove", (event) => {
      const next = contexts[drawing.contextAt(event.clientX - drawing.getBoundingClientRect().left)];
      if (next !== contexts[readAt()]) {
        reading = next;
        drawCurve();
      }
    });
    at("curve").replaceChildren(drawing);
    at("read-at").max = contexts.length - 1;
    at("read-at").value = index;
    const tokens = Words.count(contexts[index]);
    at("read-at").setAttribute("aria-valuetext", `${tokens} tokens`);
    at("read-at").style.setProperty("--share", `${(100 * index) / (contexts.length - 1)}%`);
    at("reading").textContent = `At ${tokens} tokens per row`;
    at("curve-legend").replaceChildren(...lines.map((line) => {
      const bytes = line.values[index];
      const over = bytes > limit && limitOf(false) > 0 ? [make("small", { class: "over", text: "too much" })] : [];
      return make("li", {}, swatch(`line ${line.id}`), make("span", { class: "name", text: line.label }), make("b", { text: Words.bytes(bytes) }), ...over);
    }));
    const shown = contexts.map((tokens, i) => [tokens, i]).filter(([tokens]) => Number.isInteger(Math.log2(tokens)) || tokens === state.context);
    at("curve-table").replaceChildren(tableOf(["Tokens per row", ...lines.map((line) => line.label)],
      shown.map(([tokens, i]) => [Words.count(tokens), ...lines.map((line) => size(line.values[i]))]), "Memory over context length"));
  }

  function drawNotes() {
    const { state, whole } = figures;
    const preset = Model.presetOf(state, data);
    const notes = [
      "Bytes are those of the tensors that a cache allocates, as kv_hf.plan predicts them; the page’s arithmetic is tested against it.",
      "Rows hold equally many tokens, without padding. With sliding windows the most is shown that any prompt leads to.",
      "Activations, the allocator’s own use and what the driver keeps come on top.",
      "Room without tokens: pages allocated ahead, and free slots beside the exact tokens.",
    ];
    if (state.tp > 1) {
      const cut = Model.cutOf(state, data);
      if (cut === "whole") notes.push("transformers’ tensor parallel plan of this family does not cut kv heads: every device holds all of them.");
      if (cut === "unknown") notes.push("That kv heads are cut is an assumption: transformers has no tensor parallel plan that says so.");
      notes.push(`Weights are taken as 1/${state.tp}; latents, indexer keys and states are whole on every device.`);
    }
    if (whole.parameters === null && !whole.weight_bytes) notes.push("Nobody told how large this model’s weights are: they count as nothing.");
    notes.push(...(whole.notes || []));
    at("notes").replaceChildren(...notes.map((note) => make("li", { text: note })));
    at("source").hidden = !(preset && preset.source);
    at("source-text").textContent = preset ? preset.source : "";
  }

  // -- all of it -------------------------------------------------------------------------------------------------

  let update = null;

  function drawFigures() {
    drawSummary();
    drawBars();
    drawTable();
    drawCurve();
    Accuracy.draw(figures, data);
    drawNotes();
  }

  function draw() {
    update(figures);
    at("weights").checked = figures.state.weights === "1";
    at("exact").checked = figures.state.exact === "1";
    document.querySelectorAll("input[name=scale]").forEach((radio) => { radio.checked = radio.value === figures.state.scale; });
    drawFigures();
  }

  const remember = (theme) => {
    try {
      localStorage.setItem("kv-hf-theme", theme);
    } catch { /* a page without storage forgets */ }
  };

  function wear(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    document.querySelectorAll("input[name=theme]").forEach((radio) => { radio.checked = radio.value === theme; });
  }

  async function share() {
    const button = at("share");
    try {
      await navigator.clipboard.writeText(location.href);
      button.textContent = "Copied";
    } catch {
      say([`The browser does not let a page copy. The link is: ${location.href}`]);
      return;
    }
    setTimeout(() => { button.textContent = "Copy link"; }, 2000);
  }

  function start() {
    let theme = "auto";
    try {
      theme = localStorage.getItem("kv-hf-theme") || "auto";
    } catch { /* as above */ }
    wear(["light", "dark"].includes(theme) ? theme : "auto");
    update = Controls.build(at("controls"), fields, data, change);
    document.querySelectorAll("input[name=theme]").forEach((radio) => radio.addEventListener("change", () => {
      wear(radio.value);
      remember(radio.value);
    }));
    document.querySelectorAll("input[name=scale]").forEach((radio) => radio.addEventListener("change", () => change("scale", radio.value)));
    for (const name of ["weights", "exact"]) at(name).addEventListener("change", (event) => change(name, event.target.checked ? "1" : "0"));
    at("read-at").addEventListener("input", (event) => {
      reading = figures.contexts[Number(event.target.value)];
      drawCurve();
    });
    at("share").addEventListener("click", share);
    at("reset").addEventListener("click", () => {
      reading = null;
      show(State.initial(fields));
    });
    document.querySelector("[data-skip]").addEventListener("click", (event) => {
      event.preventDefault(); // the part of the address behind "#" says what was chosen
      at("results").focus();
    });
    window.addEventListener("hashchange", fromLink);
    let width = 0;
    new ResizeObserver(() => {
      if (at("bars").clientWidth === width) return;
      width = at("bars").clientWidth;
      drawFigures();
    }).observe(at("bars"));
    fromLink();
  }

  start();
})();
