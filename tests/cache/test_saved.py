"""Saved caches: a cache that went through a file goes on bit by bit as one that did not."""

import copy
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from new_tensors import NewTensors
from safetensors import SafetensorError
from test_sliding import make as make_sliding
from tiny_models import left_padded, make_model, shared_model, tokens

import kv_hf
from kv_hf.cache import identity
from kv_hf.cache import saved as saving
from kv_hf.cache.identity import Adapters
from kv_hf.pages.cpu_memory import AHEAD

PAGE = 16
FORMATS = ("exact", "fp8", "int8", "int4", "int2")


def filled(model, inputs, **options):
    """A cache that a generate() has left behind, and the text with it."""
    cache = kv_hf.PagedCache(model.config, **{"page_size": PAGE, **options})
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=9, do_sample=False)
    return cache, out


def go_on(model, cache, text, mask=None, steps=40):
    """Continue a text by a few tokens more than the cache has seen; return tokens and logits."""
    more = torch.cat([text, tokens(text.shape[0], 5, seed=9)], -1)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], more.shape[1] - mask.shape[1])], -1)
    out = model.generate(
        more,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return [out.sequences, *out.logits]


def check_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def detour(cache, model, path, token_ids=None, **options):
    cache.save(path, model, token_ids)
    loaded = kv_hf.PagedCache.load(path, model, **options)
    loaded.check_integrity()
    return loaded


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("keys", ["exact", "int8", "int4"])
def test_loaded_cache_goes_on_bit_by_bit(keys, values, tmp_path):
    model = shared_model("llama")
    inputs = left_padded([100, 33, 61])
    options = {"keys": keys, "values": values, "recent_tokens": 5}
    cache, text = filled(model, inputs, **options)
    loaded = detour(cache, model, tmp_path / "cache", text)
    assert loaded.options == cache.options and len({row.padding for row in loaded.group.rows}) == 3
    assert torch.equal(loaded.token_ids, text)
    never_saved, _ = filled(model, inputs, **options)
    expected = go_on(model, never_saved, text, inputs["attention_mask"])
    check_equal(go_on(model, loaded, text, inputs["attention_mask"]), expected)
    check_equal(go_on(model, cache, text, inputs["attention_mask"]), expected)
    loaded.check_integrity()


@pytest.mark.parametrize("name", FORMATS)
def test_loaded_bf16_cache_goes_on_bit_by_bit(name, tmp_path):
    model = make_model("qwen3", torch.bfloat16)
    inputs = left_padded([70, 30])
    cache, text = filled(model, inputs, keys=name, layers={1: {"values": "int8"}})
    loaded = detour(cache, model, tmp_path / "cache")
    assert loaded.token_ids is None
    mask = inputs["attention_mask"]
    check_equal(go_on(model, loaded, text, mask), go_on(model, cache, text, mask))


@pytest.mark.parametrize("keys", ["exact", "int4"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mistral"])
def test_sliding_windows_go_on_bit_by_bit(name, keys, tmp_path):
    model = make_sliding(name, 24)
    inputs = left_padded([120, 33])
    cache, text = filled(model, inputs, keys=keys)
    loaded = detour(cache, model, tmp_path / "cache")
    assert [g.rows[0].dropped for g in loaded.groups] == [g.rows[0].dropped for g in cache.groups]
    assert loaded.groups[-1].rows[0].dropped > 0
    mask = inputs["attention_mask"]
    check_equal(go_on(model, loaded, text, mask), go_on(model, cache, text, mask))


def test_pages_that_beams_share_are_saved_once(tmp_path):
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, keys="int8", page_size=PAGE)
    text = model.generate(
        tokens(2, 90), past_key_values=cache, max_new_tokens=30, num_beams=3, num_return_sequences=3
    )
    path = tmp_path / "cache"
    loaded = detour(cache, model, path)
    held = {page for row in cache.group.rows for page in row.pages}
    assert len(held) < sum(len(row.pages) for row in cache.group.rows)
    stored = safetensors.torch.load_file(path)["layers.0.keys.codes"]
    assert stored.shape[0] == len(held) == loaded.group.pool.num_held
    check_equal(go_on(model, loaded, text), go_on(model, cache, text))
    loaded.check_integrity()


def crop_in_page(cache):
    cache.crop(-37)


def record(cache):
    cache.activate_past_recording()


def record_and_confirm(cache):
    cache.activate_past_recording()
    cache.crop(-3)


def nothing(cache):
    pass


def confirm(cache):
    cache.crop(0)


@pytest.mark.parametrize("keys", ["exact", "int4"])
@pytest.mark.parametrize("change", [crop_in_page, record, record_and_confirm])
@pytest.mark.parametrize("behind", [nothing, confirm])
def test_cropped_and_recording_caches_go_on_bit_by_bit(change, behind, keys, tmp_path):
    model = shared_model("llama")
    text = tokens(2, 150)
    caches = []
    with torch.no_grad():
        for _ in range(2):
            cache = kv_hf.PagedCache(model.config, keys=keys, page_size=PAGE)
            model(text[:, :115], past_key_values=cache)
            change(cache)
            model(text[:, 115:130], past_key_values=cache)
            behind(cache)
            caches.append(cache)
        caches[1] = detour(caches[1], model, tmp_path / "cache")
        assert caches[1].group.recording == (change is not crop_in_page)
        for _ in range(2):
            logits = [model(text[:, 130:], past_key_values=cache).logits for cache in caches]
            assert torch.equal(*logits)
            for cache in caches:
                cache.crop(-11)
                cache.check_integrity()
        lengths = [[(row.exact, len(row.pages)) for row in cache.group.rows] for cache in caches]
        assert lengths[0] == lengths[1]


def test_past_recording_that_has_just_ended_goes_on_bit_by_bit(tmp_path):
    """The windows are then longer than a row's room for exact tokens."""
    model = shared_model("llama")
    caches = []
    for _ in range(2):
        cache = kv_hf.PagedCache(model.config, keys="int4", page_size=PAGE)
        cache.activate_past_recording()
        with torch.no_grad():
            model(tokens(1, 33), past_key_values=cache)
        cache.end_recording()
        caches.append(cache)
    assert caches[0].group.rows[0].exact > caches[0].group.slots
    caches[1] = detour(caches[1], model, tmp_path / "cache")
    for seed in range(3):
        with torch.no_grad():
            logits = [model(tokens(1, 2, seed=seed), past_key_values=c).logits for c in caches]
        assert torch.equal(*logits)
    assert caches[0].group.rows == caches[1].group.rows and caches[0].group.rows[0].pages


def test_crop_into_a_page_right_behind_loading(tmp_path):
    """The loaded window has only the slots that are used: the page that is decoded back needs more."""
    model = shared_model("llama")
    cache, _ = filled(model, {"input_ids": tokens(1, 93)}, keys="int8")
    assert cache.group.rows[0].exact < 8
    loaded = detour(cache, model, tmp_path / "cache")
    for one in (cache, loaded):
        one.crop(-7)
    assert cache.group.rows[0].exact > 12
    assert torch.equal(cache.layers[1].keys, loaded.layers[1].keys)
    with torch.no_grad():
        logits = [model(tokens(1, 3), past_key_values=one).logits for one in (cache, loaded)]
    assert torch.equal(*logits)


def test_rows_of_padding_only_learn_their_padding_behind_loading(tmp_path):
    """A chunked prefill that is saved before a short row's first token; nothing but the cache knows the padding."""
    model = make_model("llama")
    inputs = left_padded([80, 10])
    caches = [kv_hf.PagedCache(model.config, page_size=PAGE) for _ in range(2)]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        for index, cache in enumerate(caches):
            cache.observe_padding(mask)
            model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
            if index:
                caches[1] = cache = detour(cache, model, tmp_path / "cache")
                assert cache.group.tokens(cache.group.rows[1]) == 0
        logits = [
            model(ids[:, 40:], attention_mask=mask, past_key_values=cache).logits
            for cache in caches
        ]
    assert torch.equal(*logits)
    assert caches[1].group.rows[1].padding == 70


@pytest.mark.parametrize("name", FORMATS)
def test_files_do_not_depend_on_the_layout_of_pages(name, tmp_path, monkeypatch):
    """The CPU's "lanes" and the GPU's "rows" give the same bytes, and each reads the other's file."""
    model = make_model("qwen3", torch.bfloat16)
    inputs = {"input_ids": tokens(2, 90)}
    lanes, text = filled(model, inputs, keys=name, kernel="reference")
    lanes.save(tmp_path / "lanes", model)
    monkeypatch.setattr("kv_hf.cache.layer_formats.layout_for", lambda device: "rows")
    rows = kv_hf.PagedCache.load(tmp_path / "lanes", model)
    assert rows.layers[0].spec.keys.layout == "rows" != lanes.layers[0].spec.keys.layout
    rows.save(tmp_path / "rows", model)
    stored = [safetensors.torch.load_file(tmp_path / name) for name in ("rows", "lanes")]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
    for a, b in zip(rows.layers, lanes.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    monkeypatch.undo()
    back = kv_hf.PagedCache.load(tmp_path / "rows", model)
    check_equal(go_on(model, back, text), go_on(model, lanes, text))


def test_file_is_safetensors_and_holds_the_pages(tmp_path):
    """Read by the library of the format: the order of pages is that of rows and tokens."""
    model = shared_model("llama")
    cache, text = filled(model, left_padded([100, 33]), keys="exact")
    for window in cache.layers[1].residuals:  # what earlier tokens left behind a row's exact ones
        for row, held in zip(window.tokens, cache.group.rows, strict=True):
            row[:, held.exact :] = torch.nan
    path = tmp_path / "cache.safetensors"
    cache.save(path, model, text)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "kv_hf.PagedCache"
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert torch.equal(stored["token_ids"], text)
    rows = cache.group.rows
    dense = cache.layers[1].keys
    first = rows[0].padding + cache.options.sink_tokens
    assert torch.equal(
        stored["layers.1.keys.codes"][1], dense[0, :, first + PAGE : first + 2 * PAGE]
    )
    assert torch.equal(stored["layers.1.keys.window"][0, :, :4], dense[0, :, first - 4 : first])
    behind = stored["layers.1.keys.window"][1, :, rows[1].exact :]
    assert behind.count_nonzero() == 0
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    assert begin % 8 == 0
    for name, tensor in stored.items():  # where a library that maps the file can view it
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_loaded_cache_is_as_any_other(tmp_path):
    model = shared_model("llama")
    cache, text = filled(model, {"input_ids": tokens(2, 90)}, keys="int4", max_pages=40)
    loaded = detour(cache, model, tmp_path / "cache", text)
    assert loaded.group.pool.max_pages == 40
    copied = copy.deepcopy(loaded)
    copied.reorder_cache(torch.tensor([1, 0]))
    copied.batch_select_indices(torch.tensor([1]))
    copied.check_integrity()
    expected = go_on(model, cache, text)
    check_equal(go_on(model, loaded, text), expected)
    twice = detour(loaded, model, tmp_path / "cache")
    assert torch.equal(twice.layers[0].keys, loaded.layers[0].keys)
    loaded.reset()
    assert loaded.token_ids is None and loaded.memory().total == 0
    with torch.no_grad():
        model(tokens(1, 50), past_key_values=loaded)
    loaded.check_integrity()


def test_load_takes_device_and_kernel(tmp_path):
    model = shared_model("llama")
    cache, text = filled(model, {"input_ids": tokens(1, 60)}, keys="int8")
    loaded = detour(cache, model, tmp_path / "cache", device="cpu", kernel="reference")
    assert loaded.layers[0].store.kernel.name == "reference"
    loaded = kv_hf.PagedCache.load(tmp_path / "cache", model, device="cpu:0")
    check_equal(go_on(model, loaded, text), go_on(model, cache, text))
    absent = [] if torch.cuda.is_available() else ["cuda"]
    for wrong in ("moon", "meta", 1.5, *absent):
        with pytest.raises(kv_hf.CacheOptionError, match="device must be"):
            kv_hf.PagedCache.load(tmp_path / "cache", model, device=wrong)
    with pytest.raises(kv_hf.CacheOptionError, match="kernel must be one of"):
        kv_hf.PagedCache.load(tmp_path / "cache", model, kernel="magic")
    with pytest.raises(kv_hf.CacheFileError, match="kernel='triton' cannot run here"):
        kv_hf.PagedCache.load(tmp_path / "cache", model, kernel="triton")


def test_cache_loaded_in_inference_mode_goes_on_outside_of_it(tmp_path):
    model = shared_model("llama")
    cache, text = filled(model, {"input_ids": tokens(1, 60)}, keys="int8")
    with torch.inference_mode():
        loaded = detour(cache, model, tmp_path / "cache", text)
    check_equal(go_on(model, loaded, text), go_on(model, cache, text))


def test_default_device_of_torch_is_not_where_files_are_read(tmp_path):
    model = shared_model("llama")
    cache, text = filled(model, {"input_ids": tokens(1, 60)}, keys="int8")
    expected = identity.ModelId.for_file(model)
    with torch.device("meta"):
        loaded = detour(cache, model, tmp_path / "cache", text)
        assert identity.ModelId.for_file(model) == expected
    assert torch.equal(loaded.token_ids, text)
    check_equal(go_on(model, loaded, text), go_on(model, cache, text))


def test_forward_that_stops_half_way_behind_loading_is_found(tmp_path):
    model = shared_model("llama")
    cache, _ = filled(model, {"input_ids": tokens(1, 40)})
    loaded = detour(cache, model, tmp_path / "cache")
    states = torch.randn(1, 2, 1, 16)
    for layer in (0, 1, 0):
        loaded.update(states, states, layer)
    with pytest.raises(kv_hf.InterruptedForwardError):
        loaded.update(states, states, 0)
    again = kv_hf.PagedCache.load(tmp_path / "cache", model)
    again.update(states, states, 1)
    with pytest.raises(kv_hf.InterruptedForwardError):
        again.update(states, states, 1)
    with pytest.raises(kv_hf.CacheMismatchError, match="float32"):
        kv_hf.PagedCache.load(tmp_path / "cache", model).update(states.half(), states.half(), 0)


# -- what cannot be saved ------------------------------------------------------------------------------------


def test_save_refuses_what_a_file_cannot_hold(tmp_path):
    model = shared_model("llama")
    path = tmp_path / "cache"
    with pytest.raises(kv_hf.CacheMismatchError, match="empty"):
        kv_hf.PagedCache(model.config).save(path, model)
    cache, text = filled(model, {"input_ids": tokens(2, 40)})
    for wrong in (text[:1], text[:, :40], text.float(), text.tolist(), text[0]):
        with pytest.raises(
            kv_hf.CacheMismatchError, match=r"token_ids must be .* \[2, at least 48\]"
        ):
            cache.save(path, model, wrong)
    with pytest.raises(kv_hf.CacheMismatchError, match="model must be"):
        cache.save(path, model.config)
    with pytest.raises(kv_hf.CacheMismatchError, match="num_hidden_layers"):
        cache.save(path, make_model("llama", num_hidden_layers=3))
    with pytest.raises(IsADirectoryError):
        cache.save(tmp_path, model)
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "nowhere" / "cache", model)
    assert list(tmp_path.iterdir()) == []


def test_save_names_the_layers_that_transformers_keeps(tmp_path):
    config = transformers.Lfm2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = kv_hf.PagedCache(model.config, page_size=PAGE)
    with torch.no_grad():
        model(tokens(1, 40), past_key_values=cache)
    with pytest.raises(kv_hf.UnsupportedModelError, match="layers 0 .*LinearAttentionLayer"):
        cache.save(tmp_path / "cache", model)


def test_save_refuses_a_cache_whose_forward_stopped_half_way(tmp_path):
    model = shared_model("llama")
    cache, _ = filled(model, {"input_ids": tokens(1, 40)})
    states = torch.randn(1, 2, 1, 16)
    cache.update(states, states, 0)
    with pytest.raises(kv_hf.InterruptedForwardError):
        cache.save(tmp_path / "cache", model)


# -- other models --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = make_model("llama")
    cache, text = filled(model, left_padded([70, 40]), keys="int4")
    path = tmp_path_factory.mktemp("saved") / "cache"
    cache.save(path, model, text)
    return path


def nudged(name, place):
    model = make_model("llama")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[place] += 1e-3
    return model


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: make_model("llama", num_hidden_layers=3),
            "num_hidden_layers=2, this model has .*=3",
        ),
        (lambda: make_model("mistral"), "model_type='llama', this model has model_type='mistral'"),
        (lambda: make_model("llama", intermediate_size=80), "intermediate_size=96"),
        (lambda: make_model("llama", rope_theta=5e5), "rope_parameters=.*10000.0.*500000.0"),
        (
            lambda: make_model("llama", torch.bfloat16),
            r"lm_head.weight differs \('float32 .*bfloat16",
        ),
        (
            lambda: nudged("model.layers.1.mlp.up_proj.weight", -1),
            r"layers\.1\.mlp\.up_proj\.weight differs",
        ),
        (lambda: nudged("model.norm.weight", 5), "model.norm.weight differs"),
    ],
    ids=["layers", "type", "size", "rope", "dtype", "weight", "norm"],
)
def test_load_refuses_another_model(saved, make, match):
    with pytest.raises(kv_hf.CacheFileError, match=match) as raised:
        kv_hf.PagedCache.load(saved, make())
    assert str(saved) in str(raised.value)


