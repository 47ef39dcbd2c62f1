"""Saved caches: a cache that went through a file goes on bit by bit as one that did not."""

import functools
import json
import os

import pytest
import safetensors.torch
import torch
import transformers
from allocations import NewTensors
from beside_stock import run
from harness import at_once
from measure.family_models import build_model, families
from tiny_models import left_padded, make_model, make_sliding, shared_model, tokens

import kv_hf
from kv_hf.cache.states import states_of
from kv_hf.pages.cpu_memory import RESERVE_FACTOR

PAGE = 16
FORMATS = ("exact", "fp8", "int8", "int4", "int2")


def filled(model, inputs, **options):
    """A cache that a generate() has left behind, and the text with it."""
    cache = kv_hf.PagedCache(model.config, **{"page_size": PAGE, **options})
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=9, do_sample=False)
    return cache, out


def go_on(model, cache, text, mask=None):
    """Continue a text by a few tokens more than the cache has seen; return tokens and logits."""
    more = torch.cat([text, tokens(text.shape[0], 5, seed=9)], -1)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], more.shape[1] - mask.shape[1])], -1)
    out = run(model, {"input_ids": more, "attention_mask": mask}, cache, max_new_tokens=20)
    return [out.sequences, *out.logits]


def check_equal(found, expected):
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def detour(cache, model, path, token_ids=None, **options):
    cache.save(path, model, token_ids)
    loaded = kv_hf.PagedCache.load(path, model, **options)
    loaded.check_integrity()
    return loaded


MADE = {
    "llama": lambda: shared_model("llama"),
    "bf16": lambda: make_model("qwen3", torch.bfloat16),
    **{
        name: functools.partial(make_sliding, name, 24)
        for name in ("gemma3_text", "gpt_oss", "mistral")
    },
}
# states beside pages: of Mamba, linear attention with latents, convolutions (four a layer: Inkling); an indexer's keys
WITH_STATES = [
    name
    for name in ("falcon_h1", "zamba2", "qwen3_next", "kimi_linear", "lfm2", "inkling_text", "zaya", "deepseek_v32", "hy_v4")
    if name in families("causal")
]  # fmt: skip
MADE |= {name: functools.partial(build_model, name) for name in WITH_STATES}
CASES = [
    *(("llama", {"keys": keys, "values": values, "recent_tokens": 5}) for keys, values in zip(FORMATS, reversed(FORMATS), strict=True)),
    ("bf16", {"keys": "int4", "layers": {"1": {"values": "int8"}}}),
    ("gemma3_text", {"keys": "exact"}),
    ("gpt_oss", {"keys": "int4"}),
    ("mistral", {"keys": "int8"}),
    *((name, {"layers": {}}) for name in WITH_STATES),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_loaded_cache_goes_on_bit_by_bit(name, options, tmp_path):
    model, inputs = MADE[name](), left_padded([100, 33, 61])
    cache, text = filled(model, inputs, **options)
    loaded = detour(cache, model, tmp_path / "cache", text)
    assert loaded.options == cache.options and torch.equal(loaded.token_ids, text)
    for group, other in zip(loaded.groups, cache.groups, strict=True):
        assert [row.padding for row in group.rows] == [0, 67, 39]
        assert [row.dropped for row in group.rows] == [row.dropped for row in other.rows]
    states, others = ([states_of(layer) for layer in one.layers] for one in (loaded, cache))
    assert any(others) == (name in WITH_STATES) and [*map(len, states)] == [*map(len, others)]
    for one, other in zip(states, others, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert [str(row) for row in loaded.report()] == [str(row) for row in cache.report()]
    never_saved, _ = filled(model, inputs, **options)
    mask = inputs["attention_mask"]
    expected = go_on(model, never_saved, text, mask)
    check_equal(go_on(model, loaded, text, mask), expected)
    check_equal(go_on(model, cache, text, mask), expected)
    loaded.check_integrity()


@pytest.mark.parametrize("length", [2, 90])
@pytest.mark.parametrize("name", [name for name in WITH_STATES if name in ("lfm2", "inkling_text")])
def test_states_that_record_their_past_go_on(name, length, tmp_path):
    """As behind assisted decoding: a convolution's state has other columns than its kernel, and a crop takes some back."""
    model, ids = build_model(name), tokens(1, length + 4)
    cache = kv_hf.PagedCache(model.config, page_size=PAGE)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :length], past_key_values=cache)
        caches = [detour(cache, model, tmp_path / "cache"), cache]
        for one in caches:
            model(ids[:, length:], past_key_values=one)
        caches.append(detour(caches[0], model, tmp_path / "cache"))
        for one in caches:
            one.crop(-2)
    found, expected, again = (go_on(model, one, ids[:, :-2]) for one in caches)
    check_equal(found, expected)
    check_equal(again, expected)


def test_pages_that_beams_share_are_saved_once(tmp_path):
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, keys="int8", page_size=PAGE)
    text = model.generate(
        tokens(2, 90), past_key_values=cache, max_new_tokens=30, num_beams=3, num_return_sequences=3
    )
    path = tmp_path / "cache"
    loaded = detour(cache, model, path)
    held = {page for row in cache._group.rows for page in row.pages}
    assert len(held) < sum(len(row.pages) for row in cache._group.rows)
    stored = safetensors.torch.load_file(path)["layers.0.keys.codes"]
    assert stored.shape[0] == len(held) == loaded._group.pool.num_held
    check_equal(go_on(model, loaded, text), go_on(model, cache, text))
    loaded.check_integrity()


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
        for row, held in zip(window.tokens, cache._group.rows, strict=True):
            row[:, held.exact :] = torch.nan
    path = tmp_path / "cache.safetensors"
    cache.save(path, model, text)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "kv_hf.PagedCache"
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert torch.equal(stored["token_ids"], text)
    first = cache.options.sink_tokens
    assert torch.equal(
        stored["layers.1.keys.codes"][1],
        cache.layers[1].keys[0, :, first + PAGE : first + 2 * PAGE],
    )
    behind = stored["layers.1.keys.window"][1, :, cache._group.rows[1].exact :]
    assert behind.count_nonzero() == 0
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    assert begin % 8 == 0
    for name, tensor in stored.items():  # where a library that maps the file can view it
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


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


