"""Keys of two widths and rotated values: their arithmetic and their places in a page."""

from dataclasses import replace

import pytest
import torch
from tiny_models import make_model

from kv_hf.errors import CacheOptionError
from kv_hf.formats import key_scheme, value_scheme
from kv_hf.quant.codec import block, decode, encode, reorder, restore, rotate, unrotate, wide_first
from kv_hf.spec import LANES, ROWS, PageSpec

MIXED, ROTATED = ("int2_mixed", "int4_mixed"), ("int2_rotated", "int3_rotated", "int4_rotated")


def numbers(*shape, seed=0):
    """Random numbers whose channels have different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(shape[-1], generator=generator) * 4
    return torch.randn(shape, generator=generator) * sizes


def spec_of(keys="int4", values="int4", dim=64, page=64, layout=ROWS, heads=2):
    return PageSpec.build(
        key_scheme(keys), value_scheme(values), num_kv_heads=heads, key_dim=dim, value_dim=dim,
        page_size=page, dtype=torch.float32, layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize("dim", [8, 12, 64, 80, 96, 128, 256])
def test_rotate_is_the_hadamard_matrix_over_its_size(dim):
    size = block(dim)
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
    matrix = torch.block_diag(*[torch.tensor(signs, dtype=torch.float64)] * (dim // size))
    x = numbers(5, dim)
    torch.testing.assert_close(
        rotate(x).double(), x.double() @ matrix.T / size, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(unrotate(rotate(x)), x, rtol=1e-5, atol=1e-5)
    assert rotate(x).abs().max() <= x.abs().max()  # within the range that scales can hold


def test_choose_puts_the_widest_pairs_first_and_keeps_the_order_of_channels():
    x = torch.zeros(1, 2, 4, 8)
    x[0, 0, 1] = torch.tensor([1.0, 5, 2, 0, 4, 0, 3, 0])  # pairs (0, 4), (1, 5), (2, 6), (3, 7)
    x[0, 1, 1] = 3.0  # all alike: the first ones
    assert wide_first(x, 4).tolist() == [[[0, 1, 4, 5, 2, 3, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]]


def test_restore_undoes_reorder():
    x = numbers(3, 2, 16, 24)
    order = wide_first(x, 8)
    assert not torch.equal(reorder(x, order), x)
    assert torch.equal(restore(reorder(x, order), order), x)


@pytest.mark.parametrize("layout", [ROWS, LANES])
@pytest.mark.parametrize("dim", [24, 48, 64, 80, 128, 320])
@pytest.mark.parametrize("values", ROTATED)
@pytest.mark.parametrize("keys", MIXED)
def test_pages_hold_what_the_formats_say(keys, values, dim, layout):
    """Bytes as spec.fields promises, errors within half a step of each channel or rotated token."""
    x = numbers(3, 2, 64, dim)
    for side in spec_of(keys, values, dim, layout=layout).sides:
        assert side.layout == layout
        fields, damaged = encode(x, side)
        assert not damaged
        held = {name: (tuple(one.shape[1:]), one.dtype) for name, one in fields.items()}
        assert held == side.fields
        error = decode(fields, side, torch.float32) - x
        if side.side == "values":
            error = rotate(error)
            step = fields["scale"].float()  # of all channels of a token
        else:
            scale = fields["scale"].float()
            step = restore(scale, fields["order"])
        bits = 3 if side.scheme.clip < 1 else 1  # numbers beyond a clipped range saturate
        assert (error.abs() <= 0.51 * bits * step + 1e-4).all()


@pytest.mark.parametrize("keys", MIXED)
def test_wide_channels_lose_less(keys):
    x = numbers(2, 2, 64, 64)
    side = spec_of(keys).keys
    fields, _ = encode(x, side)
    plain = spec_of(keys.removesuffix("_mixed")).keys
    wide = (
        fields["order"][..., : side.scheme.wide_channels].long()[:, :, None].expand(-1, -1, 64, -1)
    )
    errors = [
        (decode(encode(x, one)[0], one, torch.float32) - x).gather(-1, wide).square().mean()
        for one in (side, plain)
    ]
    assert errors[0] < 0.2 * errors[1]


@pytest.mark.parametrize(
    ("keys", "values", "dim", "bits"),
    [
        ("int2_mixed", "int2_rotated", 64, (3.125, 2.5)),
        ("int2_mixed", "int2_rotated", 128, (3.375, 2.25)),
        ("int4_mixed", "int3_rotated", 64, (5.625, 3.25)),
        ("int4_mixed", "int3_rotated", 128, (5.625, 3.125)),
    ],
)
def test_bits_count_scales_and_the_order_of_channels(keys, values, dim, bits):
    spec = spec_of(keys, values, dim)
    assert (spec.keys.bits_per_element, spec.values.bits_per_element) == bits


def test_bad_sizes_and_sides_are_refused():
    with pytest.raises(
        CacheOptionError, match="int3_rotated.* head_dim must be a multiple of 8, got 12"
    ):
        spec_of(values="int3_rotated", dim=12)
    with pytest.raises(CacheOptionError, match="'int2_mixed' is for keys, not for values"):
        value_scheme("int2_mixed")
    with pytest.raises(CacheOptionError, match="'int2_rotated' is for values, not for keys"):
        key_scheme("int2_rotated")
    with pytest.raises(CacheOptionError, match="wide_bits must be 4 or 8"):
        replace(key_scheme("int2_mixed"), wide_bits=3)


@pytest.mark.parametrize("keys", MIXED)
def test_generate_reads_mixed_keys(keys):
    """The implementations in torch read them; the tokens of many pages come close to the exact cache's scores."""
    model = make_model("llama")
    ids = torch.randint(3, 60, (2, 150), generator=torch.Generator().manual_seed(0))
    scores = {}
    for name, options in (("exact", {}), (keys, {"keys": keys, "values": "int3_rotated"})):
        out = model.generate(
            ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True,
            pad_token_id=0, cache_implementation="paged_exact", cache_config=options,
        )  # fmt: skip
        scores[name] = out.logits[1]
        assert name == "exact" or keys in str(out.past_key_values.report())
    error = (scores[keys] - scores["exact"]).square().mean().sqrt()
    assert 0 < error < 0.25 * scores["exact"].std()
