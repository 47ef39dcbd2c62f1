"""Messages that a new user meets name the argument, its value, the expectation and the remedy."""

import os

import pytest
import torch
from tiny_models import make_model, shared_model, tokens

import kv_hf
from kv_hf.gqa.structure import check_heads
from kv_hf.user_dir import check_writable, made_once, user_dir


@pytest.mark.parametrize("options", [{}, {"max_length": 64}], ids=["growing", "preallocated"])
def test_a_forward_of_a_larger_model_is_refused_with_a_reason(options):
    """It was an IndexError, and the cache went on with the other model's tokens in its layers."""
    small, large = shared_model("llama"), make_model("llama", num_hidden_layers=3)
    cache = kv_hf.PagedCache(small.config, **options)
    with pytest.raises(kv_hf.CacheMismatchError) as error:
        large(tokens(1, 9), past_key_values=cache)
    for part in ("layer_idx=2", "a model of 2 layers (model_type='llama')", "cache.reset()"):
        assert part in str(error.value)
    with pytest.raises(kv_hf.InterruptedForwardError, match="reset"):
        small(tokens(1, 9), past_key_values=cache)
    cache.reset()
    found = small(tokens(1, 9), past_key_values=cache).logits
    torch.testing.assert_close(found, small(tokens(1, 9)).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("cuda", "triton"), ("GPU", "triton"), ("cpu", "c"), ("torch", "reference"), ("tritn", "triton"), ("x", None)],
)  # fmt: skip
def test_kernel_names_the_backend_that_another_word_means(word, meant):
    """ "cuda" was answered with "did you mean 'c'", which is the backend of processors."""
    with pytest.raises(
        kv_hf.CacheOptionError, match="kernel must be one of auto, .*triton"
    ) as error:
        kv_hf.CacheConfig(kernel=word)
    assert ("did you mean" in str(error.value)) == (meant is not None)
    assert meant is None or f"got {word!r} (did you mean {meant!r}?)" in str(error.value)


@pytest.mark.parametrize(
    ("heads", "asked", "says"),
    [
        (2, 3, "must divide the 2 kv heads of the model, and be less: it can be 1, got 3"),
        (8, 3, "the 8 kv heads of the model, and be less: it can be 1 or 2 or 4, got 3"),
        (1, 3, "num_kv_heads=3: the model has 1 kv head, which cannot be merged into fewer"),
    ],
)
def test_num_kv_heads_says_what_it_can_be(heads, asked, says):
    with pytest.raises(kv_hf.ConversionError, match=says):
        check_heads(heads, asked)


def test_lm_eval_without_a_model_says_how_to_name_one():
    harness = pytest.importorskip("kv_hf.evaluation.harness.model")
    for given in ({}, {"pretrained": ""}, {"cache_implementation": "paged_int8"}):
        with pytest.raises(
            ValueError, match=r"pretrained must be .* --model_args\s+pretrained=DIR"
        ):
            harness.KVCacheLM(**given)


@pytest.mark.parametrize("named", [True, False])
def test_a_home_that_cannot_be_written_to_names_its_variable(named, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    home = tmp_path / "file" / "home"
    monkeypatch.delenv("KV_HF_HOME", raising=False)
    monkeypatch.setenv("KV_HF_HOME" if named else "HOME", str(home))
    made = []
    with pytest.raises(
        kv_hf.KVCacheError, match="KV_HF_HOME must be .*Not a directory.*set"
    ) as error:
        made_once(user_dir() / "models" / "a", "config.json", lambda *given: made.append(given))
    assert not made and str(home) in str(error.value)
    assert ("(the default)" in str(error.value)) is not named


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission_names_its_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path))
    tmp_path.chmod(0o500)
    with pytest.raises(kv_hf.KVCacheError, match=r"KV_HF_HOME must be .*Permission denied"):
        check_writable(user_dir() / "models")


def test_a_user_without_a_home_folder_is_told_of_the_variable(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KV_HF_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", nowhere)
    with pytest.raises(kv_hf.KVCacheError, match="no home folder; set KV_HF_HOME"):
        user_dir()


@pytest.mark.parametrize(
    ("side", "name", "formats"),
    [
        ("keys", "int3", "paged_int3 is keys='int2_mixed', values='int3_rotated'"),
        ("values", "k5v3", "paged_k5v3 is keys='int4_mixed', values='int3_rotated'"),
        ("keys", "paged_k8v4", "paged_k8v4 is keys='int8', values='int4'"),
        ("values", "paged_int4", "paged_int4 is keys='int4', values='int4'"),
    ],
)
def test_a_cache_name_in_place_of_a_format_names_the_pair(side, name, formats):
    """keys="int3" was answered with "did you mean 'int8'", which takes more than twice the bytes."""
    with pytest.raises(kv_hf.CacheOptionError, match=f"got '{name}'; the cache {formats}") as error:
        kv_hf.CacheConfig(**{side: name})
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "meant"), [("paged_in4", "paged_int4"), ("int3", "paged_int3"), ("statc", "static")]
)
def test_generate_names_the_cache_nearest_to_a_misspelt_one(name, meant):
    with pytest.raises(kv_hf.CacheOptionError, match=f"got '{name}' .did you mean '{meant}'"):
        shared_model("llama").generate(tokens(1, 4), max_new_tokens=1, cache_implementation=name)


def test_generate_leaves_other_errors_of_transformers_as_they_are():
    with pytest.raises(ValueError, match="max_new_tokens") as error:
        shared_model("llama").generate(tokens(1, 4), max_new_tokens=-1)
    assert type(error.value) is ValueError


def test_a_cache_name_as_past_key_values_names_the_argument():
    with pytest.raises(
        kv_hf.CacheOptionError, match="'paged_int4': a name goes into cache_implementation"
    ):
        shared_model("llama").generate(tokens(1, 4), max_new_tokens=1, past_key_values="paged_int4")


def test_load_text_names_the_nearest_text():
    with pytest.raises(ValueError, match="got 'nove' .did you mean 'novel'"):
        kv_hf.texts.load_text("nove")
