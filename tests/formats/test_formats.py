"""Formats of other packages: nf4 (tests/nf4_format.py) goes through everything that a shipped format goes through."""

import pickle
import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import nf4_format
import paged_inputs
import pytest
import rounding
import tiny_latent
import tiny_models
import torch
from harness import ROOT
from nf4_format import NF4
from paged_inputs import needs_library, page_spec
from transformers import GenerationConfig
from transformers.generation import configuration_utils

import kv_hf
from kv_hf import doctor
from kv_hf.backends import cpu
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu import decode as c_decode
from kv_hf.backends.cpu import unsupported
from kv_hf.backends.cpu import write as c_write
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.reference.pages import seal_pages
from kv_hf.backends.triton import _why_not_sizes
from kv_hf.cache_names import parse_cache_name
from kv_hf.errors import CacheFileError, CacheMismatchError, CacheOptionError
from kv_hf.evaluation.caches import cache_kind
from kv_hf.formats import base, format_names, get_format, named
from kv_hf.formats.linear import Float8Format, Groups, RangeFormat, SignedFormat
from kv_hf.quant.codec import decode, encode
from kv_hf.spec import LANES, ROWS
from kv_hf_cli import main

CPU = torch.device("cpu")
small = partial(page_spec, key_dim=32, page_size=16)
PROMPT, NEW = 70, 12  # with pages of 16 tokens several are sealed before and while tokens are made


@pytest.fixture
def registered():
    """Register formats as other packages would, and take them back; yields the function that does."""
    names = []

    def register(kind):
        kv_hf.register_format(kind)
        names.append(kind.name)
        return get_format(kind.name)

    yield register
    for name in {*names} & {*format_names()}:
        kv_hf.unregister_format(name)
    for name in {*kv_hf.cache_names()} - {*named._shipped}:
        kv_hf.unregister_cache(name)


@pytest.fixture
def nf4(registered):
    return registered(NF4)


@pytest.fixture(scope="module")
def model():
    return tiny_models.make_model("llama")


def generated(model, implementation, **options):
    prompt = tiny_models.tokens(2, PROMPT)
    return model.generate(
        prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
        output_logits=True, cache_implementation=implementation, cache_config={"page_size": 16, **options},
    )  # fmt: skip


# -- nf4, from registration to text -----------------------------------------------------------------------------------


def test_register_format_makes_its_names_known_and_unregister_takes_them_back():
    before = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    with pytest.raises(CacheOptionError, match="keys must be one of .*, got 'nf4'"):
        kv_hf.CacheConfig(keys="nf4")
    assert kv_hf.register_format(NF4) is NF4
    assert "nf4" in format_names("keys") and "nf4" not in format_names("latent")
    assert "paged_nf4" in kv_hf.cache_names()
    assert "paged_nf4" in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    GenerationConfig(cache_implementation="paged_nf4").validate()
    kv_hf.unregister_format("nf4")
    assert before == configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    assert "nf4" not in format_names() and "paged_nf4" not in kv_hf.cache_names()
    with pytest.raises(CacheOptionError, match="cache_implementation must be one of"):
        kv_hf.CacheConfig.from_options("paged_nf4", None)


@pytest.mark.parametrize("layout", ["rows", "lanes"])
def test_pages_hold_what_a_registered_format_encodes(nf4, layout):
    """Every stored number is its group's largest times a level; packing and both layouts lose nothing."""
    for side in small("nf4", layout=layout).sides:
        tokens = torch.randn(3, 2, 16, 32, generator=torch.Generator().manual_seed(1))
        fields, damaged = encode(tokens, side)
        assert {name: (t.shape[1:], t.dtype) for name, t in fields.items()} == side.fields
        assert set(fields) == {"codes", "scale"} and not bool(damaged)
        around = -2 if side.side == "keys" else -1
        scale = tokens.abs().amax(around, keepdim=True).half().float()
        nearest = (tokens[..., None] / scale[..., None] - nf4_format.LEVELS).abs().argmin(-1)
        expected = nf4_format.LEVELS[nearest] * scale
        assert torch.equal(decode(fields, side, torch.float32), expected)


