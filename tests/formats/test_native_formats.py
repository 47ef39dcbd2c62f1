"""Formats of other packages with the codes of shipped ones: the compiled kernels read them, or say why they do not."""

import warnings

import paged_inputs
import pytest
import rounding
import tiny_models
import torch
from kv_hf.formats.fp8 import Fp8
from kv_hf.formats.int2 import Int2
from kv_hf.formats.int4 import Int4
from kv_hf.formats.int8 import Int8

import kv_hf
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu import backend, decode, library
from kv_hf.backends.cpu.arguments import unsupported
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.triton.support import _why_not_sizes
from kv_hf.errors import CacheOptionError
from kv_hf.formats import get_format, key_scheme, value_scheme
from kv_hf.spec import LANES, ROWS, PageSpec

PAGE, DIM = 16, 32
needs_library = pytest.mark.skipif(bool(library.missing()), reason=str(library.missing()))


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


def regrouped(base, scale, offset, scale_bits=16, sides=("keys", "values")):
    """Return a subclass of a shipped format in other groups, as docs/formats.md invites."""

    def scheme(self, side, group_size=None):
        return self.made(scale, offset, scale_bits=scale_bits)

    changes = {"name": "other", "sides": sides, "group_options": {}, "scheme": scheme}
    return type("Other", (base,), changes)


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
READ = [(base, "keys", *groups) for base in (Int8, Fp8) for groups in KEYS_8]
READ += [(base, "values", (1, size), None) for base in (Int8, Fp8) for size in (1, 2, 8, DIM)]
READ += [(base, "keys", (size, 1), (size, 1)) for base in (Int4, Int2) for size in (1, 2, 4, PAGE)]
READ += [(base, "values", (1, size), (1, size)) for base in (Int4, Int2) for size in (1, 2, 8, DIM)]


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
UNREAD = [(Int8, "keys", (size, 1), None, 16) for size in (2, 4, PAGE)]
UNREAD += [(Fp8, "keys", (4, DIM), None, 16), (Int8, "keys", (PAGE, DIM), None, 16)]
UNREAD += [(Int8, "keys", (1, DIM), (1, 1), 16), (Int8, "keys", (8, 1), (8, 1), 16)]
UNREAD += [(base, "values", (1, 8), (1, 8), 16) for base in (Int8, Fp8)]
UNREAD += [(Int8, "keys", (PAGE, DIM), (PAGE, 1), 32), (Int8, "values", (1, DIM), None, 32)]
UNREAD += [(base, "keys", (8, 1), (8, 1), 32) for base in (Int4, Int2)]
UNREAD += [(Int4, "values", (1, 8), (1, 8), 32), (Int2, "latent", (PAGE, 1), (PAGE, 1), 32)]
UNREAD += [(Int8, "latent", (1, 8), (1, 8), 16), (Fp8, "latent", (8, 1), (8, 1), 16)]
UNREAD += [(Int8, "latent", (1, 1), None, 16), (Int8, "k_rope", (1, 8), None, 16)]
UNREAD += [(Int4, "k_rope", (PAGE, 1), (PAGE, 1), 16)]


@pytest.mark.parametrize(("base", "side", "scale", "offset", "bits"), UNREAD)
def test_compiled_kernels_refuse_each_grouping_that_they_do_not_have(
    registered, base, side, scale, offset, bits
):
    registered(regrouped(base, scale, offset, bits, sides=(side,)))
    says = f"read {side} in format 'other': "
    assert f"the C kernel does not {says}" in str(unsupported(spec_of(side, LANES)))
    reason = _why_not_sizes(torch.float32, spec_of(side, ROWS), 1)
    assert f"the Triton kernels do not {says}" in str(reason)


@pytest.mark.parametrize("base", [Int8, Fp8])
def test_triton_refuses_keys_with_a_scale_of_each_token(registered, base):
    """C reads these; Triton's kernel has one scale for the page."""
    registered(regrouped(base, (1, DIM), None))
    reason = _why_not_sizes(torch.float32, spec_of("keys", ROWS), 1)
    assert "a scale (1, 32) and no offset for groups of (tokens, channels)" in str(reason)


def test_triton_reads_the_groupings_of_int4_and_int2(registered):
    registered(regrouped(Int2, (8, 1), (8, 1)))
    assert _why_not_sizes(torch.float32, spec_of("keys", ROWS), 1) is None


@needs_library
def test_generate_runs_a_grouping_that_c_does_not_have_in_torch_and_says_so(registered):
    registered(regrouped(Int8, (PAGE, 1), None))
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
            spec = PageSpec.build(
                key_scheme(name), value_scheme(name), num_kv_heads=2, key_dim=64, value_dim=64, page_size=PAGE,
                dtype=torch.float32, layout=layout,
            )  # fmt: skip
            found = reason(spec) if reason else _why_not_sizes(torch.float32, spec, 1)
            assert found is None


# -- what the kernels would ignore -------------------------------------------------------------------------------------


def clipped(self, numbers, scheme):
    return Int4.encode(self, numbers.clamp(-0.3, 0.3), scheme)


def sevens(self, codes, scale, offset, scheme):
    return Int4.decode(self, codes, scale, offset, scheme) * 0 + 7.0


@pytest.mark.parametrize(
    ("base", "changes", "what"),
    [
        (Int4, {"encode": clipped}, "encode"),
        (Int4, {"decode": sevens}, "decode"),
        (Int4, {"numbers_of": lambda self, codes: codes.float() + 1}, "numbers_of"),
        (Int4, {"__init__": lambda self: setattr(self, "encode", clipped)}, "encode"),
        (Int8, {"codes_of": lambda self, steps: steps.floor().to(torch.int8)}, "codes_of"),
        (Fp8, {"top": 240.0}, "top"),
    ],
)
def test_register_format_refuses_arithmetic_that_compiled_kernels_would_ignore(base, changes, what):
    with pytest.raises(
        CacheOptionError, match=f"format 'other': {what} differs from .*{base.name}"
    ):
        kv_hf.register_format(type("Other", (base,), {"name": "other", **changes}))


def test_a_subclass_of_int4_with_its_own_arithmetic_is_a_format_without_native_number(registered):
    changes = {"name": "other", "encode": clipped, "native_number": None, "native_code": ""}
    own = registered(type("Other", (Int4,), changes))
    assert own.code == "other"
    assert "no compiled kernel reads the format 'other'" in str(
        backend.why_not(torch.device("cpu"), spec_of("keys", LANES))
    )


@pytest.mark.parametrize("name", ["none", "signed", "unsigned", "float8"])
def test_register_format_refuses_the_names_of_shipped_codes(name):
    """A format called "none" was taken for exact storage, one called "signed" for int8."""
    own = {"name": name, "native_number": None, "native_code": ""}
    with pytest.raises(CacheOptionError, match=f"must not be one of .*, got '{name}'"):
        kv_hf.register_format(type("Other", (Int8,), own))
