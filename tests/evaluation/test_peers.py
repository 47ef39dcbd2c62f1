"""Caches of others at their best: their groups are theirs, their names come and go, and missing packages say what to install."""

import sys

import eval_tables
import numpy as np
import pytest
import torch
from measure.peers import known_peers
from measure.peers.kivi import RESIDUAL
from measure.peers.turboquant import levels
from report_rows import COMMON
from tiny_models import make_model, tokens
from transformers import DynamicCache

import kv_hf
from kv_hf.cache_names import PEERS, all_cache_names
from kv_hf.evaluation import cache_kind, measure_accuracy, register_peer, unregister_peer
from kv_hf.evaluation.cache_kinds import held_bytes, why_not
from kv_hf.evaluation.teacher_forcing import forced_logits, next_chunk
from kv_hf.formats import format_names, get_format

CPU = torch.device("cpu")
CHANNEL = "q_group_size=8,residual_length=20"
MEASURED = (
    "kivi_int2:page_size=16,key_group_size=8,value_group_size=4",
    "kivi_int4_window:page_size=16,key_group_size=8,value_group_size=4,recent_tokens=24",
    "turboquant_int4:page_size=16",
    "turboquant_int2:page_size=16",
    "turboquant_prod_int4:page_size=16",
    f"quanto_int4_channel:{CHANNEL}",
    f"quanto_int2_channel:{CHANNEL}",
    f"hqq_int4_channel:{CHANNEL}",
    f"hqq_int2_channel:{CHANNEL}",
)


@pytest.fixture
def peers():
    with known_peers():
        yield


def skip_without(name):
    reason = why_not(name, CPU)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("name", MEASURED)
