"""Models of other people: the attention stays what it is unless their text shows that paged attention computes the same."""

import gc
import linecache
import sys
import textwrap
import types
import warnings

import pytest
import torch
from tiny_models import make_model, tokens
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

import kv_hf
from kv_hf.hf.eager_forms import what_it_reads
from kv_hf.hf.models import why_not_class, why_not_pages

HEAD = """
import torch
from transformers.models.llama.modeling_llama import (
    LlamaAttention, apply_rotary_pos_emb, eager_attention_forward, repeat_kv
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def qkv(self, hidden_states, position_embeddings, past_key_values):
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    return q, k, v

class OwnAttention(LlamaAttention):
    def scale(self):
        return 1.0

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        q, k, v = qkv(self, hidden_states, position_embeddings, past_key_values)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling * self.scale(), **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights
"""
CAPPED = """
def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    groups = module.num_key_value_groups
    scores = query @ repeat_kv(key, groups).transpose(2, 3) * scaling
    scores = torch.tanh(scores)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    return (weights @ repeat_kv(value, groups)).transpose(1, 2).contiguous(), weights
"""


@pytest.fixture
def written(monkeypatch):
    """Return a function that makes a module of a text, as transformers makes one of a model's own file."""

    def write(text, name="own_model"):
        name, text = f"{name}_{len(sys.modules)}", textwrap.dedent(text)
        file = f"<{name}>"
        monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(True), file))
        module = types.ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(text, file, "exec"), vars(module))
        return module

    return write


def with_attention(cls, implementation="sdpa"):
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = cls
    model.config._attn_implementation = implementation
    return model


def eager_only(cls, monkeypatch):
    for kind in (LlamaForCausalLM, modeling_llama.LlamaModel):
        monkeypatch.setattr(kind, "_supports_sdpa", False)
    return with_attention(cls, "eager")


def generate_both(model, **options):
    """Return the tokens with a DynamicCache and with pages, and what was said."""
    expected = model.generate(tokens(1, 40), max_new_tokens=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kv_hf.KVCacheWarning)
        options["cache_implementation"] = "paged_exact"
        found = model.generate(tokens(1, 40), max_new_tokens=6, **options)
    return expected, found, " ".join(str(one.message) for one in caught)


def check_keeps(model, because):
    """Generate with pages: the same tokens, the same attention as before, and the reason said."""
    before = model.config._attn_implementation
    expected, found, said = generate_both(model)
    assert torch.equal(expected, found)
    assert model.config._attn_implementation == before
    assert because in said


# -- the attention's name --------------------------------------------------------------------------------------

