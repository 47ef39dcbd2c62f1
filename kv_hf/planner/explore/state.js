/* What somebody chose, and the part of the address behind "#" that says it. Knows no document. */
"use strict";

const State = (() => {
  const whole = (low, high) => ({ kind: "whole", low, high });
  const number = (low, high) => ({ kind: "number", low, high });
  const choice = (options) => ({ kind: "choice", options });
  const flag = () => ({ kind: "choice", options: ["0", "1"] });

  const DTYPES = ["bfloat16", "float16", "float32"];
  const KINDS = ["attention", "latent"];

  /* Return the fields by name: their limits, what they are called, and their default. */
  function fieldsOf(data) {
    const { defaults } = data;
    const names = data.models.map((model) => model.id).concat("custom");
    return {
      model: { ...choice(names), label: "Model", initial: defaults.model },
      layers: { ...whole(1, 1024), label: "Layers", initial: 32, custom: true },
      heads: { ...whole(1, 1024), label: "Query heads", initial: 32, custom: true },
      kvheads: { ...whole(1, 1024), label: "KV heads", initial: 8, custom: true },
      dim: { ...whole(1, 4096), label: "Head size", initial: 128, custom: true },
      billions: { ...number(0.001, 10000), label: "Weights, billions", initial: 8, custom: true },
      window: { ...whole(0, 1048576), label: "Sliding window, tokens", initial: 0, custom: true },
      windowed: { ...whole(0, 1024), label: "Layers with that window", initial: 0, custom: true },
      kind: { ...choice(KINDS), label: "Attention caches", initial: "attention", custom: true },
      rank: { ...whole(1, 8192), label: "Latent rank", initial: 512, custom: true },
      rope: { ...whole(0, 1024), label: "RoPE dimensions", initial: 64, custom: true },
      dtype: { ...choice(["model", ...DTYPES]), label: "Data type", initial: "model" },
      batch: { ...whole(1, 4096), label: "Batch, rows", initial: defaults.batch },
      context: { ...whole(1, 4194304), label: "Context, tokens", initial: defaults.context },
      kv: { ...whole(0, 1024), label: "KV heads", initial: 0 }, // 0: as the model has them
      page: { ...choice(data.page_sizes.map(String)), label: "Page size, tokens", initial: String(defaults.page_size) },
      keys: { ...choice(Object.keys(data.formats.keys)), label: "Keys", initial: defaults.keys },
      values: { ...choice(Object.keys(data.formats.values)), label: "Values", initial: defaults.values },
      latent: { ...choice(data.latent_format_names), label: "Latents", initial: defaults.latent },
      sinks: { ...whole(0, 1024), label: "Exact first tokens", initial: defaults.sink_tokens },
      recent: { ...whole(0, 4096), label: "Exact recent tokens", initial: defaults.recent_tokens },
      device: { ...choice(data.devices.map((one) => one.id).concat("own")), label: "Device", initial: defaults.device },
      memory: { ...number(0.1, 100000), label: "Memory, GiB", initial: defaults.memory },
      bandwidth: { ...number(1, 1000000), label: "Bandwidth, GB/s", initial: defaults.bandwidth },
      tp: { ...whole(1, 1024), label: "Tensor parallel, devices", initial: 1 },
      weights: { ...flag(), label: "Show weights", initial: "1" },
      scale: { ...choice(["log", "linear"]), label: "Scale", initial: "log" },
      exact: { ...flag(), label: "Exact bytes", initial: "0" },
    };
  }

  const group = (n) => String(n).replace(/\B(?=(\d{3})+(?!\d))/g, ",");

  /* Say what a field takes. */
  function wanted(field) {
    if (field.kind === "choice") return `one of ${field.options.join(", ")}`;
    const what = field.kind === "whole" ? "a whole number" : "a number";
    return `${what} from ${group(field.low)} to ${group(field.high)}`;
  }

  /* Return { value } of a text, or { error }. */
  function parse(field, text) {
    const given = String(text).trim();
    if (field.kind === "choice") {
      return field.options.includes(given) ? { value: given } : { error: wanted(field) };
    }
    const shape = field.kind === "whole" ? /^\d{1,12}$/ : /^(\d{1,12}(\.\d{0,6})?|\.\d{1,6})$/;
    const plain = given.replace(/(\d)[,_ ](?=\d{3}(\D|$))/g, "$1");
    const value = shape.test(plain) ? Number(plain) : NaN;
    return value >= field.low && value <= field.high ? { value } : { error: wanted(field) };
  }

  const initial = (fields) => Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.initial]));

  /* Return what the page's address says: { state, problems }. What cannot be read is left at its default. */
  function fromHash(hash, fields) {
    const state = initial(fields);
    const problems = [];
    for (const part of hash.replace(/^#/, "").split("&").filter(Boolean)) {
      const [name, ...rest] = part.split("=");
      let text;
      try {
        text = decodeURIComponent(rest.join("="));
      } catch {
        text = rest.join("=");
      }
      if (!Object.hasOwn(fields, name)) {
        problems.push(`“${name.slice(0, 40)}” is nothing that this page knows`);
        continue;
      }
      const found = parse(fields[name], text);
      if (found.error) problems.push(`${name}=${text.slice(0, 40)} is not ${found.error}`);
      else state[name] = found.value;
    }
    return { state, problems };
  }

  /* Return what `fromHash` reads back: fields at their defaults are left out, and numbers of no custom model. */
  function toHash(state, fields) {
    const parts = [];
    for (const [name, field] of Object.entries(fields)) {
      if (field.custom && state.model !== "custom") continue;
      if (state[name] !== field.initial) parts.push(`${name}=${encodeURIComponent(state[name])}`);
    }
    return parts.join("&");
  }

  return { fieldsOf, fromHash, initial, parse, toHash, wanted };
})();