def test_load_takes_a_model_that_was_saved_and_loaded(saved, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    kv_hf.PagedCache.load(saved, model).check_integrity()


def test_described_reads_every_kind_of_tensor():
    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.meta = torch.nn.Parameter(torch.empty(3, 4, device="meta"))
            self.scalar = torch.nn.Parameter(torch.tensor(1.5))
            self.empty = torch.nn.Parameter(torch.empty(0, 5))
            self.turned = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).T)
            self.register_buffer("float8", torch.randn(9).to(torch.float8_e4m3fn))
            self.register_buffer("packed", torch.arange(200, dtype=torch.uint8))
            self.register_buffer("passing", torch.zeros(2), persistent=False)

    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, *args, **kwargs):
            if func.__name__ == "__get__":  # dtype, shape
                return super().__torch_function__(func, *args, **kwargs)
            raise RuntimeError("nothing works on this tensor")

    flat = Flat()
    kept = [weight for weight in identity.weights_of(flat) if weight.persistent]
    assert [weight.name for weight in kept] == ["empty", "float8", "meta", "packed", "scalar", "turned"]  # fmt: skip
    prints = {name: one.rpartition(" ")[2] for name, one in identity.described(kept).items()}
    assert prints.pop("meta") == "-"
    assert len(set(prints.values())) == 5 and "-" not in prints.values()

    def digest_of(tensor):
        return identity.described([identity.Weight("any", tensor)])["any"].rpartition(" ")[2]

    assert digest_of(flat.turned) == digest_of(flat.turned.detach().clone())
    flat.float8.view(torch.uint8)[4] ^= 1
    assert digest_of(flat.float8) not in ("-", prints["float8"])
    assert digest_of(torch.zeros(3).as_subclass(Odd)) == "-"
    weights = identity.ModelId.of(make_model("llama")).weights
    assert weights["model.norm.weight"].startswith("float32 [64] ")