def test_generate_in_a_registered_format_reads_its_reference_decode(nf4, model):
    """It is said once that no compiled kernel reads it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kv_hf.KVCacheWarning)
        got = generated(model, "paged_nf4")
        generated(model, "paged_nf4")
    [warning] = [str(one.message) for one in caught]
    assert "no compiled kernel reads the format 'nf4' of keys and values" in warning
    assert "slower than 'c'" in warning
    reference = generated(model, "paged_nf4", kernel="reference")
    exact = generated(model, "paged_exact", kernel="reference")
    assert torch.equal(got.sequences, reference.sequences)
    for own, right, other in zip(got.logits, reference.logits, exact.logits, strict=True):
        rounding.assert_close(own, right)
        rounded = float((right - other).abs().max())
    assert rounded > 1e-3  # what nf4 rounds is seen


def test_static_cache_steps_through_operators_in_a_registered_format(nf4, model):
    """A preallocated cache rebuilds specs from tensors: the code of nf4 must not become int4's, which has as many bits."""
    growing = generated(model, "paged_nf4", kernel="reference")
    fixed = generated(model, "paged_nf4", kernel="reference", max_length=PROMPT + NEW)
    assert torch.equal(growing.sequences, fixed.sequences)
    for own, other in zip(growing.logits, fixed.logits, strict=True):
        rounding.assert_close(own, other)


@pytest.mark.parametrize("kernel", ["c", "triton"])
def test_a_compiled_kernel_asked_for_by_name_refuses_a_registered_format(nf4, model, kernel):
    with pytest.raises(
        CacheOptionError, match=f"kernel='{kernel}' cannot run here: .*'nf4' of keys"
    ):
        generated(model, "paged_nf4", kernel=kernel)
    with pytest.raises(CacheOptionError, match="reads the format 'nf4' of values"):
        generated(model, "paged_int8", values="nf4", kernel=kernel)


def test_latents_refuse_a_format_of_keys_and_values(nf4):
    with pytest.raises(CacheOptionError, match="latent must be one of"):
        kv_hf.CacheConfig(latent="nf4")
    with pytest.raises(CacheOptionError, match="format 'nf4' is for keys, values, not for latent"):
        kv_hf.PagedCache(tiny_latent.make_config("deepseek_v3"), keys="nf4")


# -- files, plans, evaluation, doctor, recipes ------------------------------------------------------------------------


def test_plan_and_evaluation_know_a_registered_format(nf4, model, capsys):
    found = kv_hf.plan("llama-3.1-8b", context=4096)
    rows = {row.cache: row.memory.total for row in found.rows}
    # 4 bits and a scale, where int4 has an offset as well
    assert rows["paged_int2"] < rows["paged_nf4"] < rows["paged_int4"] < rows["paged_k8v4"]
    assert main(["memory", "llama-3.1-8b", "--cache", "paged_nf4:keys=int8", "paged_k8v4"]) == 0
    assert "paged_nf4:keys=int8" in capsys.readouterr().out
    assert parse_cache_name("paged_nf4:group_size=8") == ("paged_nf4", {"group_size": 8})
    [layer, *_] = cache_kind("paged_nf4:keys=int8").make(model.config, 0).paged_layers
    assert layer.formats.names == ("int8", "nf4")


def test_doctor_tries_a_registered_format(nf4):
    [report] = [
        one
        for one in doctor.report_formats(doctor.Subject(CPU, torch.float32, 32, 16))
        if one.format == "nf4"
    ]
    assert report.kernel == "reference"
    assert "'nf4' of keys and values" in dict(report.others)["c"]
    trials = doctor.self_test(doctor.Subject(CPU, torch.float32, 32, 16), 1000).trials
    own = {(one.kernel, one.status) for one in trials if one.format == "paged_nf4"}
    assert own == {("reference", "ok")}


# -- registration ------------------------------------------------------------------------------------------------------


def made(**changes):
    return type("Odd", (NF4,), {"name": "odd", **changes})


def too_large(self, numbers, scheme):
    codes, scale, offset = NF4.encode(self, numbers, scheme)
    return codes + 9, scale, offset


def of_all_pages(self, numbers, scheme):
    codes, scale, offset = NF4.encode(self, numbers - numbers.mean(0), scheme)
    return codes, scale, offset


def scales_of_all_pages(self, numbers, scheme):
    codes, scale, offset = NF4.encode(self, numbers, scheme)
    return codes, scale * len(numbers), offset


def zeros(self, codes, *rest):
    return torch.zeros(codes.shape)


def in_groups(*group, **options):
    return lambda self, side, group_size=None: self.made(scale_group=group, **options)


