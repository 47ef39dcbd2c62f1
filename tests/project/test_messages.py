"""Messages that a new user meets name the argument, its value, the expectation and the remedy."""

import pytest
import rounding
from tiny_models import make_model, shared_model, tokens

import kv_hf
from kv_hf.user_dir import made_once, user_dir


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
    rounding.assert_close(found, small(tokens(1, 9)).logits)


@pytest.mark.parametrize(
    ("option", "word", "says"),
    [
        ("kernel", "cuda", r"kernel must be one of auto, .*got 'cuda' \(did you mean 'triton'\?\)"),
        ("kernel", "cpu", r"got 'cpu' \(did you mean 'c'\?\)"),
        ("keys", "int3", "got 'int3'; the cache paged_int3 is keys='int2_mixed'"),
        ("values", "paged_int4", "paged_int4 is keys='int4', values='int4'"),
    ],
)
def test_config_names_the_option_that_another_word_means(option, word, says):
    """ "cuda" was answered with 'c', and keys="int3" with 'int8', which takes more than twice the bytes."""
    with pytest.raises(kv_hf.CacheOptionError, match=says):
        kv_hf.CacheConfig(**{option: word})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_implementation": "paged_in4"}, "got 'paged_in4' .did you mean 'paged_int4'"),
        ({"cache_implementation": "statc"}, "got 'statc' .did you mean 'static'"),
        ({"past_key_values": "paged_int4"}, "'paged_int4': a name goes into cache_implementation"),
    ],
    ids=str,
)
def test_generate_names_the_cache_that_was_meant(options, says):
    with pytest.raises(kv_hf.CacheOptionError, match=says):
        shared_model("llama").generate(tokens(1, 4), max_new_tokens=1, **options)


def test_generate_leaves_other_errors_of_transformers_as_they_are():
    with pytest.raises(ValueError, match="max_new_tokens") as error:
        shared_model("llama").generate(tokens(1, 4), max_new_tokens=-1)
    assert type(error.value) is ValueError


@pytest.mark.parametrize("variable", ["KV_HF_HOME", "HOME"])
def test_a_home_that_cannot_be_written_to_names_its_variable(variable, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "home"))
    made = []
    with pytest.raises(
        kv_hf.KVCacheError, match="KV_HF_HOME must be .*Not a directory.*set"
    ) as error:
        made_once(user_dir() / "models" / "a", "config.json", lambda *given: made.append(given))
    assert not made and str(tmp_path / "file" / "home") in str(error.value)
    assert ("(the default)" in str(error.value)) == (variable == "HOME")


def test_a_user_without_a_home_folder_is_told_of_the_variable(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", nowhere)
    with pytest.raises(kv_hf.KVCacheError, match="no home folder; set KV_HF_HOME"):
        user_dir()


def test_load_text_names_the_nearest_text():
    with pytest.raises(ValueError, match="got 'nove' .did you mean 'novel'"):
        kv_hf.texts.load_text("nove")
