"""Random inventories and loads, to compare the planner's page with the planner."""

import random

from kv_hf.formats import K_ROPE_FORMAT_NAMES, LATENT_FORMAT_NAMES, format_names
from kv_hf.planner.inventory import CachedLayer, Inventory, State

FAMILIES = ("llama", "gemma3_text", "deepseek_v3", "falcon", "nobody-knows")
DTYPES = ("bfloat16", "float16", "float32")
KINDS = (
    "mha",
    "gqa",
    "mqa",
    "sliding",
    "chunked",
    "latent",
    "indexed",
    "hybrid",
    "shared",
    "mixed",
)


def random_inventory(rng: random.Random, kind: str, most_layers: int = 6) -> Inventory:
    """Return an inventory of one of KINDS."""
    experts = rng.choice((0, 0, 8, 60))
    parameters = rng.choice((None, rng.randrange(10**6, 10**9)))
    known = parameters or 0
    return Inventory(
        name=kind,
        model_type=rng.choice(FAMILIES),
        dtype=rng.choice(DTYPES),
        layers=_layers(rng, kind, rng.randint(1, most_layers)),
        parameters=parameters,
        expert_parameters=known * 3 // 4 if experts else 0,
        experts=experts,
        experts_per_token=rng.randint(1, 4) if experts else 0,
        max_positions=rng.choice((None, 4096)),
        source="random",
        weight_bytes=rng.choice((None, None, rng.randrange(10**6, 10**9))),
    )


def _layers(rng: random.Random, kind: str, count: int) -> tuple[CachedLayer, ...]:
    heads = rng.choice((4, 8, 16))
    dim = rng.choice((16, 32, 64, 80, 96, 128))
    kv_heads = {"mha": heads, "mqa": 1}.get(kind, rng.choice((2, 4)))
    full = CachedLayer(kv_heads=kv_heads, key_dim=dim, value_dim=dim, query_heads=heads)
    window = rng.choice((1, 2, 17, 128, 700, 4096))
    sliding = CachedLayer(
        "DynamicSlidingWindowLayer", kv_heads, dim, dim, window=window, query_heads=heads
    )
    rank, rope = rng.choice((64, 128, 512)), rng.choice((0, 32, 64))
    latent = CachedLayer(kv_heads=1, key_dim=rank, value_dim=rope, latent=True, query_heads=heads)
    indexed = CachedLayer(
        "DynamicIndexedLayer",
        1,
        rank,
        rope,
        latent=True,
        index_dim=32,
        index_dtype=rng.choice((None, "float32")),
        index_positions=rng.choice((0, 0, 3)),
        query_heads=heads,
    )
    states = (State((dim, 4)), State((heads, dim, dim), rng.choice(("float32", "bfloat16"))))
    linear = CachedLayer("LinearAttentionLayer", states=states)
    both = CachedLayer(
        "LinearAttentionAndFullAttentionLayer", kv_heads, dim, dim, states=states, query_heads=heads
    )
    windowed = CachedLayer(
        "LinearAttentionAndSlidingWindowAttentionLayer",
        kv_heads,
        dim,
        dim,
        window=window,
        states=states,
        query_heads=heads,
    )
    sparse = CachedLayer(
        "MiniMaxM3VLSparseCacheLayer", kv_heads, dim, dim, index_dim=64, query_heads=heads
    )
    other_sizes = CachedLayer(kv_heads=2, key_dim=48, value_dim=32, query_heads=heads)
    dummy = CachedLayer("DummyLayer")
    parts = {
        "sliding": (sliding, full),
        "chunked": (sliding,),
        "latent": (latent,),
        "indexed": (indexed, CachedLayer("DynamicIndexedLayer")),
        "hybrid": (linear, full),
        "shared": (CachedLayer(**{**vars(full), "readers": 3}), dummy, sliding),
        "mixed": (other_sizes, full, both, linear, windowed, sparse),
    }.get(kind, (full,))
    # all parts are there, then as many as it takes
    return (*parts, *(rng.choice(parts) for _ in range(count)))


def random_options(rng: random.Random, latent: bool) -> dict:
    """Return options of CacheConfig for a model with or without latents; some do not fit it."""
    options = {
        "keys": rng.choice(format_names("keys")),
        "values": rng.choice(format_names("values")),
        "page_size": rng.choice((16, 32, 64, 128)),
        "sink_tokens": rng.choice((0, 4, 4, 33)),
        "recent_tokens": rng.choice((0, 0, 7, 128)),
    }
    if latent:
        options["latent"] = rng.choice((None, *LATENT_FORMAT_NAMES, "fp8_ds_mla", "fp8_ds_mla"))
        options["k_rope"] = rng.choice((None, None, *K_ROPE_FORMAT_NAMES))
        if options["latent"] is None and rng.random() < 0.7:
            options["values"] = options["keys"]
    return options


def random_kinds(rng: random.Random) -> list[list[int]]:
    """Return kinds of rows: [tokens, rows that hold so many]."""
    most = rng.choice((3, 40, 300, 5000, 40000))
    kinds = [[rng.randint(1, most), rng.randint(1, 9)]]
    if rng.random() < 0.4:
        kinds.append([rng.randint(1, most), rng.randint(1, 5)])
    return kinds
