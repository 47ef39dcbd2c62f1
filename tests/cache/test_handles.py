"""Foreign code gets correct dense tensors with one warning; stale handles raise."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tiny_models import make_model, tokens

import kv_hf
from kv_hf.bridge.handles import view_of


def filled_cache(keys="exact", rows=2, length=90):
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, keys=keys, page_size=16)
    with torch.no_grad():
        model(tokens(rows, length), past_key_values=cache)
    return model, cache


def new_states(rows=2, length=1):
    return torch.randn(2, rows, 2, length, 16)


def test_flex_attention_gets_dense_tensors():
    """It is traced by torch.compile, which cannot look into handles (it does not compile on every CPU)."""
    model, cache = filled_cache("int4")
    exact = filled_cache()[1]
    model.config._attn_implementation = "flex_attention"
    states = new_states()
    exact.update(*states, 0)
    cache._config = model.config
    with pytest.warns(kv_hf.KVCacheWarning, match="flex_attention"):
        keys, values = cache.update(*states, 0)
    assert type(keys) is type(values) is torch.Tensor
    torch.testing.assert_close(keys, exact.layers[0].keys, rtol=0, atol=0.3)
    assert torch.equal(keys[:, :, -1:], states[0])


def test_gradients_of_queries_flow_and_that_keys_and_values_get_none_is_said():
    model, cache = filled_cache("int4")
    with pytest.warns(kv_hf.KVCacheWarning, match="No gradient flows through the keys"):
        out = model(tokens(2, 1), past_key_values=cache).logits
    out.sum().backward()
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.grad.abs().sum() > 0
    assert attention.k_proj.weight.grad is None and attention.v_proj.weight.grad is None


def test_dropout_takes_the_dense_route():
    """Whatever paged attention cannot express must not be dropped in silence."""
    from kv_hf.hf import attention

    _, cache = filled_cache(length=40)
    module = make_model("llama").model.layers[0].self_attn
    seen = []

    def dense(*given, **kwargs):
        seen.append((given[2], kwargs))
        return given[1], None

    keys, values = cache.update(*new_states(), 0)
    query = torch.randn(2, 4, 1, 16)
    with pytest.warns(kv_hf.KVCacheWarning, match="densely because dropout=0.5"):
        attention.kv_hf_attention(module, query, keys, values, None, dropout=0.5, dense=dense)
    ((keys, kwargs),) = seen
    assert type(keys) is torch.Tensor and kwargs["dropout"] == 0.5


@pytest.mark.parametrize("options", [{}, {"keys": "int4"}, {"max_length": 200}], ids=str)
def test_handle_kept_over_a_reset_is_never_accepted_again(options):
    """Revisions began at 0 again: after as many steps as before, a handle showed another text."""
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16, **options)
    kept = []
    for _ in range(3):
        for length in (90, 1, 1):
            made = [cache.update(*new_states(length=length), layer) for layer in range(2)]
            for pair in kept:
                with pytest.raises(kv_hf.StaleHandleError):
                    pair[0] + pair[1]
                with pytest.raises(kv_hf.StaleHandleError):  # as attention asks
                    view_of(*pair)
        kept += made
        assert all(torch.equal(handle + 0, handle.dense()) for pair in made for handle in pair)
        cache.reset()
    assert len(kept) == 6


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "other process": lambda cache: pickle.loads(ForkingPickler.dumps(cache)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", COPIES)
def test_handles_of_a_copy_and_of_its_source_follow_their_own_cache(how, mode):
    """torch.multiprocessing shared the windows of both; nobody could write to windows that were copied in inference mode."""
    _, cache = filled_cache()
    ours = cache.update(*new_states(), 0)[0]
    cache.update(*new_states(), 1)
    held = ours + 0
    with mode():
        copied = COPIES[how](cache)
    copied.reorder_cache(torch.tensor([1, 1]))
    theirs, _ = [copied.update(*new_states(), layer)[0] for layer in range(2)]
    assert torch.equal(ours + 0, held)  # the copy has moved on, its source has not
    both = theirs + 0
    for layer in range(2):
        cache.update(*new_states(), layer)
    with pytest.raises(kv_hf.StaleHandleError):
        ours + 0
    assert torch.equal(theirs + 0, both)


def test_handle_is_stale_as_soon_as_its_layer_is_being_changed(monkeypatch):
    """The layer's work stopped half-way: what the handle knows may be half of one forward, half of the next."""
    _, cache = filled_cache()
    handles = [cache.update(*new_states(), layer)[0] for layer in range(2)]
    store = cache.layers[0].store
    monkeypatch.setattr(type(store), "append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.update(*new_states(), 0)
    with pytest.raises(kv_hf.StaleHandleError):
        handles[0] + 0


@pytest.mark.parametrize(("count", "is_stale"), [(3, False), (11, False), (27, True), (30, True)])
def test_handles_outlive_a_crop_that_moves_no_page(count, is_stale):
    """An assistant of Gemma 4 reads keys of the forward whose drafts were just refused: it ended in a StaleHandleError."""
    _, cache = filled_cache()
    handles = [cache.update(*new_states(length=5), layer)[0] for layer in range(2)]
    held = [handle.dense() for handle in handles]  # of 95 tokens: 4 first ones, 5 pages, 11
    cache.crop(-count)
    for handle, before in zip(handles, held, strict=True):
        if is_stale:
            with pytest.raises(kv_hf.StaleHandleError):
                handle + 0
        else:
            assert torch.equal(handle + 0, before)
    assert torch.equal(cache.layers[0].keys, held[0][:, :, :-count])
    cache.update(*new_states(), 0)
    with pytest.raises(kv_hf.StaleHandleError):
        handles[0] + 0


@pytest.mark.parametrize("refused", [0, 1])
def test_dropped_pages_of_a_shared_pool_are_not_written_while_their_forward_reads(refused):
    """A copy took a page that the source's last forward had given back, and its handles still read, for its own."""
    from tiny_models import make_sliding as make

    config = make("mistral", 24).config
    cache = kv_hf.PagedCache(config, page_size=16, max_length=400)  # nothing grows, nothing moves
    layers = range(len(cache.layers))

    def append(one, length):
        return [one.update(*new_states(1, length), layer)[0] for layer in layers]

    append(cache, 52)
    copied = copy.deepcopy(cache)
    copied.reset()  # it lets go of the pages that it shared
    handles = append(cache, 17)
    held = [handle + 0 for handle in handles]
    cache.crop(-refused)
    append(copied, 21)  # takes one page: storage need not grow, and nothing moves
    for handle, before in zip(handles, held, strict=True):
        assert torch.equal(handle + 0, before)
    append(cache, 1)
    cache.check_integrity()
    copied.check_integrity()


WRITES = {
    "whole": lambda keys: keys.mul_(0.5),
    "setitem": lambda keys: keys.__setitem__((slice(None), slice(None), 2), 0.0),
    "view of a view": lambda keys: keys.transpose(1, 2)[:, 3:].mul_(2.0),
    "out": lambda keys: torch.add(keys.clone(), 1.0, out=keys),
    "foreach": lambda keys: torch._foreach_mul_([keys], 2.0),
    "shape": lambda keys: keys.unsqueeze_(0),
}


@pytest.mark.filterwarnings("ignore::kv_hf.KVCacheWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_writing_to_a_handle_or_a_view_of_it_is_refused(mode):
    """The write went to a temporary tensor, so that the model ran on as if it had not been."""
    with mode():
        _, cache = filled_cache()
        keys, values = cache.update(*new_states(), 0)
        for handle in (keys, values):
            before = handle.dense()
            for write in WRITES.values():
                with pytest.raises(kv_hf.UnsupportedModelError, match="read-only"):
                    write(handle)
            assert torch.equal(handle.dense(), before)


@pytest.mark.filterwarnings("ignore::kv_hf.KVCacheWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_of_a_handle_compute_as_tensors_and_copies_may_be_written_to(mode):
    with mode():
        keys, values = filled_cache()[1].update(*new_states(), 0)
        dense, part = keys.dense(), keys[:, :, 3:]
        assert (
            torch.equal(part * 2, dense[:, :, 3:] * 2) and part.tolist() == dense[:, :, 3:].tolist()
        )
        assert not part.numpy().flags.writeable
        query = torch.randn(2, 2, 1, 16)
        attend = torch.nn.functional.scaled_dot_product_attention
        assert torch.equal(attend(query, part, part), attend(query, *[dense[:, :, 3:]] * 2))
        repeated = keys[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, -1, 16)
        copies = (part.clone(), part + 0, torch.cat([part, part], 2), repeated)
        for copy_ in (*copies, copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            assert type(copy_) is torch.Tensor
            copy_.zero_()
        assert torch.equal(keys.dense(), dense)


def test_a_layer_that_lacks_the_tokens_of_others_is_not_read():
    """A model may look at its own past first; layers in front of this one are a forward ahead then."""
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16)
    with torch.no_grad():
        model(tokens(2, 60), past_key_values=cache)
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: cache.layers[1].keys)
    with torch.no_grad(), pytest.raises(kv_hf.InterruptedForwardError, match="layer 1 lacks"):
        model(tokens(2, 1), past_key_values=cache)
