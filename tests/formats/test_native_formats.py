"""Formats of other packages with the codes of shipped ones: the compiled kernels read them, or say why they do not."""

import warnings

import paged_inputs
import pytest
import rounding
import tiny_models
import torch
from paged_inputs import needs_library

import kv_hf
from kv_hf.backends import cpu
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu import decode, unsupported
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.triton.support import _why_not_sizes
from kv_hf.errors import CacheOptionError
from kv_hf.formats import get_format
from kv_hf.formats.linear import Float8Format, Groups, RangeFormat, SignedFormat
from kv_hf.spec import LANES, ROWS, PageSpec

PAGE, DIM = 16, 32


@pytest.fixture
def registered():
    """Register a format for the length of a test; returns the function that does."""
    names = []

    def register(kind):
        kv_hf.register_format(kind)
        names.append(kind.name)
        return get_format(kind.name)

    yield register
    for name in names:
        kv_hf.unregister_format(name)


# by the shipped formats of the same arithmetic and bits
BASES = {
    "int8": (SignedFormat, 8),
    "fp8": (Float8Format, 8),
    "int4": (RangeFormat, 4),
    "int2": (RangeFormat, 2),
}


def regrouped(base, scale, offset, scale_bits=16, sides=("keys", "values")):
    """Return a format with the arithmetic of a shipped one in other groups, as docs/formats.md invites."""
    kind, bits = BASES[base]
    return kind("other", bits, dict.fromkeys(sides, Groups(scale, offset, scale_bits=scale_bits)))


def latent_spec(latent, k_rope, layout):
    return PageSpec.build_latent(
        latent, k_rope, rank=DIM, rope_dim=8, page_size=PAGE, dtype=torch.float32, layout=layout
    )


def spec_of(side, layout, page=PAGE, dim=DIM):
    """Return pages whose `side` is in the format "other"; the others are exact, or latents of 8 bits."""
    other, exact = get_format("other"), get_format("exact")
    if side == "latent":
        return latent_spec(other.scheme(side), exact.scheme("k_rope"), layout)
    if side == "k_rope":
        return latent_spec(get_format("int8").scheme("latent"), other.scheme(side), layout)
    schemes = {"keys": exact.scheme("keys"), "values": exact.scheme("values")}
    schemes[side] = other.scheme(side)
    return PageSpec.build(
        schemes["keys"], schemes["values"], num_kv_heads=2, key_dim=dim, value_dim=dim, page_size=page,
        dtype=torch.float32, layout=layout,
    )  # fmt: skip


KEYS_8 = [((1, DIM), None), ((1, 1), None), ((PAGE, DIM), (PAGE, 1))]
READ = [(base, "keys", *groups) for base in ("int8", "fp8") for groups in KEYS_8]
READ += [(base, "values", (1, size), None) for base in ("int8", "fp8") for size in (1, 2, 8, DIM)]
READ += [
    (base, "keys", (size, 1), (size, 1)) for base in ("int4", "int2") for size in (1, 2, 4, PAGE)
]
READ += [
    (base, "values", (1, size), (1, size)) for base in ("int4", "int2") for size in (1, 2, 8, DIM)
]


@needs_library
@pytest.mark.parametrize(("base", "side", "scale", "offset"), READ)
def test_c_seals_and_attends_in_each_grouping_that_it_takes(registered, base, side, scale, offset):
    registered(regrouped(base, scale, offset))
    names = ("other", "exact") if side == "keys" else ("exact", "other")
    kv = paged_inputs.make_kv(*names, key_dim=DIM, value_group=None, layout=LANES)
    assert unsupported(kv.spec) is None
    tokens = torch.randn(2, 3, 2, PAGE, DIM, generator=torch.Generator().manual_seed(2))
    jobs = torch.tensor([[row, 0, row] for row in range(3)], dtype=torch.int32)
    assert not paged_inputs.check_seals_as_torch(tuple(tokens), jobs, kv.spec)
    call = AttentionCall(paged_inputs.make_query(kv, dtype=torch.float32), kv, 0.2)
    out = decode.paged_attention(call)
    rounding.assert_close(out, reference.paged_attention(call))


