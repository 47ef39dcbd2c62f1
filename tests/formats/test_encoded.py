"""Registered formats that pass the trial and then give something else: nothing of that reaches a page."""

import pytest
import torch
from nf4_format import NF4

import kv_hf
from kv_hf.backends.reference.pages import seal_pages
from kv_hf.errors import CacheOptionError
from kv_hf.formats import get_format, key_scheme
from kv_hf.quant.codec import decode, encode
from kv_hf.spec import PageSpec


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
def side(monkeypatch):
    kv_hf.register_format(Fickle)
    spec = PageSpec.build(
        key_scheme("fickle"), get_format("fickle").scheme("values"), num_kv_heads=2, key_dim=32, value_dim=32,
        page_size=16, dtype=torch.float32,
    )  # fmt: skip
    yield spec.values
    kv_hf.unregister_format("fickle")


TOKENS = torch.randn(3, 2, 16, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c, s, o: (c[:, :1], s, o), r"codes must be torch.uint8 \[3, 2, 16, 32\], got"),
        (lambda c, s, o: (c[:1], s[:1], o), r"codes must be torch.uint8 \[3, 2, 16, 32\]"),
        (lambda c, s, o: (c.long(), s, o), "codes must be torch.uint8 .* got torch.int64"),
        (lambda c, s, o: (c + 16, s, o), r"codes must be below 2\^4, got 31"),
        (lambda c, s, o: (c, s[:, :, :1], o), r"scale must be torch.float16 \[3, 2, 16, 1\]"),
        (lambda c, s, o: (c, None, o), "scale must be a tensor, got NoneType"),
        (lambda c, s, o: (c, s.double(), o), "scale must be .*, got torch.float64"),
        (lambda c, s, o: (c, s * float("nan"), o), "scale must be finite"),
        (lambda c, s, o: (c, s / 0, o), "scale must be finite"),
        (lambda c, s, o: (c, s, s), "offset must be None: the scheme has no offset_group"),
        (lambda c, s, o: (c, s), r"must return \(codes, scale, offset\), got 2 values"),
        (lambda c, s, o: None, r"must return \(codes, scale, offset\), got NoneType"),
    ],
)
def test_seal_refuses_what_has_another_form_and_leaves_pages_alone(side, monkeypatch, change, says):
    """The result for one page, head or group was stored in all of them, by broadcasting."""
    fields = {
        name: torch.ones(4, *shape, dtype=dtype) for name, (shape, dtype) in side.fields.items()
    }
    before = {name: field.clone() for name, field in fields.items()}
    jobs = torch.tensor([[row, 0, row] for row in range(3)], dtype=torch.int32)
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


def test_shipped_formats_are_not_checked_at_each_page(monkeypatch):
    """Their arithmetic is tested; a step must not pay for the check."""
    from kv_hf.quant import codec

    monkeypatch.setattr(codec, "check_encoded", None)
    monkeypatch.setattr(codec, "check_decoded", None)
    spec = PageSpec.build(
        key_scheme("int4"), get_format("int8").scheme("values"), num_kv_heads=2, key_dim=32, value_dim=32,
        page_size=16, dtype=torch.float32,
    )  # fmt: skip
    for one in spec.sides:
        decode(encode(TOKENS, one)[0], one, torch.float32)