METHOD = "class Asks(OwnAttention):\n    def scale(self):\n        "
NAMED = {
    "compared": METHOD + "return 0.3 if self.config._attn_implementation == 'sdpa' else 1.0",
    "match": METHOD
    + "match self.config._attn_implementation:\n            case 'sdpa': return 0.3\n        return 1.0",
    "table": "TABLE = {'sdpa': 0.3}\n"
    + METHOD
    + "return TABLE.get(self.config._attn_implementation, 1.0)",
    "table filled later": "TABLE = {}\nTABLE['s'] = lambda c: 0.3 if c._attn_implementation == 'sdpa' else 1.0\n"
    + METHOD
    + "return TABLE['s'](self.config)",
    "parameter": "def of(name): return 0.3 if name == 'sdpa' else 1.0\n"
    + METHOD
    + "return of(self.config._attn_implementation)",
    "getattr": METHOD
    + "return 0.3 if getattr(self.config, '_attn_implementation') == 'sdpa' else 1.0",
    "getattr of parts": METHOD
    + "name = '_attn_' + 'implementation'\n        return 0.3 if getattr(self.config, name) == 'sdpa' else 1.0",
    "internal": METHOD
    + "return 0.3 if self.config._attn_implementation_internal == 'sdpa' else 1.0",
    "vars": METHOD + "return 0.3 if 'sdpa' in vars(self.config).values() else 1.0",
    "dict": METHOD + "return 0.3 if 'sdpa' in self.config.__dict__.values() else 1.0",
    "walrus": METHOD
    + "return 0.3 if (a := self.config._attn_implementation) and a == 'sdpa' else 1.0",
    "in a tuple": METHOD + "return 0.3 if 'sdpa' in (self.config._attn_implementation,) else 1.0",
    "in a text": METHOD + "return 0.3 if self.config._attn_implementation in 'sdpa,eager' else 1.0",
    "order": METHOD + "return 0.3 if self.config._attn_implementation > 'm' else 1.0",
    "set": METHOD + "return 0.3 if {'sdpa'} & {self.config._attn_implementation} else 1.0",
    "f-string": METHOD + "return 0.3 if f'{self.config._attn_implementation}_' == 'sdpa_' else 1.0",
    "letter": METHOD + "return 0.3 if self.config._attn_implementation[0] == 's' else 1.0",
    "length": METHOD + "return 0.3 if len(self.config._attn_implementation) == 4 else 1.0",
    "tuple": METHOD
    + "a, b = self.config._attn_implementation, 1\n        return 0.3 if a == 'sdpa' else 1.0",
    "method": METHOD
    + "return getattr(self, 's' + self.config._attn_implementation)()\n"
    + "    def ssdpa(self): return 0.3\n    def skv_hf(self): return 1.0",
    "lambda": "class Asks(OwnAttention):\n"
    "    scale = lambda self: 0.3 if self.config._attn_implementation == 'sdpa' else 1.0",
    "class-level if": "class Asks(OwnAttention):\n    if True:\n        def scale(self):\n"
    "            return 0.3 if self.config._attn_implementation == 'sdpa' else 1.0",
    "object": "class Helper:\n    def __init__(self, config):\n"
    "        self.scale = 0.3 if config._attn_implementation == 'sdpa' else 1.0\n"
    + METHOD
    + "return Helper(self.config).scale",
    "nested class": "class Asks(OwnAttention):\n    class Helper:\n        @staticmethod\n        def of(config):\n"
    "            return 0.3 if config._attn_implementation == 'sdpa' else 1.0\n"
    "    def scale(self):\n        return self.Helper.of(self.config)",
    "super": METHOD.replace("Asks", "Parent")
    + "return 0.3 if self.config._attn_implementation == 'sdpa' else 1.0\n"
    + METHOD.replace("OwnAttention", "Parent")
    + "return super().scale()",
    "decorator": "def instead(function):\n    def scale(self):\n"
    "        return 0.3 if self.config._attn_implementation == 'sdpa' else 1.0\n    return scale\n"
    "class Asks(OwnAttention):\n    @instead\n    def scale(self):\n        return 1.0",
    "function": METHOD
    + "from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa\n"
    "        name = self.config._attn_implementation\n"
    "        return 0.3 if ALL_ATTENTION_FUNCTIONS.get_interface(name, None) is sdpa else 1.0",
}


@pytest.mark.parametrize("form", NAMED)
def test_any_way_to_ask_for_the_name_keeps_the_attention(written, form):
    model = with_attention(written(HEAD + NAMED[form]).Asks)
    assert why_not_pages(model) is not None
    check_keeps(model, "keeps attention implementation 'sdpa'")


def test_helper_in_another_module_and_property_of_the_config_are_read(written):
    helper = written("def of(c): return 0.3 if c._attn_implementation == 'sdpa' else 1.0", "helper")
    text = f"{HEAD}\nimport {helper.__name__} as helper\n{METHOD}return helper.of(self.config)"
    check_keeps(with_attention(written(text).Asks), "of goes another way")
    config = written(
        "from transformers import LlamaConfig\n"
        "class OwnConfig(LlamaConfig):\n    @property\n    def fast(self):\n"
        "        return self._attn_implementation == 'sdpa'",
        "configuration",
    )
    model = with_attention(written(f"{HEAD}{METHOD}return 0.3 if self.config.fast else 1.0").Asks)
    model.config.__class__ = config.OwnConfig
    check_keeps(model, "OwnConfig.fast goes another way")


HARMLESS = """
class Asks(OwnAttention):
    '''Says what _attn_implementation is.'''
    def scale(self):
        if self.config._attn_implementation == "flash_attention_2" or "flex" in self.config._attn_implementation:
            raise ValueError(f"{self.config._attn_implementation} is not supported")
        return getattr(self, "factor", 1.0)
"""