def raises(self, numbers, scheme):
    raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (made(name="NF 4"), "name must be lower-case"),
        (made(name="int4"), "format 'int4' is registered already"),
        (made(bits=5), "bits must be 1, 2, 3, 4, 6 or 8, got 5"),
        (made(sides=("keys", "queries")), "sides must be some of keys, values, latent, k_rope"),
        (made(sized_sides=("latent",)), "sized_sides must be some of keys, values, or"),
        (made(code_dtype=torch.int8), "code_dtype must be one of torch.uint8"),
        (made(encode=too_large), r"codes must be below 2\^4"),
        (made(encode=of_all_pages), "the same codes alone as beside other pages"),
        (made(encode=scales_of_all_pages), "the same scales alone as beside other pages"),
        (made(decode=zeros), "decode must give numbers near to the encoded ones"),
        (
            made(encode=lambda *_: None),
            r"encode must return \(codes, scale, offset\), got NoneType",
        ),
        (made(scheme=in_groups(24, 1)), "tokens of a group must divide a page"),
        (made(encode=raises), "cannot encode and decode keys: ZeroDivisionError: by nothing"),
        (made(name="4bit"), "digits or underscores, a letter first, got '4bit'"),
        (made(sized_sides=None), "sized_sides must be some of .*, got None"),
        (
            made(k_rope="nope"),
            "k_rope must be a format of RoPE keys, one of exact, int8, got 'nope'",
        ),
        (made(scheme=in_groups(1, 2, 3)), r"'odd': scale_group must be \(tokens, channels\)"),
        (made(scheme=in_groups(1, 4, axis="token")), "axis must be 'tokens', .*, got 'token'"),
        (made(scheme=in_groups(1, 4, clip=-5)), "clip must be a part .*, got -5"),
        (made(scheme=in_groups(1, 4, scale_bits=8)), "scale_bits must be 16 or 32, got 8"),
        (
            made(scheme=lambda self, side, group_size=None: get_format("int4").scheme(side)),
            "self.made",
        ),
        (
            made(__init__=lambda self: 1 / 0),
            "format Odd must be a class that is made without arg.*Zero",
        ),
        # "none" was taken for exact storage, "signed" for int8
        *(
            (made(name=name), f"must be none of .*, got '{name}'")
            for name in ("none", "signed", "unsigned", "float8")
        ),
        (kv_hf.Format, "format Format must be a class .* has scheme, encode and decode"),
        (dict, "format must be a kv_hf.Format, or a class of one, got dict"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_register_format_refuses_and_changes_nothing(given, says):
    before = kv_hf.cache_names(), dict(base.FORMATS)
    with pytest.raises(CacheOptionError, match=says):
        kv_hf.register_format(given)
    assert (kv_hf.cache_names(), dict(base.FORMATS)) == before


def test_register_format_refuses_another_one_of_a_name(nf4):
    """The same class again, as where a cell of a notebook runs twice, takes the place of the first."""
    with pytest.raises(CacheOptionError, match="format 'nf4' is registered already; choose"):
        kv_hf.register_format(Halved)
    kv_hf.register_format(type("NF4", (NF4,), {"__module__": NF4.__module__, "bits": 8}))
    assert kv_hf.cache_names().count("paged_nf4") == 1 and get_format("nf4").bits == 8


def test_a_format_of_keys_alone_has_no_cache_name_of_its_own(registered):
    registered(made(sides=("keys",), sized_sides=("keys",)))
    assert "odd" in format_names("keys") and "odd" not in format_names("values")
    assert "paged_odd" not in kv_hf.cache_names()
    assert kv_hf.CacheConfig(keys="odd", values="int8").keys == "odd"
    with pytest.raises(CacheOptionError, match="values must be one of .*, got 'odd'"):
        kv_hf.CacheConfig(values="odd")


def test_unregister_format_refuses_what_is_shipped_or_unknown(nf4):
    with pytest.raises(CacheOptionError, match="'int4' comes with kv_hf and stays"):
        kv_hf.unregister_format("int4")
    with pytest.raises(CacheOptionError, match="'paged_int4' comes with kv_hf and stays"):
        kv_hf.unregister_cache("paged_int4")
    for odd in ("nf5", [], None):
        with pytest.raises(CacheOptionError, match="is not registered"):
            kv_hf.unregister_format(odd)
        with pytest.raises(CacheOptionError, match="is not registered"):
            kv_hf.unregister_cache(odd)
    kv_hf.register_cache("paged_mixed", keys="int8", layers={"0": {"values": "nf4"}})
    kv_hf.unregister_format("nf4")
    with pytest.raises(CacheOptionError, match="must be one of .*, got 'nf4'"):
        kv_hf.CacheConfig.from_options("paged_mixed", None)


def test_a_cache_of_an_unregistered_format_says_how_it_can_be_saved(nf4, model, tmp_path):
    cache = kv_hf.PagedCache(model.config, keys="nf4", page_size=16)
    with torch.no_grad():
        model(tiny_models.tokens(1, PROMPT), past_key_values=cache)
    stored = pickle.dumps(cache)
    cache.save(tmp_path / "saved.safetensors", model)
    kv_hf.unregister_format("nf4")
    with pytest.raises(CacheFileError, match="keys must be one of .*, got 'nf4'"):
        kv_hf.PagedCache.load(tmp_path / "saved.safetensors", model)
    for attempt in (
        lambda: cache.save(tmp_path / "cache.safetensors", model),
        cache.fresh,
        lambda: replace(cache.options, page_size=32),
        lambda: kv_hf.CacheConfig(layers={"0": "nf4"}),
        lambda: pickle.loads(stored),
    ):
        with pytest.raises(CacheOptionError, match="'nf4'"):
            attempt()
    assert not (tmp_path / "cache.safetensors").exists()
    kv_hf.register_format(NF4)
    loaded = kv_hf.PagedCache.load(tmp_path / "saved.safetensors", model)
    for own, other in zip(cache.paged_layers, loaded.paged_layers, strict=True):
        assert torch.equal(own.keys, other.keys) and torch.equal(own.values, other.values)


class Halved(NF4):
    """nf4 by name and size, with other numbers."""

    def decode(self, codes, scale, offset, scheme):
        return super().decode(codes, scale, offset, scheme) / 2


def test_pages_of_a_format_that_is_gone_are_not_given_to_another_of_its_name(nf4, model, tmp_path):
    """A file or a store would hand them to an arithmetic that is not theirs."""
    store = kv_hf.PrefixStore()
    cache = kv_hf.PagedCache(model.config, keys="nf4", page_size=16, prefix_store=store)
    alone = kv_hf.PagedCache(model.config, keys="nf4", page_size=16)
    with torch.no_grad():
        model(tiny_models.tokens(1, PROMPT), past_key_values=cache)
        model(tiny_models.tokens(1, PROMPT), past_key_values=alone)
    kv_hf.unregister_format("nf4")
    kv_hf.register_format(Halved)
    other = kv_hf.PagedCache(model.config, keys="nf4", page_size=16, prefix_store=store)
    with (
        pytest.raises(CacheMismatchError, match="shared with a cache of other formats"),
        torch.no_grad(),
    ):
        model(tiny_models.tokens(1, PROMPT), past_key_values=other)
    with pytest.raises(CacheOptionError, match="'nf4' of this cache's pages is not the one"):
        alone.save(tmp_path / "cache.safetensors", model)
    assert not list(tmp_path.iterdir())


# -- formats that pass the trial and then give something else: nothing of that reaches a page ---------------------------


class Fickle(NF4):
    """nf4, until `change` is set."""

    name = "fickle"
    change = None
    decoded = None

    def encode(self, numbers, scheme):
        encoded = super().encode(numbers, scheme)
        return encoded if Fickle.change is None else Fickle.change(*encoded)

    def decode(self, codes, scale, offset, scheme):
        numbers = super().decode(codes, scale, offset, scheme)
        return numbers if Fickle.decoded is None else Fickle.decoded(numbers)


@pytest.fixture
def side(registered):
    registered(Fickle)
    return small("fickle").values


TOKENS = torch.randn(3, 2, 16, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c, s, o: (c[:, :1], s, o), r"codes must be torch.uint8 \[3, 2, 16, 32\], got"),
        (lambda c, s, o: (c.long(), s, o), "codes must be torch.uint8 .* got torch.int64"),
        (lambda c, s, o: (c, s[:, :, :1], o), r"scale must be torch.float16 \[3, 2, 16, 1\]"),
        (lambda c, s, o: (c, None, o), "scale must be a tensor, got NoneType"),
        (lambda c, s, o: (c, s / 0, o), "scale must be finite"),
        (lambda c, s, o: (c, s, s), "offset must be None: the scheme has no offset_group"),
    ],
)
def test_seal_refuses_what_has_another_form_and_leaves_pages_alone(side, monkeypatch, change, says):
    """The result for one page, head or group was stored in all of them, by broadcasting."""
    fields = {
        name: torch.ones(4, *shape, dtype=dtype) for name, (shape, dtype) in side.fields.items()
    }
    before = {name: field.clone() for name, field in fields.items()}
    jobs = torch.tensor([[row, 0, row, -1] for row in range(3)], dtype=torch.int32)
    monkeypatch.setattr(Fickle, "change", staticmethod(change))
    with pytest.raises(CacheOptionError, match=f"format 'fickle': encode.*{says}"):
        seal_pages(TOKENS, jobs, fields, side)
    assert all(torch.equal(fields[name], before[name]) for name in fields)