def test_file_of_a_model_with_other_rotary_frequencies_is_refused(tmp_path):
    """They are no part of a checkpoint, and may be written to all the same."""
    model = make_model("llama")
    cache, _ = filled(model, {"input_ids": tokens(1, 40)})
    cache.save(tmp_path / "cache", model)
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.mul_(1 + 1e-6)  # another device
    kv_hf.PagedCache.load(tmp_path / "cache", model)
    frequencies.mul_(0.5)
    with pytest.raises(kv_hf.CacheFileError, match="model.rotary_emb.inv_freq differs"):
        kv_hf.PagedCache.load(tmp_path / "cache", model)


def test_buffers_that_follow_the_length_of_the_text_or_are_named_by_one_model_only_are_passed_over():
    model = make_model("llama")
    own = identity.ModelId.for_file(model)
    assert replace(own, buffers={"other": [1.0]}).difference(own) is None
    assert "buffer" in replace(own, buffers={"model.rotary_emb.inv_freq": [1.0]}).difference(own)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not identity.ModelId.for_file(make_model("llama", rope_parameters=rope)).buffers


def test_parameters_that_cannot_be_read_are_passed_over(saved):
    """A model whose weights are offloaded has meta tensors: it is known by the others."""
    model = make_model("llama")
    model.model.layers[0].mlp.to("meta")
    kv_hf.PagedCache.load(saved, model).check_integrity()