# What the C kernel once took: most of these wrote behind the page's scales, others read fp32 scales as fp16
UNREAD = [("int8", "keys", (size, 1), None, 16) for size in (2, 4, PAGE)]
UNREAD += [
    ("int8", "keys", (1, 8), None, 16),
    ("fp8", "keys", (4, DIM), None, 16),
    ("int8", "keys", (PAGE, DIM), None, 16),
]
UNREAD += [("int8", "keys", (1, DIM), (1, 1), 16), ("int8", "keys", (8, 1), (8, 1), 16)]
UNREAD += [(base, "values", (1, 8), (1, 8), 16) for base in ("int8", "fp8")]
UNREAD += [("int8", "keys", (PAGE, DIM), (PAGE, 1), 32), ("int8", "values", (1, DIM), None, 32)]
UNREAD += [(base, "keys", (8, 1), (8, 1), 32) for base in ("int4", "int2")]
UNREAD += [("int4", "values", (1, 8), (1, 8), 32), ("int2", "latent", (PAGE, 1), (PAGE, 1), 32)]
UNREAD += [("int8", "latent", (1, 8), (1, 8), 16), ("fp8", "latent", (8, 1), (8, 1), 16)]
UNREAD += [("int8", "latent", (1, 1), None, 16), ("int8", "k_rope", (1, 8), None, 16)]
UNREAD += [("int4", "k_rope", (PAGE, 1), (PAGE, 1), 16)]


@pytest.mark.parametrize(("base", "side", "scale", "offset", "bits"), UNREAD)
def test_compiled_kernels_refuse_each_grouping_that_they_do_not_have(
    registered, base, side, scale, offset, bits
):
    registered(regrouped(base, scale, offset, bits, sides=(side,)))
    says = f"read {side} in format 'other': "
    assert f"the C kernel does not {says}" in str(unsupported(spec_of(side, LANES)))
    reason = _why_not_sizes(torch.float32, spec_of(side, ROWS), 1)
    assert f"the Triton kernels do not {says}" in str(reason)


@pytest.mark.parametrize("base", ["int8", "fp8"])
def test_triton_refuses_keys_with_a_scale_of_each_token(registered, base):
    """C reads these; Triton's kernel has one scale for the page."""
    registered(regrouped(base, (1, DIM), None))
    reason = _why_not_sizes(torch.float32, spec_of("keys", ROWS), 1)
    assert "a scale (1, 32) and no offset for groups of (tokens, channels)" in str(reason)


def test_triton_reads_the_groupings_of_int4_and_int2(registered):
    registered(regrouped("int2", (8, 1), (8, 1)))
    assert _why_not_sizes(torch.float32, spec_of("keys", ROWS), 1) is None


@needs_library
def test_generate_runs_a_grouping_that_c_does_not_have_in_torch_and_says_so(registered):
    registered(regrouped("int8", (PAGE, 1), None))
    model, prompt = tiny_models.make_model("llama"), tiny_models.tokens(2, 70)

    def generated(kernel):
        return model.generate(
            prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, cache_implementation="paged_other",
            cache_config={"page_size": PAGE, "kernel": kernel, "values": "int8"},
        )  # fmt: skip

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kv_hf.KVCacheWarning)
        got = generated("auto")
        generated("auto")
    assert len(caught) == 1 and "the C kernel does not read keys in format 'other'" in str(
        caught[0].message
    )
    assert torch.equal(got, generated("reference"))
    with pytest.raises(CacheOptionError, match="kernel='c' cannot run here: .*'other'"):
        generated("c")


def test_schemes_of_shipped_formats_are_all_read():
    for name in ("int8", "fp8", "int4", "int2"):
        for layout, reason in ((LANES, unsupported), (ROWS, None)):
            spec = paged_inputs.page_spec(name, page_size=PAGE, layout=layout)
            found = reason(spec) if reason else _why_not_sizes(torch.float32, spec, 1)
            assert found is None


# -- what the kernels would ignore -------------------------------------------------------------------------------------


class Clipped(RangeFormat):
    """int4's codes, of numbers that are cut before."""

    def encode(self, numbers, scheme):
        return super().encode(numbers.clamp(-0.3, 0.3), scheme)


def test_a_subclass_with_its_own_arithmetic_is_read_in_torch(registered):
    """Whatever it changes: the compiled kernels know the classes themselves and no other."""
    own = registered(Clipped("other", 4, get_format("int4").groups))
    assert own.code == "other"
    assert "no compiled kernel reads the format 'other'" in str(
        cpu.why_not(torch.device("cpu"), spec_of("keys", LANES))
    )


@pytest.mark.parametrize("name", ["none", "signed", "unsigned", "float8"])
def test_register_format_refuses_the_names_of_shipped_codes(name):
    """A format called "none" was taken for exact storage, one called "signed" for int8."""
    with pytest.raises(CacheOptionError, match=f"must not be one of .*, got '{name}'"):
        kv_hf.register_format(Clipped(name, 4, get_format("int4").groups))