# -- what cannot be saved ------------------------------------------------------------------------------------


def test_save_refuses_what_a_file_cannot_hold(tmp_path):
    model = shared_model("llama")
    path = tmp_path / "cache"
    with pytest.raises(kv_hf.CacheMismatchError, match="empty"):
        kv_hf.PagedCache(model.config).save(path, model)
    cache, text = filled(model, {"input_ids": tokens(2, 40)})
    for wrong in (text[:1], text[:, :40], text.float(), text.tolist()):
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
        (lambda: make_model("mistral"), "model_type='llama', this model has model_type='mistral'"),
        (lambda: make_model("llama", rope_theta=5e5), "rope_parameters=.*10000.0.*500000.0"),
        (lambda: make_model("llama", torch.bfloat16), r"differs \('float32 .*bfloat16"),
        (lambda: nudged("model.layers.1.mlp.up_proj.weight", -1), "1.mlp.up_proj.weight differs"),
        (lambda: nudged("model.norm.weight", 5), "model.norm.weight differs"),
    ],
    ids=["type", "rope", "dtype", "weight", "norm"],
)
def test_load_refuses_another_model(saved, make, match):
    with pytest.raises(kv_hf.CacheFileError, match=match) as raised:
        kv_hf.PagedCache.load(saved, make())
    assert str(saved) in str(raised.value)


def test_load_takes_a_model_that_was_saved_and_loaded(saved, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    kv_hf.PagedCache.load(saved, model).check_integrity()


# -- writing -------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return shared_model("llama")


def test_saves_to_one_path_at_once_leave_one_whole_file(model, tmp_path):
    path = tmp_path / "cache"
    caches = [
        filled(model, {"input_ids": tokens(1, 40 + 30 * i)}, keys="int8")[0] for i in range(3)
    ]

    def work(index):
        for _ in range(5):
            if index < 3:
                caches[index].save(path, model)
            elif path.exists():
                kv_hf.PagedCache.load(path, model)

    assert at_once(work, 4) == [None] * 4
    assert list(tmp_path.iterdir()) == [path]
    lengths = [cache.get_seq_length() for cache in caches]
    assert kv_hf.PagedCache.load(path, model).get_seq_length() in lengths


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="needs names of open files")
def test_a_file_replaced_while_it_is_opened_is_loaded_whole(model, tmp_path, monkeypatch):
    """The library reads the header, and opens the tensors by name: they were those of another file."""
    path, other = tmp_path / "cache", tmp_path / "other"
    for place, length in ((path, 40), (other, 70)):
        filled(model, {"input_ids": tokens(1, length)}, keys="int8")[0].save(place, model)
    from_file, replaced = torch.UntypedStorage.from_file, []

    def late(*args, **kwargs):
        if other.exists():
            replaced.append(os.replace(other, path))
        return from_file(*args, **kwargs)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", late)
    short = kv_hf.PagedCache.load(path, model).get_seq_length()
    assert replaced == [None]
    assert kv_hf.PagedCache.load(path, model).get_seq_length() == short + 30


def test_loading_takes_the_memory_of_one_tensor(model, tmp_path):
    cache = kv_hf.PagedCache(model.config, page_size=PAGE, kernel="reference")
    with torch.no_grad():
        model(tokens(2, 900), past_key_values=cache)
    storage = cache.layers[0].storage.keys.fields["codes"].nbytes
    cache.save(tmp_path / "cache", model)
    with NewTensors() as made:
        loaded = kv_hf.PagedCache.load(tmp_path / "cache", model)
    assert made.largest <= RESERVE_FACTOR * storage  # addresses: memory comes with what is written
    assert torch.equal(loaded.layers[1].values, cache.layers[1].values)


# -- caches that go on otherwise ----------------------------------------------------------------------------


def same_tokens(cache, other):
    pairs = zip(cache.layers, other.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


@pytest.mark.parametrize("keys", ["exact", "int4"])
def test_files_move_between_growing_and_preallocated_caches(keys, tmp_path):
    model, inputs = shared_model("llama"), left_padded([70, 40])
    cache, text = filled(model, inputs, keys=keys)
    fixed = detour(cache, model, tmp_path / "grown", max_length=160)
    assert fixed.options.max_length is not None and same_tokens(fixed, cache)
    loaded = detour(fixed, model, tmp_path / "fixed")
    room = kv_hf.PagedCache.load(tmp_path / "fixed", model, max_length=130)
    assert loaded.options.max_length is None and room.options.max_length is not None
    mask = inputs["attention_mask"]
    expected = go_on(model, cache, text, mask)
    for one in (loaded, fixed, room):
        assert torch.equal(go_on(model, one, text, mask)[0], expected[0])
        one.check_integrity()
    assert same_tokens(fixed, loaded)
    with pytest.raises(kv_hf.CacheFileError, match="max_length=50 is less than the 78 columns"):
        kv_hf.PagedCache.load(tmp_path / "fixed", model, max_length=50)


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