# -- writing -------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return shared_model("llama")


def stopping(stop):
    """save_file, which writes a half and then calls `stop`."""

    def save(tensors, path, metadata):
        saving_file(tensors, path, metadata)
        os.truncate(path, os.stat(path).st_size // 2)
        stop()

    return save


saving_file = saving.save_file


def no_space():
    raise SafetensorError("no space left on device")


def test_save_that_fails_leaves_the_old_file_and_nothing_else(model, tmp_path, monkeypatch):
    path = tmp_path / "cache"
    cache, text = filled(model, {"input_ids": tokens(1, 60)}, keys="int8")
    cache.save(path, model, text)
    before = path.read_bytes()
    more, _ = filled(model, {"input_ids": tokens(1, 90)}, keys="int8")
    monkeypatch.setattr(saving, "save_file", stopping(no_space))
    with pytest.raises(OSError, match="no space left"):
        more.save(path, model)
    monkeypatch.undo()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    more.save(path, model)
    assert path.read_bytes() != before and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_save_leaves_the_old_file_and_one_that_is_refused(model, tmp_path, monkeypatch):
    path = tmp_path / "cache"
    path.write_bytes(b"old")
    cache, _ = filled(model, {"input_ids": tokens(1, 60)})
    child = os.fork()
    if not child:
        try:
            killed = stopping(lambda: os.kill(os.getpid(), signal.SIGKILL))
            monkeypatch.setattr(saving, "save_file", killed)
            cache.save(path, model)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (left,) = [found for found in tmp_path.iterdir() if found != path]
    with pytest.raises(kv_hf.CacheFileError, match="cut off"):
        kv_hf.PagedCache.load(left / "new", model)
    detour(cache, model, path)
    assert list(tmp_path.iterdir()) == [path]


def test_saves_to_one_path_at_once_leave_one_whole_file(model, tmp_path):
    path = tmp_path / "cache"
    caches = [
        filled(model, {"input_ids": tokens(1, 40 + 30 * i)}, keys="int8")[0] for i in range(3)
    ]
    failed = []

    def work(cache):
        try:
            for _ in range(5):
                cache.save(path, model)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for _ in range(5):
        if path.exists():
            kv_hf.PagedCache.load(path, model)
    for thread in threads:
        thread.join()
    assert not failed and list(tmp_path.iterdir()) == [path]
    lengths = [cache.get_seq_length() for cache in caches]
    assert kv_hf.PagedCache.load(path, model).get_seq_length() in lengths


def test_a_link_stays_a_link_and_long_names_fit(model, tmp_path):
    cache, _ = filled(model, {"input_ids": tokens(1, 40)})
    target, link = tmp_path / ("n" * 250), tmp_path / "link"
    link.symlink_to(target)
    detour(cache, model, link)
    assert link.is_symlink() and target.is_file()


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX system")
def test_save_keeps_the_permissions_of_the_file_that_was_there(model, tmp_path):
    """A cache that only its owner could read was readable by all behind the next save."""
    path, new = tmp_path / "cache", tmp_path / "new"
    cache, _ = filled(model, {"input_ids": tokens(1, 40)})
    before = os.umask(0o022)
    try:
        path.touch(mode=0o600)
        cache.save(path, model)
        cache.save(new, model)
    finally:
        os.umask(before)
    assert [one.stat().st_mode & 0o777 for one in (path, new)] == [0o600, 0o644]


def test_loading_takes_the_memory_of_one_tensor(model, tmp_path):
    cache = kv_hf.PagedCache(model.config, page_size=PAGE, kernel="reference")
    with torch.no_grad():
        model(tokens(2, 900), past_key_values=cache)
    storage = cache.layers[0].storage.keys.fields["codes"].nbytes
    cache.save(tmp_path / "cache", model)
    with NewTensors() as made:
        loaded = kv_hf.PagedCache.load(tmp_path / "cache", model)
    assert made.largest <= AHEAD * storage  # addresses: memory comes with what is written
    assert torch.equal(loaded.layers[1].values, cache.layers[1].values)


def test_files_are_read_without_anything_that_could_run_code():
    text = Path(saving.__file__).read_text()
    for word in ("pickle", "torch.load", "eval(", "exec(", "import_module"):
        assert word not in text


# -- states without a file ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cache_made_of_a_state_goes_on_bit_by_bit(family):
    model = make_sliding("gemma3", 24) if family == "gemma3" else shared_model(family)
    inputs = left_padded([70, 40])
    cache, text = filled(model, inputs, keys="int4", recent_tokens=5)
    never_taken, _ = filled(model, inputs, keys="int4", recent_tokens=5)
    taken = kv_hf.PagedCache.from_state(model.config, cache.state())
    assert type(taken) is kv_hf.PagedCache and taken.options == cache.options
    assert same_tokens(taken, cache)
    mask = inputs["attention_mask"]
    expected = go_on(model, never_taken, text, mask)
    check_equal(go_on(model, taken, text, mask), expected)
    taken.update(
        *torch.randn(2, 2, *taken.layers[0].keys.shape[1:2], 30, 16), 0
    )  # of nobody's text
    check_equal(go_on(model, cache, text, mask), expected)


def test_cache_made_of_a_state_of_direct_calls_is_continued_by_generate():
    model = shared_model("llama")
    cache, text = kv_hf.PagedCache(model.config, page_size=PAGE), tokens(1, 40)
    with torch.no_grad():
        model(text, past_key_values=cache)
    taken = kv_hf.PagedCache.from_state(model.config, cache.state())
    check_equal(go_on(model, taken, text, steps=3), go_on(model, cache, text, steps=3))


def same_tokens(cache, other):
    pairs = zip(cache.layers, other.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


@pytest.mark.parametrize("room", [None, 160], ids=["growing", "preallocated"])
def test_state_of_a_damaged_order_of_channels_is_refused(room):
    model = shared_model("llama")
    cache, _ = filled(model, left_padded([70, 40]), keys="int4_mixed", values="int8")
    storage = cache.layers[0].storage.keys.fields["order"]
    storage[storage == 3] = 4
    with pytest.raises(kv_hf.CacheMismatchError, match="order of channels in pages of keys"):
        kv_hf.PagedCache.from_state(model.config, cache.state(), max_length=room)


@pytest.mark.parametrize("keys", ["exact", "int4"])
def test_state_moves_between_growing_and_preallocated_caches(keys, tmp_path):
    model, inputs = shared_model("llama"), left_padded([70, 40])
    cache, text = filled(model, inputs, keys=keys)
    fixed = kv_hf.PagedCache.from_state(model.config, cache.state(), max_length=160)
    assert fixed.max_length is not None
    fixed.check_integrity()
    assert same_tokens(fixed, cache)
    smaller = kv_hf.PagedCache.from_state(model.config, fixed.state(), max_length=130)
    fixed.save(tmp_path / "cache", model)
    loaded = kv_hf.PagedCache.load(tmp_path / "cache", model)
    room = kv_hf.PagedCache.load(tmp_path / "cache", model, max_length=150)
    assert loaded.max_length is None and room.max_length is not None
    mask = inputs["attention_mask"]
    expected = go_on(model, filled(model, inputs, keys=keys)[0], text, mask)
    for one in (loaded, fixed, smaller, room):
        assert torch.equal(go_on(model, one, text, mask)[0], expected[0])
        one.check_integrity()
    assert same_tokens(fixed, loaded)


def test_preallocated_cache_notes_by_which_adapters_it_was_filled(tmp_path, monkeypatch):
    model, other = shared_model("llama"), Adapters(virtual="8 virtual tokens")
    cache, _ = filled(model, left_padded([40]), max_length=96)
    assert len(cache.computed_by) == 1
    monkeypatch.setattr(saving, "adapters_of", lambda model: other)
    with pytest.raises(kv_hf.CacheMismatchError, match="the model to save it for has"):
        cache.save(tmp_path / "cache", model)
    cache.reset()
    assert not cache.computed_by
    with pytest.raises(kv_hf.CacheOptionError, match="max_length must be"):
        kv_hf.PagedCache.load(tmp_path / "cache", model, max_length=0)


def test_preallocated_cache_of_rows_that_share_pages_holds_each_its_own():
    model = shared_model("llama")
    cache, text = filled(model, left_padded([60]), keys="int8")
    cache.batch_repeat_interleave(3)
    fixed = kv_hf.PagedCache.from_state(model.config, cache.state(), max_length=128)
    assert [len(row.pages) for row in fixed.group.rows] == [
        4,
        4,
        4,
    ] and cache.group.pool.num_held == 4
    assert same_tokens(fixed, cache)
    texts = torch.cat([text.repeat(3, 1), tokens(3, 1)], -1)
    options = {"max_new_tokens": 9, "do_sample": False}
    wanted = model.generate(texts, past_key_values=cache, **options)
    assert torch.equal(model.generate(texts, past_key_values=fixed, **options), wanted)


def test_preallocated_cache_takes_no_state_that_does_not_fit():
    model = shared_model("llama")
    cache, _ = filled(model, left_padded([60, 20]))
    take, held = kv_hf.PagedCache.from_state, cache.state()
    with pytest.raises(kv_hf.CacheMismatchError, match="max_length=50 is less than the 68 columns"):
        take(model.config, held, max_length=50)
    (group,) = held.groups
    dropped = (replace(group.rows[0], dropped=1), *group.rows[1:])
    with pytest.raises(ValueError, match="tokens, expected"):
        take(model.config, replace(held, groups=(replace(group, rows=dropped),)), max_length=99)


def test_preallocated_cache_takes_recent_tokens_and_drafts():
    model = shared_model("llama")
    recent, _ = filled(model, left_padded([60, 20]), recent_tokens=40)
    drafted = kv_hf.PagedCache(model.config, page_size=PAGE)
    drafted.activate_past_recording()
    with torch.no_grad():
        model(tokens(1, 60), past_key_values=drafted)
    for cache in (recent, drafted):
        fixed = kv_hf.PagedCache.from_state(model.config, cache.state(), max_length=99)
        fixed.check_integrity()
        assert same_tokens(fixed, cache)


class Unchecked:
    """Tensors of a state that fit any pages."""

    def check(self, pages):
        pass


def test_state_is_of_one_moment_and_of_one_model():
    model = shared_model("llama")
    cache, text = filled(model, left_padded([40, 20]))
    held = cache.state()
    with pytest.raises(kv_hf.CacheMismatchError, match="a model with head_dim"):
        kv_hf.PagedCache.from_state(make_model("llama", head_dim=8).config, held)
    other = replace(held, options=replace(held.options, keys="int4"))
    with pytest.raises(kv_hf.CacheMismatchError, match="of this state hold pages of other"):
        kv_hf.PagedCache.from_state(model.config, other)
    go_on(model, cache, text, steps=2)
    with pytest.raises(kv_hf.StaleHandleError, match="this state belongs to an earlier forward"):
        kv_hf.PagedCache.from_state(model.config, held)


@pytest.mark.parametrize("place", [0, 1])
def test_cache_of_an_interrupted_first_forward_is_not_saved(tmp_path, place):
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config)
    cache.update(*torch.randn(2, 1, 2, 30, 16), 0)
    if place:
        cache.update(*torch.randn(2, 1, 2, 30, 16), 1)
        cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
        with pytest.raises(kv_hf.InterruptedForwardError, match="stopped half-way"):
            cache.check_integrity()
    with pytest.raises(kv_hf.InterruptedForwardError, match="stopped half-way"):
        cache.save(tmp_path / "cache.safetensors", model)
    assert not list(tmp_path.iterdir())
