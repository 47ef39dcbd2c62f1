"""Damaged and forged files of saved caches: refused with a CacheFileError, before anything is allocated."""

import copy
import hashlib
import json
import os
import random
import tracemalloc

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from new_tensors import NewTensors
from test_sliding import make as make_sliding
from tiny_models import left_padded, tokens

import kv_hf
from kv_hf.cache.saved import container

PAGE = 16
LIMIT = 1 << 18  # of a header, where parsing a full one would take long


@pytest.fixture(scope="module")
def model():
    return make_sliding("gemma3", 24)


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
    """Check that loading `data` is refused, and that next to nothing was allocated for it."""
    path.write_bytes(data)
    with NewTensors() as made, pytest.raises(kv_hf.CacheFileError, match=match) as raised:
        kv_hf.PagedCache.load(path, model)
    assert made.largest <= max(4096, len(data))
    assert str(path) in str(raised.value) and len(str(raised.value)) < 1200
    return made


def split(data):
    """(header as JSON, description as JSON, bytes of the tensors without the checksum)"""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return header, json.loads(header["__metadata__"]["cache"]), data[end:-32]


def joined(header, description, tensors):
    """A file of these parts, with the right checksum: what a forger writes."""
    header = copy.deepcopy(header)
    if description is not None:
        header["__metadata__"]["cache"] = json.dumps(description)
    return sealed(json.dumps(header).encode(), tensors)


def sealed(text, tensors):
    data = len(text).to_bytes(8, "little") + text + tensors
    return data + hashlib.sha256(data).digest()


def test_what_a_forger_joins_loads(saved, model, path):
    path.write_bytes(joined(*split(saved)))
    kv_hf.PagedCache.load(path, model).check_integrity()


# -- accidents -----------------------------------------------------------------------------------------------


