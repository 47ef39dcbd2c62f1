/* Elements, tables and the form: what it asks, and how a slider, a number or a choice becomes a value. */
"use strict";

const Controls = (() => {
  /* Return an element: attributes by name, `on` listeners, `text`, children. */
  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") node.textContent = value;
      else if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  /* Return a table; rows are lists of cells, and a row's `kind` its class. */
  function tableOf(head, rows, caption) {
    const line = (cells, scope) => make("tr", {}, ...cells.map((cell, i) => {
      const node = scope === "col" || i === 0 ? make("th", { scope: scope === "col" ? "col" : "row" }) : make("td");
      node.append(...[cell].flat());
      if (i === cells.length - 1 && cells.length < head.length) node.setAttribute("colspan", head.length - i);
      return node;
    }));
    return make("table", {}, make("caption", { class: "hidden", text: caption }), make("thead", {}, line(head, "col")),
      make("tbody", {}, ...rows.map((cells) => {
        const row = line(cells, "row");
        if (cells.kind) row.className = cells.kind;
        return row;
      })));
  }

  const GROUPS = [
    ["Model", ["model", "layers", "heads", "kind", "kvheads", "dim", "window", "windowed", "rank", "rope", "billions", "kv", "dtype"]],
    ["Load", ["context", "batch"]],
    ["Cache", ["page", "keys", "values", "latent", "sinks", "recent"]],
    ["Device", ["device", "memory", "bandwidth", "tp"]],
  ];
  const HELP = {
    kv: "Weights stay as they are.",
    dtype: "Of weights, and of what is stored exactly.",
    tp: "Figures are those of one device.",
    windowed: "The other layers attend to everything.",
  };
  const SEGMENTED = new Set(["keys", "values"]);
  const SELECTS = new Set(["model", "dtype", "kind", "latent", "device"]);
  const TYPED_ONLY = new Set(["layers", "heads", "kvheads", "dim", "window", "windowed", "rank", "rope", "billions"]);
  // a first digit of these would change another field
  const WHEN_LEFT = new Set(["layers", "heads", "kvheads", "windowed"]);
  const NAMES = { model: "as the model", attention: "keys and values", latent: "latents (MLA)", own: "My own figures" };

  /* Return the values that a slider goes through. */
  function stepsOf(name, figures, data) {
    const { heads } = figures;
    switch (name) {
      case "context": return Model.ladder(16, Math.max(1048576, figures.state.context));
      case "batch": return Model.ladder(1, 1024, 4);
      case "kv": return heads ? heads.choices : [0];
      case "page": return data.page_sizes;
      case "sinks": return Array.from({ length: 65 }, (_, i) => i);
      case "recent": return [0, 8, ...Model.ladder(16, 1024, 2)];
      case "memory": return Model.ladder(4, 640, 8);
      case "bandwidth": return Model.ladder(50, 10000, 8);
      case "tp": return figures.degrees;
      default: return null;
    }
  }

  /* Return the number that a field shows. */
  const shown = (name, figures) =>
    name === "kv" && !figures.state.kv ? (figures.heads ? figures.heads.own : 0) : Number(figures.state[name]);

  function nearest(steps, value) {
    let best = 0;
    steps.forEach((step, i) => {
      if (Math.abs(step - value) < Math.abs(steps[best] - value)) best = i;
    });
    return best;
  }

  /* Fill `form`; `change(name, value)` is called for every value that somebody gives. Returns `update(figures)`. */
  function build(form, fields, data, change) {
    const parts = {};
    let figures = null;

    function failed(name, message) {
      const { error, entry } = parts[name];
      error.textContent = message;
      error.hidden = !message;
      if (message) entry.setAttribute("aria-invalid", "true");
      else entry.removeAttribute("aria-invalid");
    }

    function typed(name, text, left = true) {
      let found = State.parse(fields[name], text);
      const steps = ["kv", "page", "tp"].includes(name) ? stepsOf(name, figures, data) : null;
      if (!found.error && steps && !steps.includes(Number(found.value))) found = { error: `one of ${steps.join(", ")}` };
      if (found.error) failed(name, `Give ${found.error}. Still ${Words.plain(shown(name, figures))}.`);
      else if (left || !WHEN_LEFT.has(name)) change(name, found.value);
      else failed(name, "");
    }

    function numberField(name, label) {
      const id = `f-${name}`;
      const entry = make("input", {
        id, type: "text", inputmode: "decimal", class: "number", "aria-describedby": `e-${name} h-${name}`, name,
        on: {
          input: (event) => typed(name, event.target.value, false),
          change: (event) => WHEN_LEFT.has(name) && typed(name, event.target.value),
          blur: () => !parts[name].error.hidden || refresh(name),
        },
      });
      const slider = TYPED_ONLY.has(name) ? null : make("input", {
        type: "range", min: 0, step: 1, "aria-label": label, id: `s-${name}`, "aria-describedby": `h-${name}`,
        on: {
          input: (event) => {
            const value = stepsOf(name, figures, data)[Number(event.target.value)];
            change(name, fields[name].kind === "choice" ? String(value) : value);
          },
        },
      });
      const row = make("div", { class: "line" }, make("label", { for: id, text: label }), entry);
      return { entry, slider, body: [row, ...(slider ? [slider] : [])] };
    }

    function selectField(name, label) {
      const entry = make("select", { id: `f-${name}`, name, "aria-describedby": `h-${name}`, on: { change: (event) => change(name, event.target.value) } });
      const groups = new Map();
      for (const option of fields[name].options) {
        const listed = name === "model" ? data.models.find((one) => one.id === option) : data.devices.find((one) => one.id === option);
        const text = listed && (name === "model" || name === "device") ? listed.label : NAMES[option] || option;
        const node = make("option", { value: option, text: name === "model" && option === "custom" ? "Numbers that I type" : text });
        const group = name === "model" && listed ? listed.group : null;
        if (!group) {
          entry.append(node);
          continue;
        }
        if (!groups.has(group)) {
          groups.set(group, make("optgroup", { label: group }));
          entry.append(groups.get(group));
        }
        groups.get(group).append(node);
      }
      return { entry, body: [make("label", { for: `f-${name}`, text: label }), entry] };
    }

    function segmentedField(name, label) {
      const entry = make("fieldset", { class: "segmented wide", id: `f-${name}`, "aria-describedby": `h-${name}` }, make("legend", { text: label }));
      for (const option of fields[name].options) {
        const radio = make("input", { type: "radio", name, value: option, on: { change: () => change(name, option) } });
        entry.append(make("label", {}, radio, make("span", { text: option })));
      }
      return { entry, body: [entry] };
    }

    for (const [title, names] of GROUPS) {
      const box = make("fieldset", { class: "group" }, make("legend", { text: title }));
      for (const name of names) {
        const label = fields[name].label;
        const field = SEGMENTED.has(name) ? segmentedField(name, label) : SELECTS.has(name) ? selectField(name, label) : numberField(name, label);
        const error = make("p", { class: "error", id: `e-${name}`, role: "alert", hidden: true });
        const help = make("p", { class: "help", id: `h-${name}`, text: HELP[name] || "", hidden: !HELP[name] });
        const box2 = make("div", { class: `field field-${name}` }, ...field.body, error, help);
        box.append(box2);
        parts[name] = { ...field, error, help, box: box2 };
      }
      form.append(box);
    }
    form.addEventListener("submit", (event) => event.preventDefault());

    function visible(name) {
      const { state } = figures;
      const custom = state.model === "custom";
      const latent = custom && state.kind === "latent";
      if (["kvheads", "dim", "window"].includes(name)) return custom && !latent;
      if (name === "windowed") return custom && !latent && state.window > 0;
      if (["rank", "rope"].includes(name)) return latent;
      if (fields[name].custom) return custom;
      if (name === "kv") return !custom && Model.hasKeys(figures.whole);
      if (name === "keys" || name === "values") return Model.hasKeys(figures.whole);
      if (name === "latent") return Model.isLatent(figures.whole);
      return true;
    }

    function refresh(name) {
      const { entry, slider, box } = parts[name];
      box.hidden = !visible(name);
      const { state } = figures;
      if (SELECTS.has(name)) {
        entry.value = state[name];
        return;
      }
      if (SEGMENTED.has(name)) {
        entry.querySelectorAll("input").forEach((radio) => { radio.checked = radio.value === state[name]; });
        return;
      }
      failed(name, "");
      const value = shown(name, figures);
      const focused = document.activeElement === entry && State.parse(fields[name], entry.value).value == state[name];
      if (!focused) entry.value = Words.plain(value);
      if (!slider) return;
      const steps = stepsOf(name, figures, data);
      slider.max = steps.length - 1;
      slider.value = nearest(steps, value);
      slider.setAttribute("aria-valuetext", Words.plain(value));
      const share = steps.length > 1 ? (100 * slider.value) / (steps.length - 1) : 0;
      slider.style.setProperty("--share", `${share}%`);
      const fixed = steps.length < 2;
      slider.disabled = fixed;
      entry.disabled = fixed && name === "kv";
    }

    return (next) => {
      figures = next;
      const { heads } = next;
      parts.kv.help.textContent = heads ? HELP.kv : "Layers of this model have different numbers of heads, so they stay as they are.";
      Object.keys(parts).forEach(refresh);
    };
  }

  return { build, make, tableOf };
})();
