/* What the formats cost in accuracy, as it was measured on small models (accuracy.json). */
"use strict";

const Accuracy = (() => {
  const { make, tableOf } = Controls;
  const at = (id) => document.getElementById(id);

  const isPlain = (row) => !Object.keys(row.options).length;

  /* Return what storing in a cache's formats cost on the measured models, from the least to the most. */
  function lossOf({ cache, o }, data) {
    if (cache !== "paged") return "0";
    const found = data.accuracy.rows.filter((row) => isPlain(row) && row.keys === o.keys && row.values === o.values).map((row) => row.kl);
    if (!found.length) return make("span", { class: "faint", text: "not measured" });
    if (Math.max(...found) < 1e-6) return "0";
    const ends = [Math.min(...found), Math.max(...found)].map(Words.divergence);
    return make("span", { class: "range", text: [...new Set(ends)].join(" – ") });
  }

  function titleOf(row, data) {
    const named = data.caches.find((one) => one.keys === row.keys && one.values === row.values);
    const formats = named ? named.name : row.keys === row.values ? row.keys : `${row.keys} keys, ${row.values} values`;
    const names = { key_group_size: "key groups", value_group_size: "value groups", page_size: "page", sink_tokens: "sinks" };
    const options = Object.entries(row.options).map(([name, value]) => `${names[name] || name} ${value}`);
    return [formats, ...options].join(", ");
  }

  /* Show what was measured, beside the formats that `figures` were chosen with. */
  function draw(figures, data) {
    const { models, rows } = data.accuracy;
    const { state, whole } = figures;
    const titles = new Map();
    rows.forEach((row) => titles.set(titleOf(row, data), [...(titles.get(titleOf(row, data)) || []), row]));
    const measured = [...titles].map(([label, found]) => ({ label, found, plain: isPlain(found[0]) }));
    measured.sort((a, b) => b.found[0].bits - a.found[0].bits);
    const isMix = ({ found, plain }) => plain && found[0].keys === state.keys && found[0].values === state.values;
    const hasKeys = Model.hasKeys(whole);
    const drawn = measured.filter((one) => one.plain).map((one) => ({
      label: one.label, chosen: hasKeys && isMix(one),
      points: one.found.map((row) => ({ model: models.findIndex((model) => model.model === row.model), kl: row.kl, low: row.kl_low, high: row.kl_high })),
    }));
    at("accuracy-intro").textContent =
      `Measured on small models, whatever the model above is: how far the next token’s probabilities move when the cache is stored in a format, teacher-forced over windows of ${Words.count(models[0].window)} tokens (${models.map((model) => `${model.title}, weights ${model.weights}: ${Words.count(model.tokens)} tokens of ${model.text.replaceAll("_", " ")}`).join("; ")}). What your model loses was not measured.`;
    at("accuracy-legend").replaceChildren(...models.map((model, i) => {
      const icon = Charts.svg("svg", { width: 16, height: 16, class: "swatch-mark", "aria-hidden": "true" }, Charts.mark(i, 8, 8));
      return make("li", {}, icon, model.title);
    }));
    at("accuracy").replaceChildren(Charts.dots(drawn, {
      width: at("accuracy").clientWidth, models: models.length,
      label: `KL divergence by format: ${drawn.map((row) => `${row.label} ${row.points.map((point) => `${models[point.model].title} ${Words.divergence(point.kl)}`).join(", ")}`).join("; ")}.`,
    }));
    const hints = [];
    if (hasKeys && !measured.some(isMix)) hints.push(`${state.keys} keys with ${state.values} values were not measured.`);
    if (Model.isLatent(whole)) hints.push("These are keys and values. What latents lose was measured apart: docs/mla_accuracy.md.");
    if (hasKeys && measured.some(isMix)) hints.push("Your mix is marked.");
    if (state.page !== "64" || state.sinks !== 4 || state.recent) hints.push("Measured with pages of 64 tokens and 4 exact first tokens.");
    at("accuracy-hint").textContent = hints.join(" ");
    const head = ["Format", "Bits", ...models.flatMap((model) => [`${model.title}: KL`, "Perplexity"])];
    at("accuracy-table").replaceChildren(tableOf(head, measured.map(({ label, found }) => [
      label, found[0].bits.toFixed(2),
      ...models.flatMap((model) => {
        const row = found.find((one) => one.model === model.model);
        return row ? [Words.divergence(row.kl), `×${row.perplexity_ratio.toFixed(4)}`] : ["–", "–"];
      }),
    ]), "Measured accuracy of the formats"));
  }

  return { draw, lossOf };
})();