@pytest.mark.parametrize(
    "more", ["class Asks(OwnAttention): pass", HARMLESS], ids=["plain", "asks"]
)
def test_model_that_calls_its_attention_as_transformers_does_is_switched(written, more):
    model = with_attention(written(HEAD + more).Asks)
    expected, found, _ = generate_both(model)
    assert torch.equal(expected, found)
    assert model.config._attn_implementation == "kv_hf"


def test_code_beside_the_model_in_its_file_is_not_held_against_it(written):
    beside = (
        "\ndef unused(config, name):\n    return getattr(config, name) == config._attn_implementation\n"
        "TABLE = {'first': lambda scaling: unused(scaling, 'x')}\n"
    )
    assert why_not_pages(with_attention(written(HEAD + beside).OwnAttention)) is None


# -- eager attention and arguments -----------------------------------------------------------------------------


def test_model_with_an_eager_attention_of_its_own_keeps_it(written, monkeypatch):
    model = eager_only(written(HEAD + CAPPED).OwnAttention, monkeypatch)
    check_keeps(model, "attends with eager_attention_forward, which is no eager attention")


def test_model_with_a_copy_of_the_common_eager_attention_is_switched(written, monkeypatch):
    model = eager_only(written(HEAD).OwnAttention, monkeypatch)
    expected, found, _ = generate_both(model)
    assert torch.equal(expected, found)
    assert model.config._attn_implementation == "kv_hf"


def test_sdpa_model_may_have_any_eager_attention(written):
    model = with_attention(written(HEAD + CAPPED).OwnAttention)
    expected, found, _ = generate_both(model)
    assert torch.equal(expected, found)
    assert model.config._attn_implementation == "kv_hf"


def test_what_it_reads_knows_the_forms_of_transformers_and_their_helper():
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.t5 import modeling_t5

    assert what_it_reads(modeling_llama.eager_attention_forward) == frozenset()
    assert what_it_reads(modeling_gemma2.eager_attention_forward) == {"softcap"}
    assert what_it_reads(modeling_t5.eager_attention_forward) == {"position_bias"}
    assert what_it_reads(torch.nn.functional.linear) is None
    own = modeling_llama.eager_attention_forward
    space = {**own.__globals__, "repeat_kv": lambda tensor, times: tensor * 2}
    assert what_it_reads(types.FunctionType(own.__code__, space)) is None


