/* From what somebody chose to all that the page shows: one inventory, its caches, their figures. No document. */
"use strict";

const Model = (() => {
  const GIB = 2 ** 30;
  const FIRST_CONTEXT = 128;
  const LAST_CONTEXT = 4194304;

  /* Return n, 8 of them in every octave: 16, 18, 20, .. 32, 36, .. */
  function ladder(low, high, perOctave = 8) {
    const found = new Set([low, high]);
    for (let base = 1; base <= high; base *= 2) {
      for (let part = 0; part < perOctave; part += 1) {
        const value = base + Math.floor((base * part) / perOctave);
        if (value > low && value < high) found.add(value);
      }
    }
    return [...found].sort((a, b) => a - b);
  }

  const presetOf = (state, data) => data.models.find((model) => model.id === state.model);

  /* Return the inventory of the whole model: with the chosen dtype, and the model's own kv heads. */
  function ownInventory(state, data) {
    const preset = presetOf(state, data);
    const base = preset ? preset.inventory : Planner.customInventory({ ...state, rank: state.kind === "latent" ? state.rank : 0 });
    return state.dtype === "model" ? base : { ...base, dtype: state.dtype };
  }

  /* Return the inventory of the whole model as it was chosen. */
  function inventoryOf(state, data) {
    const own = ownInventory(state, data);
    return state.kv ? Planner.withHeads(own, state.kv) : own;
  }

  /* Return what somebody chose as far as it goes together, and what was changed for it. */
  function settle(given, data) {
    const state = { ...given };
    const problems = [];
    const change = (name, value, reason) => {
      state[name] = value;
      problems.push(reason);
    };
    const device = data.devices.find((one) => one.id === state.device);
    if (device) [state.memory, state.bandwidth] = [device.gib, device.gbs];
    if (state.model === "custom" && state.kind === "attention" && state.heads % state.kvheads) {
      const least = Planner.divisors(state.heads).filter((n) => n <= state.kvheads).pop();
      change("kvheads", least, `${state.kvheads} kv heads do not divide ${state.heads} query heads: took ${least}`);
    }
    if (state.model === "custom" && state.windowed > state.layers) {
      change("windowed", state.layers, `only ${state.layers} layers can have a sliding window`);
    }
    const heads = Planner.headChoices(ownInventory(state, data));
    if (state.kv && (!heads || !heads.choices.includes(state.kv))) {
      const reason = heads ? `is no divisor of ${heads.query} query heads` : "cannot be chosen for this model";
      change("kv", 0, `kv=${state.kv} ${reason}: took the model’s own`);
    }
    if (heads && state.kv === heads.own) state.kv = 0;
    try {
      Planner.shard(inventoryOf(state, data), state.tp, cutOf(state, data));
    } catch (error) {
      if (!(error instanceof Planner.Refused)) throw error;
      change("tp", 1, `${error.message}: took one device`);
    }
    return { state, problems };
  }

  /* What transformers' tensor parallel plan does with kv heads: "split", "whole" or "unknown". */
  const cutOf = (state, data) => (presetOf(state, data) || { cut: "unknown" }).cut;

  const isLatent = (inventory) => Planner.runsOf(inventory).some((run) => run.latent);
  const hasKeys = (inventory) => Planner.runsOf(inventory).some(Planner.hasHeads);

  /* Return the caches of the table: { id, label, cache, o }, the last one as the person mixed it. */
  function cachesOf(state, inventory, data) {
    const sizes = { page_size: Number(state.page), sink_tokens: state.sinks, recent_tokens: state.recent };
    const plain = ["dynamic", "static"].map((id) => ({ id, cache: id, label: data.labels[id], o: sizes }));
    const latent = isLatent(inventory);
    const paged = data.caches.filter((one) => !latent || one.latent).map((one) => ({
      id: one.name, cache: "paged", label: one.name,
      o: { ...sizes, keys: one.keys, values: one.values, latent: latent ? one.latent : null, k_rope: null },
    }));
    const parts = hasKeys(inventory) ? [`${state.keys} keys, ${state.values} values`] : [];
    if (latent) parts.push(`${state.latent} latents`);
    const mix = {
      id: "mix", cache: "paged", label: "your mix", note: parts.join(", "),
      o: { ...sizes, keys: state.keys, values: state.values, latent: latent ? state.latent : null, k_rope: null },
    };
    return [...plain, ...paged, mix];
  }

  /* Return the contexts that the curve is drawn over. */
  function contextsOf(state, inventory) {
    let last = 131072;
    while (last < Math.max(state.context, inventory.max_positions || 0) && last < LAST_CONTEXT) last *= 2;
    return ladder(Math.min(FIRST_CONTEXT, state.context), last);
  }

  function attempt(work) {
    try {
      return { found: work() };
    } catch (error) {
      if (!(error instanceof Planner.Refused)) throw error;
      return { error: error.message };
    }
  }

  /* Return all figures of a settled state. */
  function compute(state, data) {
    const whole = inventoryOf(state, data);
    const inventory = Planner.shard(whole, state.tp, cutOf(state, data));
    const load = { rows: state.batch, tokens: state.context };
    const weights = Fit.weightBytes(whole, state.tp);
    const known = data.devices.find((one) => one.id === state.device);
    const device = { bytes: known ? known.bytes : Math.floor(state.memory * GIB), bandwidth: state.bandwidth * 1e9, weights };
    const contexts = contextsOf(state, inventory);
    const caches = cachesOf(state, inventory, data).map((one) => {
      const { found, error } = attempt(() => Fit.plan(inventory, one.cache, one.o, load, device, data.formats));
      if (error) return { ...one, error };
      const curve = contexts.map(
        (tokens) => Planner.predict(inventory, one.cache, one.o, Planner.loadOf([[tokens, state.batch]]), data.formats).total);
      return { ...one, plan: found, curve };
    });
    const dynamic = caches[0].plan;
    for (const one of caches) if (one.plan) one.plan.ratio = one.plan.report.total ? dynamic.report.total / one.plan.report.total : 1;
    const degrees = Planner.divisors(64).filter((n) => !attempt(() => Planner.shard(whole, n, cutOf(state, data))).error);
    return { state, whole, inventory, degrees, device, weights, contexts, caches, heads: Planner.headChoices(ownInventory(state, data)) };
  }

  return { GIB, cachesOf, compute, contextsOf, cutOf, hasKeys, inventoryOf, isLatent, ladder, presetOf, settle };
})();
