"""Caches of others at their best: their groups are theirs, and their names come and go."""

import pytest
import torch
from measure.peers import RESIDUAL, known_peers, levels, rotation
from tiny_models import make_model, tokens

from kv_hf.cache_names import all_cache_names
from kv_hf.evaluation.accuracy import decoded
from kv_hf.evaluation.caches import cache_kind, held_bytes, why_not
from kv_hf.formats import format_names, get_format
from kv_hf.geometry import Geometry

CHANNEL = "q_group_size=8,residual_length=20"
MEASURED = (
    "kivi_int2:page_size=16,key_group_size=8,value_group_size=4",
    "kivi_int4_window:page_size=16,key_group_size=8,value_group_size=4,recent_tokens=24",
    "turboquant_int4:page_size=16",
    f"quanto_int4_channel:{CHANNEL}",
)


@pytest.fixture
def peers():
    with known_peers():
        yield


def skip_without(name):
    reason = why_not(name, torch.device("cpu"))
    if reason:
        pytest.skip(reason)


@torch.no_grad()
@pytest.mark.parametrize("name", MEASURED)
def test_chunks_of_peers_equal_token_by_token(name, peers):
    skip_without(name)
    model = make_model("llama", dtype=torch.float64)
    ids = tokens(1, 90)
    chunks, single = (cache_kind(name).make(model.config, 90) for _ in range(2))
    for cache in (chunks, single):
        model(ids[:, :21], past_key_values=cache)
    found = torch.cat([out for _, out in decoded(model, ids[0], chunks, 21)])
    steps = [model(ids[:, at : at + 1], past_key_values=single) for at in range(21, 90)]
    expected = torch.cat([step.logits[0] for step in steps])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)  # one side in fp32
    assert (model(ids).logits[0, 21:] - expected).abs().max() > 1e-3  # the codes lose something


def test_known_peers_come_and_go():
    before = (all_cache_names(), format_names())
    with known_peers(), known_peers():
        assert {"kivi_int2", "turboquant_int4", "quanto_int4_channel"} <= set(all_cache_names())
    assert (all_cache_names(), format_names()) == before


def read_keys(name, keys):
    """Hand keys to an empty cache, and return those that it gives back behind them, and the cache."""
    cache = cache_kind(name).make(make_model("llama").config, 0)
    cache.update(keys, keys, 0)
    last = torch.zeros_like(keys[..., :1, :])
    return cache.update(last, last, 0)[0][..., :-1, :], cache


def keys_with_offsets(tokens):
    """Keys of three heads whose channels have far apart offsets, other ones in each head: [1, 3, tokens, 16]."""
    numbers = torch.Generator().manual_seed(0)
    offsets = 100 * torch.randn(1, 3, 1, 16, generator=numbers)
    return offsets + 0.01 * torch.randn(1, 3, tokens, 16, generator=numbers)


@pytest.mark.parametrize("length", [64, 69])
def test_channel_keys_keep_groups_within_a_channel_of_a_head(length, peers):
    """A prompt of 69 tokens in groups of 8 leaves 5 exact; one group over two heads would cost the range of both."""
    skip_without("quanto_int4_channel")
    keys = keys_with_offsets(length)
    found, _ = read_keys(f"quanto_int4_channel:{CHANNEL}", keys)
    # a step of 15 over a range of about four standard deviations, and the fp32 rounding of a scale beside an offset of 100s
    assert (found - keys).abs().max() < 0.01
    assert torch.equal(found[..., 64:, :], keys[..., 64:, :])
    assert (found[..., :64, :] != keys[..., :64, :]).any()
    # why ChannelKeys is there: the library's own groups mix channels
    own, _ = read_keys("quanto_int4", keys_with_offsets(64))
    assert (own - keys[..., :64, :]).abs().max() > 1