CALLS = {
    "a dict": ("bias = {'my_bias': 0.2}", "scaling=self.scaling, **bias", "from a dict"),
    "changed kwargs": ("kwargs['my_bias'] = 0.2", "scaling=self.scaling, **kwargs", "from a dict"),
    "by name": ("", "scaling=self.scaling, my_bias=0.2", "passes my_bias to its attention"),
    "softcap": ("", "scaling=self.scaling, softcap=None", "passes softcap to its attention"),
    "by position": ("", "0.0, self.scaling, None, None", "passes 9 arguments by position"),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_that_sdpa_takes_otherwise_keep_the_attention(written, call):
    before, given, because = CALLS[call]
    text = HEAD.replace("scaling=self.scaling * self.scale(), **kwargs", given)
    text = text.replace("        attend =", f"        {before or 'pass'}\n        attend =")
    model = with_attention(written(text).OwnAttention)
    assert because in (why_not_pages(model) or "")
    check_keeps(model, because)


def test_scaling_by_position_keeps_the_eager_attention(written, monkeypatch):
    text = HEAD.replace("scaling=self.scaling * self.scale(), **kwargs", "self.scaling * 0.5")
    model = eager_only(written(text).OwnAttention, monkeypatch)
    check_keeps(model, "passes 6 arguments by position")


def test_code_that_computes_with_additive_masks_keeps_the_eager_attention(written, monkeypatch):
    text = HEAD.replace(
        "        attend =",
        "        if attention_mask is not None:\n            attention_mask = attention_mask * 1.0\n        attend =",
    )
    model = eager_only(written(text).OwnAttention, monkeypatch)
    check_keeps(model, "computes with the masks of 'eager'")


def test_asked_for_by_name_what_the_text_says_outright_is_refused(written, monkeypatch):
    class_text = (
        "\nfrom transformers import LlamaForCausalLM\n"
        "class OwnLM(LlamaForCausalLM):\n    _supports_sdpa = False"
    )
    capped = written(HEAD + CAPPED + class_text).OwnLM
    assert "attends with eager_attention_forward" in why_not_class(capped)
    assert why_not_class(written(HEAD + class_text).OwnLM) is None


def test_argument_from_a_dict_that_nobody_reads_is_an_error_with_a_remedy(written):
    """The model was asked for "kv_hf" by name; what it adds in a dict must not get lost."""
    text = HEAD.replace("scaling=self.scaling * self.scale(), **kwargs", "**{'my_bias': 0.2}")
    model = with_attention(written(text).OwnAttention, "kv_hf")
    with pytest.raises(kv_hf.UnsupportedModelError, match=r"passes my_bias .*'attention': 'keep'"):
        model.generate(tokens(1, 40), max_new_tokens=2, cache_implementation="paged_exact")
    model.set_attn_implementation("sdpa")
    keep = {"cache_implementation": "paged_exact", "cache_config": {"attention": "keep"}}
    expected = model.generate(tokens(1, 40), max_new_tokens=4)
    assert torch.equal(expected, model.generate(tokens(1, 40), max_new_tokens=4, **keep))


# -- replaced at run time --------------------------------------------------------------------------------------


def test_replaced_forward_of_an_instance_keeps_the_attention(written):
    own = written(HEAD).OwnAttention
    model = make_model("llama")
    layer = model.model.layers[0].self_attn
    layer.scale = lambda: 0.3
    layer.forward = types.MethodType(own.forward, layer)
    check_keeps(model, "forward of a LlamaAttention was replaced")


def test_replaced_forward_of_a_class_keeps_the_attention_until_it_is_back(written, monkeypatch):
    own, model = written(HEAD).OwnAttention, make_model("llama")
    assert why_not_pages(model) is None  # before, so that nothing is remembered
    with monkeypatch.context() as patched:
        patched.setattr(LlamaAttention, "forward", own.forward)
        patched.setattr(LlamaAttention, "scale", own.scale, raising=False)
        check_keeps(model, "forward of LlamaAttention was replaced")
    assert why_not_pages(model) is None


def test_replaced_forward_of_another_layer_is_read(written):
    def double(x):
        return x * 2

    model = make_model("llama")
    model.model.norm.forward = double
    expected, found, _ = generate_both(model)
    assert torch.equal(expected, found) and model.config._attn_implementation == "kv_hf"
    asks = written(
        "def of(config): return lambda x: x if config._attn_implementation == 'sdpa' else -x"
    )
    model = make_model("llama")
    model.model.norm.forward = asks.of(model.config)
    check_keeps(model, "of goes another way")


def test_wrappers_of_accelerate_and_torch_replace_nothing():
    accelerate = pytest.importorskip("accelerate.hooks")
    model = make_model("llama")
    accelerate.add_hook_to_module(model.model.layers[0].self_attn, accelerate.ModelHook())
    model.forward = torch.compile(model.forward, backend="eager")
    assert why_not_pages(model) is None


def test_own_function_under_the_name_sdpa_keeps_the_attention(monkeypatch):
    stock = AttentionInterface._global_mapping["sdpa"]

    def capped(module, query, key, value, mask, scaling=None, **kwargs):
        return stock(module, query, key, value, mask, scaling=scaling * 0.3, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", capped)
    check_keeps(make_model("llama"), "another function than transformers' own is registered")


# -- one config for two models ---------------------------------------------------------------------------------


def test_model_is_not_switched_along_with_another_of_its_config(written):
    model = make_model("llama")
    other = LlamaForCausalLM(model.config).eval()
    cls = written(HEAD + NAMED["compared"]).Asks
    for layer in other.model.layers:
        layer.self_attn.__class__ = cls
    expected = other.generate(tokens(1, 40), max_new_tokens=6)
    check_keeps(model, "shares its config with another Llama")
    assert torch.equal(expected, other.generate(tokens(1, 40), max_new_tokens=6))
    assert "shares its config" in why_not_pages(model)
    del other, layer
    gc.collect()
    assert why_not_pages(model) is None
