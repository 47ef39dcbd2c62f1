"""Damaged and forged files of saved caches: refused with a CacheFileError, with no memory beyond their own size."""

import copy
import hashlib
import json
import os
import random

import pytest
import safetensors.torch
import tiny_latent
import torch
from allocations import NewTensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import left_padded, make_model, make_sliding, tokens

import kv_hf
from kv_hf.cache.saved import _checksum

PAGE = 16


@pytest.fixture(scope="module")
def model():
    return make_sliding("gemma3_text", 24)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """The bytes of a saved cache of two groups of layers, with token ids."""
    cache = kv_hf.PagedCache(model.config, keys="int4", values="int8", page_size=PAGE)
    text = model.generate(**left_padded([90, 60]), past_key_values=cache, max_new_tokens=3)
    path = tmp_path_factory.mktemp("saved") / "cache"
    cache.save(path, model, text)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


def refused(path, data, model, match="cannot be loaded"):
    """Check that loading `data` is refused, and that no more than its own size was allocated for it."""
    path.write_bytes(data)
    with NewTensors() as made, pytest.raises(kv_hf.CacheFileError, match=match) as raised:
        kv_hf.PagedCache.load(path, model)
    assert made.largest <= max(4096, len(data))
    assert str(path) in str(raised.value) and len(str(raised.value)) < 1200


def split(data):
    """(header as JSON, description as JSON, bytes of the tensors)"""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return header, json.loads(header["__metadata__"]["cache"]), data[end:]


def joined(header, description, tensors):
    """A file of these parts with right checksums: what a forger writes."""
    header = copy.deepcopy(header)
    metadata = header.get("__metadata__")
    if description is not None:
        for name, digest in description.get("tensors", {}).items():
            if name in header and isinstance(digest, str):
                begin, end = header[name]["data_offsets"]
                description["tensors"][name] = hashlib.sha256(tensors[begin:end]).hexdigest()
        metadata["cache"] = json.dumps(description)
    if isinstance(metadata, dict):
        metadata["checksum"] = _checksum(metadata)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def claims(description, header):
    """Let a description name all tensors of a header, whose checksums `joined` writes."""
    description["tensors"] = {name: "" for name in header if name != "__metadata__"}


# -- accidents -----------------------------------------------------------------------------------------------


def test_truncated_files_are_refused(saved, model, path):
    end = 8 + int.from_bytes(saved[:8], "little")
    cuts = {0, 1, 7, 8, 9, end - 1, end, end + 1, len(saved) - 1}
    cuts |= {len(saved) * i // 20 for i in range(20)}
    for cut in sorted(cuts):
        refused(path, saved[:cut], model, "cut off")
    refused(path, saved + b"\0", model, "no saved cache")


def test_flipped_bits_are_found_wherever_they_are(saved, model, path):
    chosen = random.Random(0)
    end = 8 + int.from_bytes(saved[:8], "little")
    places = [chosen.randrange(8 * end) for _ in range(80)]
    places += [chosen.randrange(8 * end, 8 * len(saved)) for _ in range(60)]
    for place in [*range(0, 64, 5), *places, 8 * len(saved) - 1]:
        data = bytearray(saved)
        data[place // 8] ^= 1 << (place % 8)
        refused(path, bytes(data), model)


def test_other_files_are_refused(model, path, tmp_path):
    for data in (b"", b"\x80\x04\x95", b"PK\x03\x04" + bytes(100), b"{}" * 50, os.urandom(4000)):
        refused(path, data, model)
    safetensors.torch.save_file({"a": torch.zeros(3)}, path)
    refused(path, path.read_bytes(), model, "not a saved cache")
    with pytest.raises(FileNotFoundError):
        kv_hf.PagedCache.load(tmp_path / "nothing", model)
    os.mkfifo(tmp_path / "pipe")  # whose end nobody writes to
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(kv_hf.CacheFileError, match="regular file"):
            kv_hf.PagedCache.load(place, model)


@pytest.mark.parametrize("version", ["8", "10", None])
def test_another_file_version_is_refused(saved, model, path, version):
    header, description, tensors = split(saved)
    header["__metadata__"].update(version=version or "", kv_hf="9.9")
    said = f"file version '{version or ''}', written by kv_hf '9.9'"
    refused(path, joined(header, description, tensors), model, said)


# -- headers -------------------------------------------------------------------------------------------------

NAME = "layers.1.keys.codes"
SIDES = ("keys", "values")


def put(**values):
    return lambda entry, header: entry.update(values)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (put(shape=[1 << 40, 2, 16, 8]), "no saved cache"),
        (put(dtype="I8"), r"is \(torch.int8, .* expected \(torch.uint8"),
        (put(data_offsets=[0, 1 << 62]), "no saved cache"),
        (lambda entry, header: header.update(__metadata__={}), "not a saved cache"),
        (lambda entry, header: header.pop("__metadata__"), "not a saved cache"),
        (lambda entry, header: header.pop(NAME), "no saved cache"),
        (lambda entry, header: header.update(x=header.pop(NAME)), f"'{NAME}' is missing"),
    ],
)
def test_forged_headers_are_refused(saved, model, path, change, match):
    header, description, tensors = split(saved)
    change(header[NAME], header)
    claims(description, header)
    told = description if header.get("__metadata__") else None
    refused(path, joined(header, told, tensors), model, match)


