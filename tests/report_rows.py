"""Rows as a run of the whole grid would leave them: three models, sixteen caches, every kind of row. The figures are made up."""

import math

COMMON = {
    "date": "2026-11-21",
    "commit": "0123abc",
    "machine": "AMD EPYC, 2 cores",
    "versions": {
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "transformers": "5.23.0",
        "hqq": "0.2.8",
    },
    "dtype": "float32",
    "device": "cpu",
    "seed": 0,
    "seconds": 12.5,
}
PROTOCOL = {
    "text": "lincoln_1862",
    "windows": 4,
    "window": 1536,
    "prompt": 512,
    "protocol": "teacher forced, decode semantics",
    "bytes_dtype": "bfloat16",
}
# cache -> (stored bits, mean KL, change of perplexity in percent, first different token)
CACHES = {
    "dynamic": (16.0, 0.0, 0.0, 96.0),
    "paged_exact": (16.03, 2.9e-9, 0.0, 96.0),
    "paged_fp8": (8.42, 0.00042, 0.05, 40.0),
    "paged_int8": (8.44, 0.00006, 0.01, 60.0),
    "paged_int4": (5.24, 0.0030, 0.22, 31.0),
    "paged_int2": (3.25, 0.17, 17.9, 6.0),
    "paged_int4:keys=int8,recent_tokens=32": (6.9, 0.0011, 0.12, 36.0),
    "quanto_int4": (5.46, 0.0144, 1.7, 6.8),
    "quanto_int2": (3.62, 1.84, 565.0, 1.2),
    "hqq_int8": (9.12, 0.00004, 0.02, 70.0),
    "hqq_int4": (5.46, 0.0112, 1.1, 9.0),
    "hqq_int2": (3.63, 1.55, 380.0, 1.4),
    "quantized_fp8": (8.62, 0.0022, -0.09, 13.5),
    "recipe:smollm2-4.5bits": (4.5, 0.0041, 0.35, 28.0),
    "recipe:smollm2-3.5bits": (3.5, 0.03, 2.5, 12.0),
}
MODELS = {
    # model -> (factor on KL, numbers stored per token, layers)
    "smollm2-135m": (1.0, 11520, 30),
    "qwen2.5-coder-1.5b": (1.7, 14336, 28),
    "gemma-3-270m": (0.6, 9216, 18),
}


def accuracy_row(model="smollm2-135m", cache="paged_int4", **changed):
    """Return one row of kind "accuracy"."""
    factor, numbers, _ = MODELS.get(model, (1.0, 11520, 30))
    bits, kl, delta, divergence = CACHES.get(cache, CACHES["paged_int4"])
    kl, delta = kl * factor, delta * factor
    spread = 0.18 + 0.1 * math.sin(len(cache))
    exact = cache in ("dynamic", "paged_exact")
    return {
        **COMMON,
        **PROTOCOL,
        "kind": "accuracy",
        "model": model,
        "model_revision": "main",
        "cache": cache,
        "tokens": 4096,
        "kl_mean": kl,
        "kl_low": kl * (1 - spread),
        "kl_high": kl * (1 + spread),
        "kl_median": kl * 0.41,
        "kl_p99": kl * 9.3,
        "top1": max(0.25, 1 - 0.9 * kl**0.5),
        "perplexity": 22.27 * (1 + delta / 100),
        "perplexity_exact": 22.27,
        "perplexity_delta": delta,
        "perplexity_delta_low": delta - (0.0 if exact else 0.03 + 0.2 * abs(delta)),
        "perplexity_delta_high": delta + (0.0 if exact else 0.04 + 0.22 * abs(delta)),
        "divergence_mean": divergence,
        "divergence_median": divergence - 0.5,
        "divergence_tokens": 96,
        "bits_per_element": None if exact or not cache.startswith("paged") else bits - 0.24,
        "stored_bits": bits,
        "bytes_per_token": bits * numbers / 8,
        "bytes": int(bits * numbers / 8 * 1536),
        "bytes_exact": numbers * 2 * 1536,
        "cell": f"{model}-{cache}",
        **changed,
    }