@pytest.mark.parametrize(
    ("decoded", "got"),
    [
        (lambda x: x[..., :1], r"got torch.float32 \[3, 2, 16, 1\]"),
        (lambda x: x.double(), "float64"),
    ],
)
def test_decode_refuses_what_has_another_form(side, monkeypatch, decoded, got):
    fields, _ = encode(TOKENS, side)
    monkeypatch.setattr(Fickle, "decoded", staticmethod(decoded))
    with pytest.raises(
        CacheOptionError, match=f"format 'fickle': decode's numbers must be .*{got}"
    ):
        decode(fields, side, torch.float32)


# -- names of caches ---------------------------------------------------------------------------------------------------


def test_register_cache_gives_options_a_name(nf4, model):
    """The second call is that of a notebook's cell that runs twice."""
    for _ in range(2):
        kv_hf.register_cache("paged_mine", keys="int8", values="int2", group_size=8, page_size=16)
    cache = kv_hf.PagedCache.from_implementation(model.config, "paged_mine", {"sink_tokens": 2})
    options = cache.options
    assert (options.keys, options.values, options.group_size) == ("int8", "int2", 8)
    assert (options.page_size, options.sink_tokens) == (16, 2)
    with pytest.raises(CacheOptionError, match="take another name, or call kv_hf.unregister_cache"):
        kv_hf.register_cache("paged_mine", keys="int8")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("k8v4", {}, "name must be paged_ and lower-case letters, digits or underscores"),
        ("paged_a:b", {}, "name must be paged_"),
        (4, {}, "name must be paged_"),
        ("paged_int4", {}, "'paged_int4' is registered already, for keys='int4', values='int4'"),
        ("paged_new", {"keys": "int5"}, "keys must be one of .*, got 'int5'"),
        (
            "paged_new",
            {"keys": "exact", "group_size": 8},
            "for keys int6, int4, int3 and int2 read it, not exact",
        ),
    ],
)
def test_register_cache_refuses_and_changes_nothing(name, options, says):
    before = kv_hf.cache_names()
    with pytest.raises(CacheOptionError, match=says):
        kv_hf.register_cache(name, **options)
    assert kv_hf.cache_names() == before


def test_docs_show_the_format_that_is_tested():
    text = (ROOT / "docs" / "formats.md").read_text()
    shown = re.search(r"^```python\n(.*?)^```", text.partition("## Add a format")[2], re.M | re.S)
    assert shown[1] == Path(nf4_format.__file__).read_text()


# -- codes of shipped formats in other groups ----------------------------------------------------------------

PAGE, DIM = 16, 32


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


def spec_of(side, layout):
    """Return pages whose `side` is in the format "other"; the others are exact, or latents of 8 bits."""
    if side in ("latent", "k_rope"):
        names = ("other", "exact") if side == "latent" else ("int8", "other")
        return paged_inputs.latent_spec(*names, rank=DIM, rope=8, page=PAGE, layout=layout)
    names = ("other", "exact") if side == "keys" else ("exact", "other")
    return page_spec(*names, key_dim=DIM, page_size=PAGE, layout=layout)


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
    paged_inputs.check_seals(kv.spec, c_write.write)
    call = AttentionCall(paged_inputs.make_query(kv, dtype=torch.float32), kv, 0.2)
    out = c_decode.paged_attention(call)
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
    reason = _why_not_sizes(spec_of(side, ROWS))
    assert f"the Triton kernels do not {says}" in str(reason)


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
