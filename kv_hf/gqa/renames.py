"""Models whose class knows no grouped kv heads, as another class that does and computes the same: a table of renames.

GPT-2 becomes GPTBigCode, which is GPT-2 with linear layers the usual way round and, if wanted, one kv head. GPT-NeoX
(Pythia) with parallel residual becomes Phi, which has one LayerNorm in place of two. Both of NeoX's norms normalize the same
input, so their weights and biases go into the projections behind them: W (w * n + b) + c = (W w) n + (W b + c), and Phi's
only norm becomes weight 1, bias 0.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from ..errors import ConversionError
from .source import Source
from .structure import (
    Made,
    Structure,
    build,
    check_heads,
    config_of,
    divisors,
    find_names,
    pool_heads,
)

Rows = Callable[[Tensor], Tensor]


def zeros(weight: Tensor) -> Tensor:
    """Return a bias of zeros for [out, in]."""
    return weight.new_zeros(len(weight))


def folded(weight: Tensor, norm: Tensor, *, rows: Rows) -> Tensor:
    """Return W * w [out, in] in float64, w [in] the weight of the norm before it."""
    return rows(weight).double() * norm.double()


def folded_bias(weight: Tensor, norm: Tensor, *biases: Tensor, rows: Rows) -> Tensor:
    """Return W b + c [out] in float64, b [in] the bias of the norm before it and c [out] the layer's own, if it has one."""
    found = weight.double() @ norm.double()
    for bias in biases:
        found += bias.double()
    return rows(found)


def head_rows(rows: Tensor, *, place: int, heads: int, groups: int) -> Tensor:
    """Return the queries, keys or values (`place` 0, 1, 2) of [heads * 3 * head_dim, ..], pooled to `groups` heads."""
    parts = rows.reshape(heads, 3, -1, *rows.shape[1:])
    return pool_heads(parts[:, place], groups).flatten(0, 1)


def bigcode_rows(rows: Tensor, *, heads: int, groups: int) -> Tensor:
    """Return GPTBigCode's rows of GPT-2's [queries, keys, values]: of a head together, or with one kv head one behind the other."""
    parts = rows.reshape(3, heads, -1, *rows.shape[1:])  # [3, heads, head_dim, ..]
    if groups == heads:
        return parts.transpose(0, 1).flatten(0, 2)
    query, key, value = parts
    pooled = [query, pool_heads(key, 1), pool_heads(value, 1)]
    return torch.cat(pooled).flatten(0, 1)


# fields of a config that are not its model's
OF_CLASS = {"model_type", "architectures", "transformers_version", "dtype"}
QKV = "attention.query_key_value"
# name in Phi -> name in GPT-NeoX, of tensors that are the same
PHI_TOP = {
    "model.embed_tokens.weight": "gpt_neox.embed_in.weight",
    "model.final_layernorm.weight": "gpt_neox.final_layer_norm.weight",
    "model.final_layernorm.bias": "gpt_neox.final_layer_norm.bias",
    "lm_head.weight": "lm_head.weight",
}
PHI_LAYER = {
    "self_attn.dense.weight": "attention.dense.weight",
    "self_attn.dense.bias": "attention.dense.bias",
    "mlp.fc2.weight": "mlp.dense_4h_to_h.weight",
    "mlp.fc2.bias": "mlp.dense_4h_to_h.bias",
}


def phi_tensors(config: Any, groups: int, names: Iterable[str]) -> Made:
    """Return name in Phi -> (names in GPT-NeoX, what makes it of them)."""
    heads = config.num_attention_heads
    layer: Made = {name: ((old,), None) for name, old in PHI_LAYER.items()}
    if not config.attention_bias:
        layer["self_attn.dense.bias"] = ("attention.dense.weight",), zeros

    def fold(new: str, old: str, norm: str, rows: Rows = torch.clone, bias: bool = True) -> None:
        weight = f"{old}.weight"
        biases = [f"{norm}.bias", f"{old}.bias"] if bias else [f"{norm}.bias"]
        layer[f"{new}.weight"] = (weight, f"{norm}.weight"), partial(folded, rows=rows)
        layer[f"{new}.bias"] = (weight, *biases), partial(folded_bias, rows=rows)

    for place, letter in enumerate("qkv"):
        rows = partial(head_rows, place=place, heads=heads, groups=groups if place else heads)
        fold(f"self_attn.{letter}_proj", QKV, "input_layernorm", rows, config.attention_bias)
    fold("mlp.fc1", "mlp.dense_h_to_4h", "post_attention_layernorm")
    layer["input_layernorm.weight"] = ("input_layernorm.weight",), torch.ones_like
    layer["input_layernorm.bias"] = ("input_layernorm.bias",), torch.zeros_like
    made: Made = {name: ((old,), None) for name, old in PHI_TOP.items()}
    made["lm_head.bias"] = ("lm_head.weight",), zeros
    for i in range(config.num_hidden_layers):
        for name, (sources, make) in layer.items():
            olds = tuple(f"gpt_neox.layers.{i}.{source}" for source in sources)
            made[f"model.layers.{i}.{name}"] = olds, make
    return made