@pytest.mark.parametrize(
    ("layer", "shape", "match"),
    [
        (1, [2, 1 << 50, 0, 16], "windows"),
        (1, [2, 0, 0, 16], "windows"),
        (1, [0], "windows"),
        (400, [2, 2, 0, 16], "belong to no cache"),
    ],
    ids=str,
)
def test_forged_layers_without_numbers_are_refused(saved, model, path, layer, shape, match):
    """A shape with a 0 takes no bytes, so that the library has nothing to compare it with."""
    header, description, _ = split(saved)
    tensors = safetensors.torch.load(saved)
    tensors.update({f"layers.{layer}.{side}.window": torch.empty(shape) for side in SIDES})
    forged, _, rest = split(safetensors.torch.save(tensors, header["__metadata__"]))
    claims(description, forged)
    refused(path, joined(forged, description, rest), model, match)


@pytest.mark.parametrize("text", [b"[" * 10_000, b"1" * 10_000, b"\xff\xfe{}", b"null", b"{"])
def test_headers_that_are_no_json_are_refused(model, path, text):
    refused(path, len(text).to_bytes(8, "little") + text, model, "no saved cache")


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 100_000, '{"a": NaN}', "null"])
def test_descriptions_that_are_no_json_are_refused(saved, model, path, text):
    header, _, tensors = split(saved)
    header["__metadata__"]["cache"] = text
    refused(path, joined(header, None, tensors), model)


# -- descriptions --------------------------------------------------------------------------------------------


def set_at(*where):
    *keys, last, value = where

    def change(found):
        for key in keys:
            found = found[key]
        found[last] = value(found[last]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_at("groups", 0, "rows", 1, "padding", lambda n: n + 1), "holds .* tokens, expected"),
        (set_at("groups", 0, "rows", 0, "exact", 10**6), r"\[2, 2, 1000000, 16\]"),
        (set_at("groups", 1, "rows", 0, "exact", 3), "not its first tokens"),
        (set_at("groups", 0, "rows", 0, "pages", 0, 10**6), "do not hold the pages"),
        (set_at("groups", 0, "rows", 0, "pages", lambda ids: ids[:-1]), "do not hold the pages"),
        (
            set_at("groups", 0, "rows", lambda rows: [*rows, {**rows[0], "pages": []}]),
            "different batches",
        ),
        (set_at("groups", 0, "window", 25), "windows"),
        (set_at("groups", 0, "seen", 10**6), "at least 1000000"),
        (set_at("groups", 0, "confirmed", 10**5), "impossible"),
        (set_at("groups", 0, "recording", 1), "valid boolean"),
        (set_at("tensors", {}), "does not fit its checksum"),
        (set_at("options", "page_size", 32), "expected .torch.uint8"),
        (set_at("options", "recent_tokens", 1e9), "recent_tokens"),
        (set_at("options", "layers", {"0": "exact"}), "expected .torch.float32"),
        (set_at("options", "layers", {"9" * 5000: "exact"}), "cannot be loaded"),
        (set_at("options", "max_pages", 2), "max_pages=2"),
        (set_at("options", "shell", "true"), "shell"),
        (set_at("model", "adapters", None), "by which adapters and weights"),
        (set_at("model", "adapters", "active", "tuned"), "model.adapters.active"),
        (set_at("model", "adapters", "active", ["x" * 5000]), "saved with adapter"),
        (set_at("model", "adapters", "settings", "0"), "settings of these adapters differ"),
        (set_at("model", "weights", {}), "embed_tokens.weight differs .'none' there"),
    ],
)
def test_forged_descriptions_are_refused(saved, model, path, change, match):
    header, description, tensors = split(saved)
    change(description)
    refused(path, joined(header, description, tensors), model, match)


@pytest.mark.parametrize("channel", [0, 64, 255], ids=["named twice", "past the end", "far away"])
def test_forged_orders_of_channels_are_refused(path, channel):
    """A kernel would read queries and keys at places that the file names."""
    model = make_model("llama", head_dim=64)
    cache = kv_hf.PagedCache(model.config, keys="int3", values="int8", page_size=PAGE)
    model.generate(**left_padded([90, 60]), past_key_values=cache, max_new_tokens=3)
    cache.save(path, model)
    header, description, tensors = split(path.read_bytes())
    kv_hf.PagedCache.load(path, model).check_integrity()
    begin, end = header["layers.1.keys.order"]["data_offsets"]
    order = bytearray(tensors[begin:end])
    assert order[-1] == 63 and order[-64:].count(0) == 1
    order[-1] = channel
    forged = joined(header, description, tensors[:begin] + bytes(order) + tensors[end:])
    refused(
        path, forged, model, "order of channels in pages of keys must name each channel 0 to 63"
    )