def sensitivity_rows(model="smollm2-135m", formats=("int8", "int4", "int2")):
    """Return a row per layer, side and format."""
    _, _, layers = MODELS[model]
    rows = []
    for number, name in enumerate(formats):
        for layer in range(layers):
            for side, weight in (("keys", 1.0), ("values", 0.12)):
                wave = 1.2 + math.sin(layer * 1.7 + number) + (4 if layer == layers // 3 else 0)
                rows.append(
                    {
                        **COMMON,
                        **PROTOCOL,
                        "kind": "sensitivity",
                        "model": model,
                        "model_revision": "main",
                        "layer": layer,
                        "side": side,
                        "format": name,
                        "kl_mean": 4e-6 * 60**number * weight * wave,
                        "bytes_per_token": 384 / 2**number,
                    }
                )
    return rows


def task_rows(
    model="smollm2-135m",
    tasks=(("hellaswag", "acc_norm"), ("arc_easy", "acc"), ("gsm8k", "exact_match")),
):
    """Return a row per task and cache."""
    rows = []
    for number, (task, metric) in enumerate(tasks):
        for cache, (bits, kl, _, _) in CACHES.items():
            value = max(0.02, (0.43, 0.58, 0.31)[number] - 0.11 * min(2.0, kl) ** 0.6)
            rows.append(
                {
                    **COMMON,
                    "kind": "task",
                    "model": model,
                    "model_revision": "main",
                    "cache": cache,
                    "task": task,
                    "metric": metric,
                    "value": value,
                    "stderr": (value * (1 - value) / 200) ** 0.5,
                    "samples": 200,
                    "num_fewshot": None,
                    "bytes_per_token": bits * 1440,
                }
            )
    return rows


def needle_rows(
    model="smollm2-135m", caches=("dynamic", "paged_int4", "quanto_int4", "quanto_int2")
):
    """Return a row per cache, length and depth."""
    rows = []
    for cache in caches:
        loss = min(1.0, CACHES[cache][1] * 3)
        for length in (512, 1024, 2048, 4096, 8192):
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
                score = max(0.0, 1 - loss - (0.2 if length == 8192 and depth == 0.25 else 0))
                rows.append(
                    {
                        **COMMON,
                        "kind": "needle",
                        "model": model,
                        "model_revision": "main",
                        "cache": cache,
                        "task": "single needle",
                        "length": length,
                        "depth": depth,
                        "score": score,
                        "samples": 10,
                    }
                )
    return rows


def memory_rows(model="smollm2-135m"):
    """Return a row per cache."""
    rows = []
    for number, (cache, (bits, *_)) in enumerate(CACHES.items()):
        held = int(bits * 1440 * 4096)
        step = 21.0 + 1.3 * number
        rows.append(
            {
                **COMMON,
                "kind": "memory",
                "model": model,
                "cache": cache,
                "context": 4096,
                "batch": 1,
                "prefill_tokens_per_s": 412.5 - 9 * number,
                "decode_tokens_per_s": 1000 / step,
                "step_ms_p50": step,
                "step_ms_p20": step - 1.1,
                "step_ms_p80": step + 2.3,
                "steps": 32,
                "threads": 2,
                "held_bytes": held,
                "payload_bytes": int(held * 0.8),
                "scales_bytes": held - int(held * 0.8),
                "tail_bytes": 0,
                "steps_peak_bytes": held + 1_000_000,
                "rss_bytes": held,
            }
        )
    return rows


def all_rows():
    """Return rows of all kinds, about what a full run writes."""
    rows = [accuracy_row(model, cache) for model in MODELS for cache in CACHES]
    for model in MODELS:
        rows += sensitivity_rows(model)
    return rows + task_rows() + needle_rows() + memory_rows() + task_rows("gemma-3-270m")