def test_truncated_files_are_refused(saved, model, path):
    end = 8 + int.from_bytes(saved[:8], "little")
    cuts = {0, 1, 7, 8, 9, end - 1, end, end + 1, len(saved) - 33, len(saved) - 32, len(saved) - 1}
    cuts |= {len(saved) * i // 40 for i in range(40)}
    for cut in sorted(cuts):
        made = refused(path, saved[:cut], model, "cut off")
        assert not made.total
    refused(path, saved + b"\0", model, "appended")
    refused(path, saved + saved, model, "appended")


def test_flipped_bits_are_found_wherever_they_are(saved, model, path):
    chosen = random.Random(0)
    end = 8 + int.from_bytes(saved[:8], "little")
    places = [chosen.randrange(8 * end) for _ in range(150)]
    places += [chosen.randrange(8 * end, 8 * len(saved)) for _ in range(100)]
    for place in [*range(64), *places, 8 * len(saved) - 1]:
        data = bytearray(saved)
        data[place // 8] ^= 1 << (place % 8)
        assert not refused(path, bytes(data), model).total


def test_swapped_pieces_are_found(saved, model, path):
    end = 8 + int.from_bytes(saved[:8], "little")
    data = bytearray(saved)
    data[end : end + 512], data[end + 512 : end + 1024] = (
        saved[end + 512 : end + 1024],
        saved[end : end + 512],
    )
    assert bytes(data) != saved
    refused(path, bytes(data), model, "checksum")


def test_other_files_are_refused(model, path, tmp_path):
    for data in (b"", b"\x80\x04\x95", b"PK\x03\x04" + bytes(100), b"{}" * 50, os.urandom(4000)):
        assert not refused(path, data, model).total
    safetensors.torch.save_file({"a": torch.zeros(3)}, path)
    refused(path, path.read_bytes(), model, "not a saved cache")
    with pytest.raises(FileNotFoundError):
        kv_hf.PagedCache.load(tmp_path / "nothing", model)
    with pytest.raises(kv_hf.CacheFileError, match="regular file"):
        kv_hf.PagedCache.load(tmp_path, model)


def test_a_pipe_is_refused_without_waiting_for_it(model, tmp_path):
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes here")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(kv_hf.CacheFileError, match="regular file"):
        kv_hf.PagedCache.load(tmp_path / "pipe", model)


@pytest.mark.parametrize("version", ["1", "3"])
def test_another_file_version_is_refused(saved, model, path, version):
    """Version 1 did not say which adapters were active."""
    header, description, tensors = split(saved)
    header["__metadata__"].update(version=version, kv_hf="9.9")
    refused(
        path,
        joined(header, description, tensors),
        model,
        f"file version '{version}', written by kv_hf '9.9'",
    )
    del header["__metadata__"]["version"]
    refused(path, joined(header, description, tensors), model, "file version None")


# -- headers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length", [container.HEADER_LIMIT + 1, 10**8, 1 << 40, 1 << 63, (1 << 64) - 1]
)
def test_huge_headers_are_not_read(saved, model, path, length):
    tracemalloc.start()
    refused(
        path, length.to_bytes(8, "little") + saved[8:], model, f"at most {container.HEADER_LIMIT}"
    )
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**20


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"[" * LIMIT, "recursion"),
        (b'{"a":' * (LIMIT // 5), "recursion"),
        (b"[" + b"[]," * (LIMIT // 3 - 2) + b"[]]", "no JSON object"),
        (b"1" * 100_000, "no proper JSON"),
        (b'"' + b"\\ud800" * (LIMIT // 7) + b'"', "no JSON object"),
        (b"\xff\xfe{}", "no proper JSON"),
        (b"NaN", "NaN is not allowed"),
        (b'{"a":-Infinity}', "-Infinity is not allowed"),
        (b"null", "no JSON object"),
        (b"{", "no proper JSON"),
        (b"", "no proper JSON"),
        (b'{"__metadata__":{},"__metadata__":{}}', "occurs twice"),
        (b'{"__metadata__":{"a":"","a":""}}', "occurs twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_json_is_refused(model, path, text, match, monkeypatch):
    """Parsed, it may take a multiple of its length; the limit of the length bounds that."""
    monkeypatch.setattr(container, "HEADER_LIMIT", LIMIT)
    tracemalloc.start()
    refused(path, sealed(text, b""), model, match)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 48 * LIMIT


NAME = "layers.1.keys.codes"


def change_offsets(by):
    def change(entry, header):
        entry["data_offsets"] = [entry["data_offsets"][0] + by, entry["data_offsets"][1] + by]

    return change


def put(**values):
    return lambda entry, header: entry.update(values)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (put(shape=[1 << 40, 2, 16, 8]), "its offsets are"),
        (put(shape=[1 << 62, 1 << 62, 1 << 62, 1 << 62]), "impossible shape"),
        (put(shape=[-1, 2, 16, 8]), "impossible shape"),
        (put(shape=[1] * 9), "impossible shape"),
        (put(shape=[2.0, 2, 16, 8]), "impossible shape"),
        (put(shape=[True, 2, 16, 8]), "impossible shape"),
        (put(shape="6"), "impossible shape"),
        (put(shape=None), "impossible shape"),
        (put(dtype="I8"), "is I8 .* expected U8"),
        (put(dtype="F4"), "unknown dtype"),
        (put(dtype=["U8"]), "unknown dtype"),
        (put(data_offsets=[0, 1 << 62]), "its offsets are"),
        (put(data_offsets=[1 << 62, 0]), "its offsets are"),
        (put(data_offsets=[-8, 8]), "impossible offsets"),
        (put(data_offsets=[0]), "impossible offsets"),
        (put(data_offsets=None), "impossible offsets"),
        (put(more=1), "must have dtype, shape and data_offsets"),
        (change_offsets(16), "begins at"),
        (change_offsets(-16), "begins at"),
        (lambda entry, header: header.update({NAME: [1]}), "must have dtype"),
        (lambda entry, header: header.update(__metadata__=[]), "metadata"),
        (lambda entry, header: header["__metadata__"].update(more=[]), "metadata"),
        (lambda entry, header: header.pop("__metadata__"), "not a saved cache"),
        (lambda entry, header: header.pop("checksum"), "tensors take"),
        (lambda entry, header: header.pop(NAME), "begins at"),
        (lambda entry, header: header.update(x=header.pop(NAME)), f"'{NAME}' is missing"),
        (
            lambda entry, header: header.update(
                x={"dtype": "U8", "shape": [0], "data_offsets": entry["data_offsets"][:1] * 2}
            ),
            "does not belong",
        ),
        (
            lambda entry, header: header.update(checksum={**header["checksum"], "shape": [4, 8]}),
            "no checksum",
        ),
        (
            lambda entry, header: entry.update(shape=[entry["shape"][0], 2, 8, 16]),
            r"is U8 .* 2, 8, 16\], expected U8",
        ),
    ],
)
def test_forged_headers_are_refused(saved, model, path, change, match):
    header, _, tensors = split(saved)
    change(header[NAME], header)
    refused(path, joined(header, None, tensors), model, match)


def test_a_checksum_elsewhere_is_refused(saved, model, path):
    header, _, tensors = split(saved)
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [place + 32 for place in entry["data_offsets"]]
    header["checksum"]["data_offsets"] = [0, 32]
    text = json.dumps(header).encode()
    refused(path, sealed(text, (bytes(32) + tensors)[:-32]), model, "not the last tensor")


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
        (set_at("groups", 0, "padding", 1, lambda n: n + 1), "holds .* tokens, expected"),
        (set_at("groups", 0, "padding", 1, -1), "rows of a group"),
        (set_at("groups", 0, "padding", 1, 1 << 40), "rows of a group"),
        (set_at("groups", 0, "exact", 0, 10**6), r"expected F32 \[2, 2, 1000000, 16\]"),
        (set_at("groups", 1, "exact", 0, 3), "not its first tokens"),
        (set_at("groups", 0, "exact", 0, True), "rows of a group"),
        (set_at("groups", 1, "dropped", 0, lambda n: n + 1), "tokens, expected"),
        (set_at("groups", 0, "pages", [2, 2]), "groups.0.pages"),
        (set_at("groups", 0, "pages", [2]), "different lengths"),
        (set_at("groups", 0, "num_pages", 10**6), "do not hold the pages"),
        (set_at("groups", 0, "num_pages", (1 << 31) - 1), "do not hold the pages"),
        (set_at("groups", 0, "num_pages", -1), "pages"),
        (set_at("groups", 0, "window", 25), "windows"),
        (set_at("groups", lambda g: g[:1]), "windows"),
        (set_at("groups", lambda g: g[::-1]), "groups.0.pages"),
        (set_at("groups", []), "no rows"),
        (set_at("groups", 0, "state", "seen", 1 << 70), "state"),
        (set_at("groups", 0, "state", "seen", 10**6), "but more were seen"),
        (set_at("groups", 1, "state", "seen", 29), "state"),
        (set_at("groups", 1, "state", "seen", 30), "tokens, expected"),
        (set_at("groups", 1, "state", "seen", 91), "tokens, expected"),
        (set_at("groups", 0, "state", "confirmed", 10**5), "state"),
        (set_at("groups", 0, "state", "recording", 1), "state"),
        (set_at("groups", 0, "state", "padding_seen", [-1, 0]), "state"),
        (set_at("groups", 0, "state", {}), "state"),
        (set_at("layers", 0, "num_kv_heads", 1 << 50), "impossible layer"),
        (set_at("layers", 0, "num_kv_heads", 0), "impossible layer"),
        (set_at("layers", 0, "key_dim", 32), "expected U8"),
        (set_at("layers", 0, "key_dtype", "U8"), "impossible dtypes"),
        (set_at("layers", 0, "layer", 400), "no paged layer"),
        (set_at("layers", 0, "layer", 1), "names a layer twice"),
        (set_at("layers", []), "no layers"),
        (set_at("layers", lambda found: [one for one in found if one["layer"] % 2]), "no layer of"),
        (set_at("layers", lambda found: found[:3]), "does not belong"),
        (set_at("layers", 0, {}), "a layer must have"),
        (set_at("columns", 10**6), "token_ids"),
        (set_at("columns", 3), "more were seen"),
        (set_at("columns", "3"), "columns"),
        (set_at("columns", None), "does not belong"),
        (set_at("options", "page_size", 17), "power of two"),
        (set_at("options", "page_size", 1 << 40), "page_size"),
        (set_at("options", "page_size", 32), "expected U8"),
        (set_at("options", "sink_tokens", 90), "tokens"),
        (set_at("options", "recent_tokens", 1e9), "recent_tokens"),
        (set_at("options", "keys", "int9"), "keys"),
        (set_at("options", "keys", "exact"), "expected F32"),
        (set_at("options", "layers", {"0": "exact"}), "expected F32"),
        (set_at("options", "layers", {"0": ["exact"]}), "layers"),
        (set_at("options", "layers", {"9" * 5000: "exact"}), "cannot be loaded"),
        (set_at("options", "max_pages", 2), "max_pages=2"),
        (set_at("options", "shell", "true"), "shell"),
        (set_at("options", ["keys"]), "options"),
        (set_at("model", None), "about its model"),
        (set_at("model", "config", 1), "model's config"),
        (set_at("model", "signature", {}), "model_type"),
        (set_at("model", "adapters", None), "model's adapters"),
        (set_at("model", "adapters", "active", "tuned"), "model's adapters"),
        (set_at("model", "adapters", "active", [["tuned"]]), "model's adapters"),
        (set_at("model", "adapters", "active", ["x" * 5000]), "saved with adapter"),
        (set_at("model", "adapters", "settings", "0"), "settings of these adapters differ"),
        (set_at("model", "adapters", "more", 1), "model's adapters"),
        (set_at("model", "weights", {}), "fingerprint"),
        (set_at("model", "weights", "samples", 5), "names or shapes"),
        (set_at("model", "weights", "samples", lambda s: s[:-8]), "names or shapes"),
    ],
)
def test_forged_descriptions_are_refused(saved, model, path, change, match):
    header, description, tensors = split(saved)
    change(description)
    refused(path, joined(header, description, tensors), model, match)


@pytest.mark.parametrize("ids", ["past the end", "negative", "none twice"])
def test_forged_page_ids_are_refused(saved, model, path, ids):
    header, description, tensors = split(saved)
    begin, end = header["groups.0.pages"]["data_offsets"]
    table = torch.frombuffer(bytearray(tensors[begin:end]), dtype=torch.int32)
    table[0] = {"past the end": len(table), "negative": -1, "none twice": 1}[ids]
    tensors = tensors[:begin] + table.numpy().tobytes() + tensors[end:]
    refused(path, joined(header, description, tensors), model, "do not hold the pages")


@pytest.mark.parametrize("channel", [0, 16, 255], ids=["named twice", "past the end", "far away"])
def test_forged_orders_of_channels_are_refused(model, path, channel):
    """A kernel would read queries and keys at places that the file names."""
    cache = kv_hf.PagedCache(model.config, keys="int2_mixed", values="int8", page_size=PAGE)
    model.generate(**left_padded([90, 60]), past_key_values=cache, max_new_tokens=3)
    cache.save(path, model)
    header, description, tensors = split(path.read_bytes())
    kv_hf.PagedCache.load(path, model).check_integrity()
    begin, end = header["layers.1.keys.order"]["data_offsets"]
    order = bytearray(tensors[begin:end])
    assert order[-1] == 15 and order[-16:].count(0) == 1
    order[-1] = channel
    forged = joined(header, description, tensors[:begin] + bytes(order) + tensors[end:])
    refused(
        path, forged, model, "order of channels in pages of keys must name each channel 0 to 15"
    )


def places(value, where=()):
    """Every place in a JSON value."""
    yield where
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield from places(child, (*where, key))


NASTY = st.one_of(
    st.sampled_from(
        [None, True, False, [], {}, "", "x" * 5000, 0, 1, -1, 2**31, 2**63, 2**200, 1e308]
    ),
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
    except (KeyError, TypeError, AttributeError):  # the metadata is gone: the header says it all
        whole = sealed(json.dumps(header).encode(), tensors)
    path.write_bytes(whole)
    with NewTensors() as made:
        try:
            loaded = kv_hf.PagedCache.load(path, model)
        except kv_hf.CacheFileError:
            loaded = None
    assert made.largest <= 2 * len(saved)
    if loaded is not None:
        loaded.check_integrity()
        rows = len(loaded.group.rows)
        if max(loaded.options.recent_tokens, loaded.options.reserve_tokens) < 1000:
            with torch.no_grad():
                padding = torch.tensor([[row.padding] for row in loaded.group.rows])
                mask = (torch.arange(loaded.get_seq_length() + 3) >= padding).long()
                model(tokens(rows, 3), attention_mask=mask, past_key_values=loaded)
            loaded.check_integrity()