def test_chunks_of_peers_equal_token_by_token(name, peers):
    """A longer chunk differs: the stored form is what is read."""
    skip_without(name)
    model = make_model("llama", dtype=torch.float64)
    model.set_attn_implementation("kv_hf")
    ids = tokens(1, 90)[0]
    results = []
    for chunk in (next_chunk, lambda cache, position: 1, lambda cache, position: 69):
        cache = cache_kind(name).make(model.config, 90)
        results.append(torch.cat([out for _, out in forced_logits(model, ids, cache, 21, chunk)]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)  # fp32 logits
    assert (results[2] - results[1]).abs().max() > 1e-3


def test_known_peers_come_and_go():
    before = (all_cache_names(), format_names())
    with known_peers(), known_peers():
        assert {"kivi_int2", "turboquant_int4", "quanto_int4_channel"} <= set(all_cache_names())
        assert cache_kind("kivi_int4").attention == "kv_hf"
    assert (all_cache_names(), format_names()) == before


def test_register_peer_measures_a_cache_like_the_others():
    class Rounded(DynamicCache):
        """Keys in steps of a fixed size."""

        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            return super().update((key_states * 4).round() / 4, value_states, layer_idx)

    given = {}

    def make(config, options):
        given.update(options)
        return Rounded(config=config)

    register_peer("rounded", make)
    try:
        kind = cache_kind("rounded:steps=4")
        model = make_model("llama")
        ids = [tokens(1, 60)[0]]
        caches = {"rounded": lambda: kind.make(model.config, 60)}
        found = measure_accuracy(model, ids, caches, 20)["rounded"]
        assert found.tokens == 40 and found.kl_mean > 1e-5
        assert given == {"steps": 4} and kind.attention == "sdpa"
        with pytest.raises(ValueError, match="'rounded' is there already"):
            register_peer("rounded", make)
    finally:
        unregister_peer("rounded")
    with pytest.raises(ValueError, match="rounded"):
        cache_kind("rounded")


@pytest.mark.parametrize("name", ["paged_mine", "Mine", "a b", ""])
def test_register_peer_refuses_bad_names(name):
    with pytest.raises(ValueError, match="must be lower-case letters"):
        register_peer(name, lambda config, options: None)
    assert name not in PEERS


@pytest.mark.parametrize("name", ["dynamic", "quanto_int4"])
def test_register_peer_refuses_names_that_are_taken(name):
    with pytest.raises(ValueError, match=f"{name!r} is there already"):
        register_peer(name, lambda config, options: None)


def test_unregister_peer_refuses_other_names():
    with pytest.raises(ValueError, match="'quanto_int4' is not a registered peer"):
        unregister_peer("quanto_int4")


def read_keys(cache, keys):
    """Hand keys over, and return those that the cache gives back behind them."""
    cache.update(keys, keys, 0)
    last = torch.zeros_like(keys[..., :1, :])
    return cache.update(last, last, 0)[0][..., :-1, :]


def keys_with_offsets(tokens, scatter=0.01):
    """Keys of three heads whose channels have far apart offsets, other ones in each head: [1, 3, tokens, 16]."""
    numbers = torch.Generator().manual_seed(0)
    offsets = 100 * torch.randn(1, 3, 1, 16, generator=numbers)
    return offsets + scatter * torch.randn(1, 3, tokens, 16, generator=numbers)


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
@pytest.mark.parametrize("length", [64, 69])
def test_channel_keys_keep_groups_within_a_channel_of_a_head(backend, length, peers):
    """A prompt of 69 tokens in groups of 8 leaves 5 exact; one group over two heads would cost the range of both."""
    skip_without(f"{backend}_int4_channel")
    config = make_model("llama").config
    keys = keys_with_offsets(length)
    cache = cache_kind(f"{backend}_int4_channel:{CHANNEL}").make(config, 0)
    found = read_keys(cache, keys)
    # a step of 15 over a range of about four standard deviations, and the fp32 rounding of a scale beside an offset of 100s
    assert (found - keys).abs().max() < 0.01
    assert torch.equal(found[..., 64:, :], keys[..., 64:, :])
    assert (found[..., :64, :] != keys[..., :64, :]).any()


@pytest.mark.parametrize(
    ("name", "length"), [("hqq_int4:axis_key=0,q_group_size=8", 64), ("quanto_int4", 64)]
)
def test_groups_of_the_library_mix_heads_or_channels(name, length):
    """Why ChannelKeys is there: hqq's axis 0 takes a group's tokens from all heads, and the defaults group per token."""
    skip_without(name)
    keys = keys_with_offsets(length)
    found = read_keys(cache_kind(name).make(make_model("llama").config, 0), keys)
    assert (found - keys).abs().max() > 1


def test_quanto_per_channel_by_options_needs_whole_groups():
    """69 tokens of 3 heads fill no whole groups of 64: quanto refuses what ChannelKeys keeps exact."""
    skip_without("quanto_int4")
    config = make_model("llama").config
    plain = cache_kind("quanto_int4:axis_key=-1").make(config, 0)
    with pytest.raises(ValueError, match="Group size"):
        read_keys(plain, keys_with_offsets(69))
    with known_peers():
        cache = cache_kind("quanto_int4_channel").make(config, 0)
    assert torch.equal(read_keys(cache, keys_with_offsets(40)), keys_with_offsets(40))


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_channel_keys_hold_fewer_bytes_than_exact_ones(backend, peers):
    """What was encoded is held once, and no view keeps the exact tokens alive."""
    skip_without(f"{backend}_int4_channel")
    config = make_model("llama").config
    sizes = {}
    for name in (f"{backend}_int4_channel:{CHANNEL}", "dynamic"):
        cache = cache_kind(name).make(config, 0)
        read_keys(cache, keys_with_offsets(256).bfloat16())
        sizes[name] = held_bytes(cache)
    few, exact = sizes.values()
    assert few < 0.6 * exact


def test_channel_keys_refuse_options_of_other_axes(peers):
    skip_without("quanto_int4_channel")
    kind = cache_kind("quanto_int4_channel:axis_key=0")
    with pytest.raises(ValueError, match="q_group_size and residual_length"):
        kind.make(make_model("llama").config, 0)


@pytest.mark.parametrize("tokens_held", [100, 300, 511, 512, 513])
def test_kivi_keeps_its_residual(tokens_held, peers):
    """One name follows the rule of KIVI's keys; the other keeps at least the 128 newest tokens."""
    config = make_model("llama").config
    states = torch.randn(1, 2, tokens_held, 16)
    exact = {}
    for name in ("kivi_int2", "kivi_int2_window"):
        cache = cache_kind(f"{name}:value_group_size=16").make(config, 0)
        for layer in range(config.num_hidden_layers):
            cache.update(states, states, layer)
        options = cache.options
        pages = kv_hf.geometry.Geometry(
            options.page_size, options.sink_tokens, options.recent_tokens
        )
        exact[name] = pages.exact(tokens_held)
        assert cache.get_seq_length() == tokens_held
    assert exact["kivi_int2"] == tokens_held % RESIDUAL
    assert exact["kivi_int2_window"] in range(
        min(tokens_held, RESIDUAL), RESIDUAL + 32 if tokens_held > RESIDUAL else tokens_held + 1
    )


def test_kivi_spans_the_whole_range_in_3_bits(peers):
    found = get_format("kivi_int2")
    numbers = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    for side, groups in (("keys", (2, 64)), ("values", (64, 2))):
        scheme = found.scheme(side)
        codes, scale, offset = found.encode(numbers, scheme)
        assert scale.shape[-2:] == offset.shape[-2:] == groups
        back = found.decode(codes, scale, offset, scheme)
        # unlike int2, the extremes of a group are met, to the rounding of fp16
        worst = (back - numbers).abs().max()
        assert worst <= 0.5 * scale.float().max() + 4e-3
        bits = 2 + (scale.numel() + offset.numel()) * 16 / numbers.numel()
        assert bits == 3.0


@pytest.mark.parametrize(
    ("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)]
)
def test_levels_reach_the_least_distortion(bits, distortion):
    """Table 1 of Max, "Quantizing for minimum distortion" (1960): the error of a normal number, which a coordinate nears."""
    vectors = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)).double()
    vectors /= vectors.norm(dim=-1, keepdim=True)
    found = levels(128, bits)
    nearest = found[torch.bucketize(vectors, (found[1:] + found[:-1]) / 2)]
    error = (vectors - nearest).square().sum(-1).mean().item()
    assert error == pytest.approx(distortion, rel=0.03)