def test_channel_keys_hold_their_codes_once_and_refuse_other_axes(peers):
    skip_without("quanto_int4_channel")
    keys = keys_with_offsets(256).bfloat16()
    few, exact = (
        held_bytes(read_keys(n, keys)[1]) for n in (f"quanto_int4_channel:{CHANNEL}", "dynamic")
    )
    assert few < 0.6 * exact  # no view keeps the exact tokens alive
    with pytest.raises(ValueError, match="q_group_size and residual_length"):
        read_keys("quanto_int4_channel:axis_key=0", keys)


@pytest.mark.parametrize("tokens_held", [100, 512, 513])
def test_kivi_keeps_its_residual(tokens_held, peers):
    """One name follows the rule of KIVI's keys; the other keeps at least the 128 newest tokens."""
    exact = {}
    for name in ("kivi_int2", "kivi_int2_window"):
        own = cache_kind(f"{name}:value_group_size=16").make(make_model("llama").config, 0).options
        pages = Geometry(own.page_size, own.sink_tokens, own.recent_tokens)
        exact[name] = pages.exact(tokens_held)
    assert exact["kivi_int2"] == tokens_held % RESIDUAL
    assert exact["kivi_int2_window"] in range(
        min(tokens_held, RESIDUAL), RESIDUAL + 32 if tokens_held > RESIDUAL else tokens_held + 1
    )


def test_kivi_spans_the_range_of_each_group_in_3_bits(peers):
    """A loop over groups of 32 by the paper's formula: round((x - min) / step) * step + min, scale and minimum in fp16."""
    found = get_format("kivi_int2")
    numbers = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    for side, turned in (("keys", numbers[0, 0].T), ("values", numbers[0, 0])):
        scheme = found.scheme(side)
        codes, scale, offset = found.encode(numbers, scheme)
        back = found.decode(codes, scale, offset, scheme)[0, 0]
        back = back.T if side == "keys" else back
        for row in range(64):
            for at in (0, 32):
                group = turned[row, at : at + 32]
                low = group.min().half().float()
                step = ((group.max() - group.min()) / 3).half().float()
                expected = ((group - low) / step).round().clamp(0, 3) * step + low
                torch.testing.assert_close(back[row, at : at + 32], expected, rtol=0, atol=1e-6)
        bits = 2 + (scale.numel() + offset.numel()) * 16 / numbers.numel()
        assert bits == 3.0


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.1175), (4, 0.009497)])
def test_levels_reach_the_least_distortion(bits, distortion):
    """Table 1 of Max, "Quantizing for minimum distortion" (1960): the error of a normal number, which a coordinate nears."""
    vectors = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)).double()
    vectors /= vectors.norm(dim=-1, keepdim=True)
    found = levels(128, bits)
    nearest = found[torch.bucketize(vectors, (found[1:] + found[:-1]) / 2)]
    error = (vectors - nearest).square().sum(-1).mean().item()
    assert error == pytest.approx(distortion, rel=0.03)


def test_turboquant_stores_the_nearest_levels_of_a_rotated_direction(peers):
    found = get_format("turboquant_int4")
    numbers = torch.randn(2, 2, 16, 64, generator=torch.Generator().manual_seed(0))
    # zeros stay; a norm beyond fp16 is cut, not inf
    numbers[0, 0, 0], numbers[0, 0, 1] = 0.0, 60000.0
    scheme = found.scheme("values").resolve(16, 64, "values")
    back = found.decode(*found.encode(numbers, scheme), scheme)
    assert torch.equal(back[0, 0, 0], torch.zeros(64)) and torch.isfinite(back).all()
    row = numbers[1, 1, 5].double()
    rotated = rotation(64) @ (row / row.norm())
    nearest = (rotated[:, None] - levels(64, 4)).abs().argmin(1)
    expected = rotation(64).T @ levels(64, 4)[nearest] * row.norm()
    # the norm is rounded to fp16, half an eps of 2^-10; sums of 64 products in fp32 are far below
    assert (back[1, 1, 5] - expected).abs().max() < 2**-11 * row.abs().max() * 1.5
