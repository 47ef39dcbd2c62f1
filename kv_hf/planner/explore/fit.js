/* What fits into a device's memory, and how fast its bandwidth lets a decode step be: as kv_hf.planner.fit and roofline. */
"use strict";

const Fit = (() => {
  const { ITEM_BYTES, elements, indexerBytes, isPageable, layerPage, loadOf, predict, rowPages, runsOf, stateBytes } = Planner;
  const MOST_TOKENS = 2 ** 30; // what still fits at this size has no limit
  const MOST_ROWS = 2 ** 16; // larger batches are not searched
  const FAR_PAGES = 2 ** 13;

  /* Return the bytes of the weights on one of `devices` devices that share the model, or null where nobody knows them. */
  const weightBytes = (inventory, devices) =>
    inventory.weight_bytes ? Math.ceil(inventory.weight_bytes / devices)
      : inventory.parameters === null ? null : Math.ceil((inventory.parameters * ITEM_BYTES[inventory.dtype]) / devices);

  /* Return the largest n from 1 to `most` with cost(n) <= limit: 0 if none, null if `most` still fits. */
  function largest(cost, limit, most) {
    if (most < 1 || cost(1) > limit) return 0;
    let [low, high] = [1, 2];
    while (high < most && cost(high) <= limit) [low, high] = [high, high * 2];
    if (high >= most) {
      high = most;
      if (cost(most) <= limit) return null;
    }
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (cost(middle) <= limit) low = middle;
      else high = middle;
    }
    return low;
  }

  const pageSize = (cache, o) => (cache === "paged" ? o.page_size : 1);
  const exactTokens = (cache, o) => (cache === "paged" ? o.sink_tokens + o.recent_tokens : 0);

  /* Return the rows that hold so many whole pages in all, as evenly as they can. */
  function rowsOfPages(pages, batch, cache, o) {
    const [each, more] = [Math.floor(pages / batch), pages % batch];
    const kinds = [[each + 1, more], [each, batch - more]].map(
      ([count, rows]) => [exactTokens(cache, o) + count * pageSize(cache, o), rows]);
    return kinds.filter(([tokens, rows]) => tokens && rows);
  }

  /* Return { context, batch, resident }: null where nothing grows. */
  function find(inventory, cache, o, free, { rows, tokens }, formats) {
    const cost = (kinds) => predict(inventory, cache, o, loadOf(kinds), formats).total;
    const most = Math.floor(Math.max(0, MOST_TOKENS - exactTokens(cache, o)) / pageSize(cache, o));
    const pages = largest((n) => cost(rowsOfPages(n, rows, cache, o)), free, most);
    return {
      context: largest((n) => cost([[n, rows]]), free, MOST_TOKENS),
      batch: largest((n) => cost([[tokens, n]]), free, MOST_ROWS),
      resident: pages === null ? null : pages * pageSize(cache, o),
    };
  }

  /* Return bytes that one more token of one row costs in the long run; block tables are not counted. */
  function bytesPerToken(inventory, cache, o, formats) {
    const size = pageSize(cache, o);
    const widest = Math.max(0, ...runsOf(inventory).map((layer) => layer.window || 0));
    let pages = FAR_PAGES;
    while (pages * size <= 2 * widest) pages *= 2;
    const [near, far] = [1, 2].map((times) => {
      const load = loadOf([[exactTokens(cache, o) + pages * times * size, 1]]);
      const report = predict(inventory, cache, o, load, formats);
      return report.total - report.tables;
    });
    return (far - near) / (pages * size);
  }

  /* Round to the even neighbour at a half, as Python does. */
  function roundEven(value) {
    const down = Math.floor(value);
    if (value - down !== 0.5) return Math.round(value);
    return down % 2 ? down + 1 : down;
  }

  /* Return the bytes of `weights` bytes that a step of `rows` tokens reads: of routed experts the expected share. */
  function weightsRead(inventory, rows, weights) {
    if (weights === null || !inventory.expert_parameters || !inventory.parameters) return weights;
    const share = inventory.experts ? 1 - (1 - inventory.experts_per_token / inventory.experts) ** rows : 1;
    return roundEven(weights - ((weights * inventory.expert_parameters) / inventory.parameters) * (1 - share));
  }

  /* Return the bytes of a cache that a step reads: sealed tokens as they are stored, the others exact, a window's only. */
  function cacheRead(inventory, cache, o, { rows, tokens }, formats) {
    const itemBytes = ITEM_BYTES[inventory.dtype];
    const layers = runsOf(inventory);
    const hasLatents = layers.some((layer) => layer.latent);
    let bytes = 0;
    for (const layer of layers) {
      const seen = layer.window === null ? tokens : Math.min(tokens, layer.window);
      const plain = elements(layer) * itemBytes;
      let own = seen * plain;
      if (cache === "paged" && elements(layer) && isPageable(layer, hasLatents)) {
        const page = layerPage(layer, o, formats, itemBytes);
        const exact = Math.min(seen, rowPages(o, layer.window).exact(tokens));
        own = ((seen - exact) * (page.payload + page.scales)) / o.page_size + exact * plain;
      }
      const beside = tokens * indexerBytes(layer, itemBytes);
      bytes += layer.count * (layer.readers * (own + beside) + stateBytes(layer, itemBytes));
    }
    return roundEven(bytes * rows);
  }

  /* Return all that the table says of one cache, for what one device holds (Planner.shard).

     device: { bytes, bandwidth (bytes/s), weights (bytes, or null) }; load: { rows, tokens }. */
  function plan(inventory, cache, o, load, device, formats) {
    const report = predict(inventory, cache, o, loadOf([[load.tokens, load.rows]]), formats);
    const weights = device.weights || 0;
    const free = device.bytes - weights;
    const cacheBytes = cacheRead(inventory, cache, o, load, formats);
    const step = (weightsRead(inventory, load.rows, device.weights) || 0) + cacheBytes;
    return {
      report, weights, cacheBytes, step,
      fits: report.total <= free,
      perToken: bytesPerToken(inventory, cache, o, formats),
      ...find(inventory, cache, o, free, load, formats),
      tokensPerSecond: step ? load.rows / (step / device.bandwidth) : null,
    };
  }

  return { MOST_ROWS, bytesPerToken, cacheRead, find, largest, plan, weightBytes, weightsRead };
})();