def bigcode_tensors(config: Any, groups: int, names: Iterable[str]) -> Made:
    """Return name in GPTBigCode -> (names in GPT-2, what makes it of them): the same names, most linear layers turned."""
    rows = partial(bigcode_rows, heads=config.n_head, groups=groups)
    how = {
        "attn.c_attn.weight": lambda weight: rows(weight.t()),
        "attn.c_attn.bias": rows,
        "attn.c_proj.weight": torch.t,
        "mlp.c_fc.weight": torch.t,
        "mlp.c_proj.weight": torch.t,
    }
    made: Made = {}
    for name in names:
        own = name.split(".", 3)[-1]
        made[name] = (name,), how.get(own)
    return made


@dataclass(frozen=True)
class Route:
    """The rules by which models of one class become models of another.

    Attributes:
        source, target: names of the classes.
        fields: (old config, kv heads) -> fields of the new config that the old one does not have under that name.
        refused: fields of the old config -> the value with which the new class would compute something else.
        tensors: (old config, kv heads, names of its tensors) -> name in the new class -> (names in the old one, what makes it).
        one: whether the new class knows all heads or one.
    """

    source: str
    target: str
    fields: Callable[[Any, int], dict[str, Any]]
    refused: dict[str, bool]
    tensors: Callable[[Any, int, Iterable[str]], Made]
    one: bool

    def new_config(self, old: Any, kv_heads: int) -> Any:
        """Return the config of the same model in the new class. Raises ConversionError where it cannot be the same."""
        for name, value in self.refused.items():
            if getattr(old, name) == value:
                raise ConversionError(
                    f"{old.model_type} with {name}={value}: {self.target} would compute something else"
                )
        named = old.architectures or [self.source]
        if named[0] != self.source:
            raise ConversionError(
                f"{named[0]} has no grouped kv heads; of {old.model_type} models only {self.source} can be converted"
            )
        heads = old.num_attention_heads
        able = [1, heads] if self.one else divisors(heads)
        check_heads(heads, kv_heads, able, f" ({self.target} with {heads} is the same model)")
        kind = getattr(transformers, self.target).config_class
        known = kind().to_dict().keys() - OF_CLASS
        given = {name: value for name, value in old.to_dict().items() if name in known}
        return kind(**given | self.fields(old, kv_heads), architectures=[self.target])

    def structure(self, source: Source, kv_heads: int) -> Structure:
        """Return the conversion of a checkpoint; with as many kv heads as there are, nothing is merged.

        Raises: ConversionError where the new class cannot compute the same, or tensors would be lost.
        """
        config = config_of(source.config, source)
        new, heads = self.new_config(config, kv_heads), config.num_attention_heads
        names = find_names(source, build(config))
        made = self.tensors(config, kv_heads, names.on_disk)
        used = {each for sources, _ in made.values() for each in sources}
        lost = [name for own, name in names.on_disk.items() if own not in used]
        if lost := lost + names.rebuilt + names.unknown:
            raise ConversionError(f"{source.folder} holds {lost[0]!r}, which would be lost")
        found = json.loads(new.to_json_string(use_diff=True))
        for name in ("dtype", "torch_dtype", "tokenizer_class", "task_specific_params"):
            if name in source.config:
                found[name.removeprefix("torch_")] = source.config[name]
        note = f"{self.source} knows no grouped kv heads: the result is a {self.target}, which computes the same with all heads"
        on_disk: Made = {}
        for name, (sources, how) in made.items():
            on_disk[name] = tuple(names.on_disk[each] for each in sources), how
        return Structure(
            config=config,
            new_json=found,
            num_heads=heads,
            num_kv_heads=heads,
            new_kv_heads=kv_heads,
            head_dim=config.hidden_size // heads,
            parts={},
            names=names,
            made=on_disk,
            kv_numbers=2 * config.num_hidden_layers * config.hidden_size,
            note=note,
            new_class=self.target,
        )


ROUTES = {
    "gpt_neox": Route(
        "GPTNeoXForCausalLM",
        "PhiForCausalLM",
        lambda old, kv_heads: {
            "num_key_value_heads": kv_heads,
            "qk_layernorm": False,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop"), old.hidden_dropout),
        },
        {"use_parallel_residual": False, "tie_word_embeddings": True},
        phi_tensors,
        False,
    ),
    "gpt2": Route(
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        lambda old, kv_heads: {"multi_query": kv_heads == 1},
        {"scale_attn_by_inverse_layer_idx": True, "add_cross_attention": True},
        bigcode_tensors,
        True,
    ),
}