@pytest.mark.parametrize(("name", "low", "high"), [
    ("turboquant_int4", 0.985, 0.995),
    ("turboquant_prod_int4", 0.997, 1.003),
])  # fmt: skip
def test_turboquant_prod_is_unbiased_and_mse_shrinks(name, low, high, peers):
    found = get_format(name)
    numbers = torch.randn(2, 2, 256, 64, generator=torch.Generator().manual_seed(0))
    scheme = found.scheme("keys").resolve(256, 64, "keys")
    back = found.decode(*found.encode(numbers, scheme), scheme)
    slope = ((back * numbers).sum() / numbers.square().sum()).item()
    assert low < slope < high


def test_turboquant_keeps_zeros_and_large_norms(peers):
    found = get_format("turboquant_int4")
    scheme = found.scheme("values").resolve(16, 64, "values")
    numbers = torch.zeros(1, 1, 16, 64)
    numbers[0, 0, 1] = 60000.0  # a norm beyond float16's range is cut, not inf
    back = found.decode(*found.encode(numbers, scheme), scheme)
    assert torch.equal(back[0, 0, 0], torch.zeros(64))
    assert torch.isfinite(back).all()


def test_turboquant_package_says_what_to_install(monkeypatch, peers):
    monkeypatch.delattr(np, "trapz", raising=False)
    assert "pip install turboquant==0.2.0 'numpy<2.4'" in why_not("turboquant_package_int4", CPU)
    monkeypatch.setattr(np, "trapz", None, raising=False)
    monkeypatch.setitem(sys.modules, "turboquant.cache", None)
    assert "pip install turboquant==0.2.0" in why_not("turboquant_package_int4", CPU)


@pytest.mark.parametrize(("backend", "package"), [("quanto", "optimum-quanto"), ("hqq", "hqq")])
def test_channel_caches_say_what_to_install(backend, package, monkeypatch, peers):
    asked = {"quanto": "is_optimum_quanto_available", "hqq": "is_hqq_available"}[backend]
    monkeypatch.setattr(f"transformers.cache_utils.{asked}", lambda: False)
    for name in (f"{backend}_int4_channel", f"{backend}_int4"):
        assert f"pip install {package}" in why_not(name, CPU)


def test_peers_table_has_a_table_per_run_with_who_made_a_cache():
    row = {
        **COMMON,
        "model": "smollm2-135m",
        "model_revision": "r",
        "text": "lincoln_1862",
        "text_digest": "d",
        "windows": 2,
        "window": 1600,
        "prompt": 512,
        "dtype": "float32",
        "tokens": 2176,
        "bytes_per_token": 7142.5,
        "kl_mean": 0.0044,
        "kl_low": 0.0039,
        "kl_high": 0.005,
        "kl_p99": 0.031,
        "top1": 0.957,
    }
    rows = [
        {**row, "cache": "quanto_int4_channel", "stored_bits": 4.96, "bits_per_element": None},
        {**row, "cache": "kivi_int2", "stored_bits": 4.1, "bits_per_element": 3.0},
        {**row, "cache": "turboquant_package_int4", "stored_bits": 26, "bits_per_element": None},
        {**row, "cache": "paged_int4", "stored_bits": 5, "bits_per_element": 4.5, "window": 800},
    ]
    first, second = eval_tables.peers_table(rows).split("\n\nSmolLM2")
    lines = first.splitlines()[4:]
    assert [line.split("|")[1].strip() for line in lines] == [
        "`turboquant_package_int4` (turboquant 0.2.0)",
        "`quanto_int4_channel` (transformers, keys per channel)",
        "`kivi_int2` (KIVI)",
    ]
    assert "| 4.96 |  | 7,142 | 0.00440 (0.00390 to 0.00500) | 0.0310 | 95.7 % |" in lines[1]
    assert "| 4.10 | 3.00 |" in lines[2]
    assert "`paged_int4` | 5.00 | 4.50 |" in second and "800 tokens" in second
    assert eval_tables.peers_table([]).startswith("No run has been recorded yet")


def test_readme_table_leaves_out_peers_that_no_run_measured():
    row = {
        **COMMON,
        **eval_tables.PROTOCOL,
        "text": "lincoln_1862",
        "windows": 1,
        "tokens": 9,
        "model": "smollm2-135m",
        "stored_bits": 5.0,
    }
    row |= {"kl_mean": 0.01, "kl_low": 0.009, "kl_high": 0.011}
    found = eval_tables.accuracy_table([{**row, "cache": "quanto_int4"}])
    assert "`quanto_int4` (transformers) | 5.00 |" in found
    assert "kivi" not in found and "hqq" not in found
