/* What a cache takes, worked out as kv_hf.planner.predict does. Pure numbers: knows no page, no document.

   An inventory is what Inventory.as_dict() gives: runs of equal layers, each with its "count". All rows of a batch hold
   the same number of tokens. Bytes are whole numbers below 2^53, so that doubles hold them exactly. */
"use strict";

const Planner = (() => {
  const ITEM_BYTES = { bfloat16: 2, float16: 2, float32: 4, int64: 8, int32: 4, uint8: 1, float64: 8, bool: 1 };
  const TABLE_BYTES = 4; // of an entry of a block table
  const PARTS = ["payload", "scales", "tail", "tables", "other"];
  const HYBRID = ["LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"];
  const PAGED = ["DynamicLayer", "DynamicSlidingWindowLayer", ...HYBRID];
  const INDEXED = "DynamicIndexedLayer";
  const SPARSE = "MiniMaxM3VLSparseCacheLayer";
  const WITHOUT_LENGTH = ["LinearAttentionLayer", "DummyLayer"];
  const CLASSES = [...PAGED, INDEXED, SPARSE, ...WITHOUT_LENGTH];
  const SLIDING = ["DynamicSlidingWindowLayer", HYBRID[1]];
  const COUNTER = 8; // bytes of a layer's number that lives in a tensor

  /* An option that does not fit a model: the reason is for people. */
  class Refused extends Error {}

  // -- inventories ---------------------------------------------------------------------------------------------

  const LAYER_DEFAULTS = {
    count: 1, cache_class: "DynamicLayer", kv_heads: 0, key_dim: 0, value_dim: 0, latent: false, window: null,
    index_dim: 0, index_dtype: null, index_positions: 0, states: [], readers: 1, query_heads: 0,
  };

  /* Return the runs of equal layers with all fields there. */
  const runsOf = (inventory) => inventory.layers.map((run) => ({ ...LAYER_DEFAULTS, ...run }));

  const elements = (layer) => layer.kv_heads * (layer.key_dim + layer.value_dim);

  /* Whether pages take the place of a layer; an indexed one without latents reads those of another. */
  const isPageable = (layer, hasLatents) =>
    PAGED.includes(layer.cache_class) || (layer.cache_class === INDEXED && (layer.latent || (hasLatents && !elements(layer))));

  /* Bytes of a token's indexer key. */
  const indexBytes = (layer, itemBytes) => layer.index_dim * (layer.index_dtype ? ITEM_BYTES[layer.index_dtype] : itemBytes);

  /* Bytes per token of all that an indexer keeps in transformers' own layers. */
  const indexerBytes = (layer, itemBytes) => indexBytes(layer, itemBytes) + layer.index_positions * ITEM_BYTES.int64;

  /* Whether a layer's keys and values have heads that a model can have fewer of, or devices share out. */
  const hasHeads = (layer) => elements(layer) > 0 && !layer.latent;

  const divisors = (whole) => Array.from({ length: whole }, (_, i) => i + 1).filter((n) => whole % n === 0);

  /* Return the kv heads that all layers with heads have, and what they may be; null where layers differ. */
  function headChoices(inventory) {
    const layers = runsOf(inventory).filter(hasHeads);
    const sizes = new Set(layers.map((layer) => `${layer.kv_heads}/${layer.query_heads}`));
    if (sizes.size !== 1 || !layers[0].query_heads) return null;
    return { own: layers[0].kv_heads, query: layers[0].query_heads, choices: divisors(layers[0].query_heads) };
  }

  const withLayers = (inventory, change) => ({ ...inventory, layers: runsOf(inventory).map(change) });

  /* Return the inventory with another number of kv heads in every layer that has heads; weights stay as they are. */
  function withHeads(inventory, kvHeads) {
    return withLayers(inventory, (run) => (hasHeads(run) ? { ...run, kv_heads: kvHeads } : run));
  }

  /* Return what one of `devices` devices holds: weights and heads are shared out, latents, indexer keys and states are
     whole on each, and so are heads where transformers' plan of the family (`cut`) does not cut them. */
  function shard(inventory, devices, cut = "split") {
    const part = (count) => (count === null ? count : Math.ceil(count / devices));
    const { parameters, expert_parameters: experts } = inventory;
    const shared = { ...inventory, parameters: part(parameters), expert_parameters: part(experts) };
    if (devices === 1 || cut === "whole") return shared;
    return withLayers(shared, (run) => {
      if (!hasHeads(run)) return run;
      if (run.kv_heads % devices) {
        throw new Refused(`${run.kv_heads} kv heads cannot be shared out evenly over ${devices} devices`);
      }
      return { ...run, kv_heads: run.kv_heads / devices, query_heads: run.query_heads / devices };
    });
  }

  /* Return an inventory of numbers that somebody typed. */
  function customInventory(given) {
    const base = given.rank
      ? { kv_heads: 1, key_dim: given.rank, value_dim: given.rope, latent: true, query_heads: given.heads }
      : { kv_heads: given.kvheads, key_dim: given.dim, value_dim: given.dim, query_heads: given.heads };
    const sliding = given.window && !given.rank ? Math.min(given.windowed, given.layers) : 0;
    const layers = [];
    if (sliding) {
      layers.push({ count: sliding, cache_class: "DynamicSlidingWindowLayer", window: given.window, ...base });
    }
    if (given.layers > sliding) layers.push({ count: given.layers - sliding, ...base });
    return {
      name: "custom", model_type: "custom", dtype: "bfloat16", layers, parameters: Math.round(given.billions * 1e9),
      expert_parameters: 0, experts: 0, experts_per_token: 0, max_positions: null, source: "", how: "fields",
    };
  }

  // -- pages ---------------------------------------------------------------------------------------------------

  /* Return the codes that share a byte; of 3 bits those that fill whole bytes: kv_hf.formats.Scheme.codes_per_byte. */
  const codesPerByte = (scheme) => (scheme.bits === 3 ? 8 : scheme.bits ? Math.max(1, Math.floor(8 / scheme.bits)) : 1);

  /* Return how many channels are wide: kv_hf.formats.Scheme.wide_channels behind `resolve`. */
  function wideChannels(scheme, dim) {
    if (!scheme.wide_bits) return 0;
    for (const unit of [32, 8]) {
      const fit = [];
      for (let wide = 1; wide <= dim; wide += 1) {
        if ((wide * scheme.wide_bits) % unit === 0 && ((dim - wide) * scheme.bits) % unit === 0) fit.push(wide);
      }
      const most = fit.filter((wide) => wide <= scheme.wide_part * dim);
      if (fit.length) return most.length ? most[most.length - 1] : fit[0];
    }
    return 0;
  }

  function groupSize(asked, whole) {
    if (asked >= 0) return asked || whole;
    let size = Math.min(-asked, whole);
    while (whole % size) size -= 1;
    return size;
  }

  /* Return the bytes of one page of one side: { payload, scales }. `scheme` is as page.py lists it. */
  function pageBytes(scheme, heads, dim, pageSize, itemBytes) {
    if (scheme.code === "none") return { payload: heads * pageSize * dim * itemBytes, scales: 0 };
    if (dim % codesPerByte(scheme)) {
      const into = scheme.bits === 3 ? "bytes" : "a byte";
      throw new Refused(`${scheme.name} packs ${codesPerByte(scheme)} numbers into ${into}, ${dim} is not a multiple of it`);
    }
    let scales = 0;
    for (const group of [scheme.scale_group, scheme.offset_group]) {
      if (!group) continue;
      const [tokens, channels] = [groupSize(group[0], pageSize), groupSize(group[1], dim)];
      if (pageSize % tokens || dim % channels) {
        throw new Refused(`${scheme.name} has groups of ${channels} numbers, which do not divide ${dim}`);
      }
      scales += heads * (pageSize / tokens) * (dim / channels) * (scheme.scale_bits / 8);
    }
    const wide = wideChannels(scheme, dim);
    if (wide) scales += heads * dim * (dim <= 256 ? 1 : 2); // the order of the channels
    return { payload: (heads * pageSize * ((dim - wide) * scheme.bits + wide * scheme.wide_bits)) / 8, scales };
  }

  /* Return the pages that storage allocates for `pages`: kv_hf.spec.page_capacity. */
  function pageCapacity(pages) {
    if (pages <= 256) return pages;
    let power = 256;
    while (power < pages) power *= 2;
    const step = power / 256;
    return Math.ceil(pages / step) * step;
  }

  /* Pages of one row by its tokens: kv_hf.row_pages.RowPages and kv_hf.geometry, which a test compares over one table of cases. */
  function rowPages(o, window) {
    const [size, kept] = [o.page_size, o.sink_tokens + o.recent_tokens];
    const sealed = (tokens) => Math.floor(Math.max(0, tokens - kept) / size);
    const dropped = (tokens) =>
      window === null ? 0 : Math.min(Math.floor(Math.max(0, tokens - window + 1 - o.sink_tokens) / size), sealed(tokens));
    const held = (tokens) => sealed(tokens) - dropped(tokens);
    const exact = (tokens) => tokens - sealed(tokens) * size;
    // a step seals its page before it gives back those that left the window
    const inUse = (tokens) => {
      const before = Math.max(0, tokens - 1);
      return sealed(tokens) - dropped(before) - Math.max(0, dropped(tokens) - sealed(before));
    };
    return { size, kept, window, slots: kept + size, sealed, dropped, held, exact, inUse };
  }

  const sum = (kinds, of) => kinds.reduce((total, [tokens, count]) => total + of(tokens) * count, 0);

  /* Return the most pages that are in use at once in the `steps` single tokens behind a prompt, or in the prompt. */
  function mostInUse(row, kinds, steps) {
    const starts = kinds.map(([tokens]) => tokens - steps);
    let most = sum(kinds, (tokens) => row.held(Math.max(0, tokens - steps)));
    // past their window rows repeat with every page; before any row drops a page, they only grow
    const last = Math.min(steps, Math.max(0, row.window + row.slots - Math.min(...starts)) + 2 * row.size);
    const from = Math.max(1, Math.min(row.window - 2 * row.size - Math.max(...starts), last - row.size + 1));
    const remainder = (value) => ((value % row.size) + row.size) % row.size;
    for (const due of new Set(starts.map((start) => remainder(row.kept - start)))) {
      for (let step = from + remainder(due - from); step <= last; step += row.size) {
        most = Math.max(most, sum(kinds, (tokens) => row.inUse(Math.max(0, tokens - steps + step))));
      }
    }
    return most;
  }

  /* Return the pages of rows: held in each kind, room allocated. kv_hf.row_pages.page_use: with a sliding window and no
     prompt given, the most that any prompt leads to. */
  function pageUse(row, kinds, prompt) {
    const longest = Math.max(...kinds.map(([tokens]) => tokens));
    const steps = longest - (prompt === null ? Math.min(1, longest) : prompt);
    let held = row.held;
    let most = sum(kinds, row.held);
    if (row.window !== null) {
      most = mostInUse(row, kinds, steps);
      if (prompt === null) {
        held = (tokens) => {
          let best = 0;
          for (let one = Math.max(0, tokens - row.size); one <= tokens; one += 1) best = Math.max(best, row.held(one));
          return best;
        };
      }
    }
    return {
      held: sum(kinds, held), width: Math.max(...kinds.map(([tokens]) => held(tokens))), allocated: pageCapacity(most),
    };
  }

  /* Return the schemes of both sides of a layer: keys and values, or latents and their RoPE keys. */
  function schemesOf(layer, o, formats) {
    if (!layer.latent) return [formats.keys[o.keys], formats.values[o.values]];
    const name = o.latent || o.keys;
    if (!o.latent && o.keys !== o.values) {
      throw new Refused("latents are keys and values at once: they have one format");
    }
    if (!formats.latent[name]) throw new Refused(`latents cannot be stored in ${name}, which is a format of one side`);
    const kRope = o.k_rope || (layer.value_dim ? formats.latent[name].k_rope : "exact");
    return [formats.latent[name], formats.keys[kRope]];
  }

  /* Return { payload, scales } of one page of one layer. */
  function layerPage(layer, o, formats, itemBytes) {
    const [first, second] = schemesOf(layer, o, formats);
    const keys = pageBytes(first, layer.kv_heads, layer.key_dim, o.page_size, itemBytes);
    const values = layer.value_dim
      ? pageBytes(second, layer.kv_heads, layer.value_dim, o.page_size, itemBytes)
      : { payload: 0, scales: 0 };
    return { payload: keys.payload + values.payload, scales: keys.scales + values.scales };
  }

  // -- caches --------------------------------------------------------------------------------------------------

  const emptyReport = () => ({
    payload: 0, scales: 0, tail: 0, tables: 0, other: 0, pages_held: 0, pages_allocated: 0, tokens: 0,
    empty: { payload: 0, scales: 0, tail: 0, other: 0 },
  });

  const stateBytes = (layer, itemBytes) =>
    layer.states.reduce(
      (total, state) =>
        total + state.shape.reduce((a, b) => a * b, 1) * (state.dtype ? ITEM_BYTES[state.dtype] : itemBytes), 0);

  /* Return the columns of transformers' own layer that count. A growing one keeps a view of all that its last forward
     saw: in a DynamicCache what that keeps alive counts, beside pages the view. */
  function ownColumns({ window }, { longest, prompt }, cache) {
    if (window === null) return longest;
    if (cache === "static") return Math.min(longest, window);
    if (window === 1 || (cache === "dynamic" && prompt === longest)) return longest;
    return Math.min(longest, cache === "dynamic" ? window : window - 1);
  }

  /* Return { payload, other, empty } of transformers' own layers: rows as long as the longest, padded on the left. */
  function ownLayer(layer, load, itemBytes, cache) {
    const { longest, rows } = load;
    const isStatic = cache === "static";
    const held = ownColumns(layer, load, cache);
    const perToken = elements(layer) * itemBytes;
    const index = indexerBytes(layer, itemBytes);
    let counters = SLIDING.includes(layer.cache_class) ? 1 : 0;
    if (isStatic) {
      counters = (WITHOUT_LENGTH.includes(layer.cache_class) ? 0 : 1) + (layer.cache_class === SPARSE || layer.index_dim ? 1 : 0);
    }
    return {
      payload: layer.count * rows * held * perToken,
      other: layer.count * (rows * (stateBytes(layer, itemBytes) + longest * index) + counters * COUNTER),
      empty: {
        payload: layer.count * sum(load.kinds, (tokens) => held - Math.min(tokens, held)) * perToken,
        other: layer.count * sum(load.kinds, (tokens) => longest - tokens) * index,
      },
    };
  }

  /* Return the columns that indexer keys beside pages have room for; without a prompt, at most. */
  function indexRoom(columns, prompt) {
    let room = prompt === null ? columns - 1 : prompt;
    while (room > 0 && room < columns) room += 1 + Math.floor((room + 1) / 8) + 64;
    return Math.max(room, columns);
  }

  function addPages(report, layer, load, row, use, o, formats, itemBytes) {
    const page = layerPage(layer, o, formats, itemBytes);
    const slot = elements(layer) * itemBytes;
    const { count } = layer;
    report.payload += count * use.allocated * page.payload;
    report.scales += count * use.allocated * page.scales;
    report.tail += count * load.rows * row.slots * slot;
    const free = use.allocated - use.held;
    report.empty.payload += count * free * page.payload;
    report.empty.scales += count * free * page.scales;
    report.empty.tail += count * sum(load.kinds, (tokens) => row.slots - row.exact(tokens)) * slot;
  }

  /* Return rows as `predict` takes them: kinds of [tokens, rows that hold so many]. */
  function loadOf(kinds, prompt = null) {
    return {
      kinds, prompt, rows: kinds.reduce((total, [, count]) => total + count, 0),
      longest: Math.max(...kinds.map(([tokens]) => tokens)), tokens: sum(kinds, (tokens) => tokens),
    };
  }

  function checkClasses(layers, cache) {
    const unknown = layers.find((layer) => !CLASSES.includes(layer.cache_class));
    if (unknown) throw new Refused(`the bytes of a ${unknown.cache_class} are not known`);
    const hasLatents = layers.some((layer) => layer.latent);
    if (cache === "paged" && !layers.some((layer) => isPageable(layer, hasLatents))) {
      throw new Refused("no attention layer that pages could hold");
    }
  }

  /* Return the bytes of a cache by part, as kv_hf.spec.MemoryReport names them, and in `empty` the bytes of these that
     are room without a token in it. Throws Refused where a format does not fit.

     cache: "dynamic", "static" or "paged"; o: options of CacheConfig; load: of `loadOf`. */
  function predict(inventory, cache, o, load, formats) {
    const itemBytes = ITEM_BYTES[inventory.dtype];
    const report = emptyReport();
    report.tokens = load.tokens;
    const layers = runsOf(inventory);
    checkClasses(layers, cache);
    const hasLatents = layers.some((layer) => layer.latent);
    const groups = new Map();
    for (const layer of layers) {
      if (cache !== "paged" || !isPageable(layer, hasLatents)) {
        const own = ownLayer(layer, load, itemBytes, cache);
        // what is in no page counts as other in a paged cache
        report[cache === "paged" ? "other" : "payload"] += own.payload;
        report.other += own.other;
        report.empty[cache === "paged" ? "other" : "payload"] += own.empty.payload;
        report.empty.other += own.empty.other;
        continue;
      }
      if (elements(layer)) {
        const row = rowPages(o, layer.window);
        if (!groups.has(layer.window)) groups.set(layer.window, pageUse(row, load.kinds, load.prompt));
        addPages(report, layer, load, row, groups.get(layer.window), o, formats, itemBytes);
      }
      const index = layer.count * indexBytes(layer, itemBytes);
      const room = load.rows * indexRoom(load.longest, load.prompt);
      report.other += room * index + layer.count * load.rows * stateBytes(layer, itemBytes);
      report.empty.other += (room - load.tokens) * index;
    }
    for (const use of groups.values()) {
      report.pages_held += use.held;
      report.pages_allocated += use.allocated;
      report.tables += load.rows * use.width * TABLE_BYTES;
    }
    report.total = PARTS.reduce((total, part) => total + report[part], 0);
    report.waste = Object.values(report.empty).reduce((a, b) => a + b, 0);
    return report;
  }

  return {
    ITEM_BYTES, LAYER_DEFAULTS, PARTS, Refused, customInventory, divisors, elements, hasHeads, headChoices, indexerBytes,
    isPageable, layerPage, loadOf, pageCapacity, predict, rowPages, runsOf, shard, stateBytes, withHeads,
  };
})();