@pytest.mark.skipif(not tiny_latent.is_there("glm5_next"), reason="this transformers lacks it")
@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("0.conv_states.0", lambda held: None, "has None as conv_states.0 after 60 columns"),
        ("0.conv_states.0", lambda held: held[:1], r"has \[1, 96, 4\]"),
        ("0.conv_states.0", lambda held: held[:, 0, 0], r"has \[2\] of"),
        ("0.recurrent_states.0", lambda held: held.double(), "of torch.float64"),
        ("0.recurrent_states.0", lambda held: held[:, :0], r"has \[2, 0, "),
        ("0.conv_states.1", lambda held: torch.ones(2, 96, 4), "belong to no cache"),
        ("0.indexer_keys", lambda held: torch.ones(2, 60, 4), "belong to no cache"),
        ("0.past_kernels", lambda held: torch.zeros(1, dtype=torch.long), "as past_kernels"),
        ("0.past_kernels", lambda held: torch.ones(1), "as past_kernels"),
        ("1.indexer_keys", lambda held: held[:, :-1], "as indexer_keys after 60 columns of 2"),
        ("1.indexer_keys", lambda held: held[..., 0], "as indexer_keys"),
        ("1.indexer_keys", lambda held: None, "has None as indexer_keys"),
    ],
)
def test_forged_states_are_refused(path, name, change, match):
    model = tiny_latent.shared_model("glm5_next")
    cache = kv_hf.PagedCache(model.config, page_size=PAGE)
    with torch.no_grad():
        model(tokens(2, 60), past_key_values=cache)
    cache.save(path, model)
    kv_hf.PagedCache.load(path, model).check_integrity()
    header, description, _ = split(path.read_bytes())
    held = safetensors.torch.load(path.read_bytes())
    forged = change(held.pop(f"layers.{name}", None))
    held |= {} if forged is None else {f"layers.{name}": forged.contiguous()}
    header, _, rest = split(safetensors.torch.save(held, header["__metadata__"]))
    claims(description, header)
    refused(path, joined(header, description, rest), model, match)


def places(value, where=()):
    """Every place in a JSON value."""
    yield where
    kinds = {dict: dict.items, list: enumerate}
    for key, child in kinds.get(type(value), lambda _: ())(value):
        yield from places(child, (*where, key))


NASTY = st.one_of(
    st.sampled_from([None, True, [], {}, "", "x" * 5000, -1, 2**31, 2**63, 2**200, 1e308]),
    st.integers(-3, 300),
    st.sampled_from(["int8", "exact", "F32", "BF16", "0-1", "keys"]),
    st.recursive(
        st.integers() | st.text(max_size=3), lambda x: st.lists(x, max_size=3), max_leaves=5
    ),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_forgery_is_refused_or_harmless(saved, model, path, data):
    """A forger may write another valid cache: it then holds together, and the model runs on it."""
    header, description, tensors = split(saved)
    what = data.draw(st.sampled_from(["header", "description"]))
    document = header if what == "header" else description
    for _ in range(data.draw(st.integers(1, 2))):
        *keys, last = data.draw(st.sampled_from([p for p in places(document) if p]))
        parent = document
        for key in keys:
            parent = parent[key]
        change = data.draw(st.sampled_from(["set", "set", "remove", "copy"]))
        if change == "set":
            parent[last] = data.draw(NASTY)
        elif change == "remove":
            del parent[last]
        elif isinstance(parent, list):
            parent.append(parent[last])
        else:
            parent[str(last) + "0"] = parent[last]
    try:
        whole = joined(header, description if what == "description" else None, tensors)
    except (KeyError, TypeError, ValueError, AttributeError):  # no checksums could be made for it
        text = json.dumps(header).encode()
        whole = len(text).to_bytes(8, "little") + text + tensors
    path.write_bytes(whole)
    with NewTensors() as made:
        try:
            loaded = kv_hf.PagedCache.load(path, model)
        except kv_hf.CacheFileError:
            loaded = None
    assert made.largest <= 2 * len(saved)
    if loaded is not None:
        loaded.check_integrity()
        rows = len(loaded._group.rows)
        if loaded.options.recent_tokens < 1000:
            with torch.no_grad():
                padding = torch.tensor([[row.padding] for row in loaded._group.rows])
                mask = (torch.arange(loaded.get_seq_length() + 3) >= padding).long()
                model(tokens(rows, 3), attention_mask=mask, past_key_values=loaded)
            loaded.check_integrity()
