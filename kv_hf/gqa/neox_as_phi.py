"""GPT-NeoX (Pythia) with parallel residual as Phi, which has one LayerNorm in place of two, and grouped kv heads.

Both of NeoX's norms normalize the same input, so their weights and biases go into the projections behind them:
W (w * n + b) + c = (W w) n + (W b + c), and Phi's only norm becomes weight 1, bias 0.
"""

from functools import partial
from typing import Any

import torch
import transformers

from ..errors import ConversionError
from .pooling import pool_heads

HEAD = "lm_head.weight"  # embed_out.weight on disk
Made = dict[str, tuple[tuple[str, ...], Any]]


def phi_config(config: Any, num_kv_heads: int) -> transformers.PhiConfig:
    """Return the config of the same model as Phi. Raises ConversionError where Phi would compute something else."""
    if not config.use_parallel_residual:
        raise ConversionError(
            "gpt_neox with use_parallel_residual=False: Phi feeds attention and MLP with the same input, this model does not"
        )
    if config.tie_word_embeddings:
        raise ConversionError(
            "gpt_neox with tie_word_embeddings=True: the head of Phi has a bias and weights of its own"
        )
    return transformers.PhiConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=num_kv_heads,
        resid_pdrop=config.hidden_dropout,
        embd_pdrop=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        hidden_act=config.hidden_act,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        layer_norm_eps=config.layer_norm_eps,
        use_cache=config.use_cache,
        tie_word_embeddings=False,
        rope_parameters=dict(config.rope_parameters),
        qk_layernorm=False,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        architectures=["PhiForCausalLM"],
    )


def phi_tensors(config: Any, num_kv_heads: int, method: str) -> Made:
    """Return name in Phi -> (names in GPT-NeoX, what makes it of them)."""
    made: Made = {
        "model.embed_tokens.weight": (("gpt_neox.embed_in.weight",), None),
        "model.final_layernorm.weight": (("gpt_neox.final_layer_norm.weight",), None),
        "model.final_layernorm.bias": (("gpt_neox.final_layer_norm.bias",), None),
        "lm_head.weight": ((HEAD,), None),
        "lm_head.bias": ((HEAD,), zeros),
    }
    for i in range(config.num_hidden_layers):
        old, new = f"gpt_neox.layers.{i}.", f"model.layers.{i}."
        norm = (f"{old}input_layernorm.weight", f"{old}input_layernorm.bias")
        after = (f"{old}post_attention_layernorm.weight", f"{old}post_attention_layernorm.bias")
        qkv, up = f"{old}attention.query_key_value", f"{old}mlp.dense_h_to_4h"
        biases = (f"{qkv}.bias",) if config.attention_bias else ()
        for place, letter in enumerate("qkv"):
            rows = partial(
                head_rows,
                place=place,
                heads=config.num_attention_heads,
                groups=config.num_attention_heads if letter == "q" else num_kv_heads,
                method=method,
            )
            to = f"{new}self_attn.{letter}_proj"
            made[f"{to}.weight"] = ((f"{qkv}.weight", norm[0]), partial(folded_weight, rows=rows))
            made[f"{to}.bias"] = (
                (f"{qkv}.weight", norm[1], *biases),
                partial(folded_bias, rows=rows),
            )
        dense = f"{old}attention.dense"
        made[f"{new}self_attn.dense.weight"] = ((f"{dense}.weight",), None)
        made[f"{new}self_attn.dense.bias"] = (
            ((f"{dense}.bias",), None) if config.attention_bias else ((f"{dense}.weight",), zeros)
        )
        made[f"{new}mlp.fc1.weight"] = ((f"{up}.weight", after[0]), folded_weight)
        made[f"{new}mlp.fc1.bias"] = ((f"{up}.weight", after[1], f"{up}.bias"), folded_bias)
        for end in ("weight", "bias"):
            made[f"{new}mlp.fc2.{end}"] = ((f"{old}mlp.dense_4h_to_h.{end}",), None)
        made[f"{new}input_layernorm.weight"] = (norm[:1], torch.ones_like)
        made[f"{new}input_layernorm.bias"] = (norm[1:], torch.zeros_like)
    return made


def same(rows: torch.Tensor) -> torch.Tensor:
    """Return all rows [out, ..]."""
    return rows


def head_rows(
    rows: torch.Tensor, *, place: int, heads: int, groups: int, method: str
) -> torch.Tensor:
    """Return the queries, keys or values (`place` 0, 1, 2) of [heads * 3 * head_dim, ..], pooled to `groups` heads."""
    found = rows.reshape(heads, 3, -1, *rows.shape[1:])[:, place]
    return (found if groups == heads else pool_heads(found, groups, method)).flatten(0, 1)


def folded_weight(weight: torch.Tensor, norm: torch.Tensor, rows: Any = same) -> torch.Tensor:
    """Return W * w [out, in] in float64, w [in] the weight of the norm before it."""
    return rows(weight).double() * norm.double()


def folded_bias(
    weight: torch.Tensor, norm: torch.Tensor, *bias: torch.Tensor, rows: Any = same
) -> torch.Tensor:
    """Return W b + c [out] in float64, b [in] the bias of the norm before it and c [out] the layer's own, if it has one."""
    found = weight.double() @ norm.double()
    return rows(found + bias[0].double() if bias else found)


def zeros(weight: torch.Tensor) -> torch.Tensor:
    """Return a bias of zeros for [out, in]."""
    return weight.new_zeros(len(weight))
