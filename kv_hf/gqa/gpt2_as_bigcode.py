"""GPT-2 as GPTBigCode, which is GPT-2 with linear layers the usual way round and, if wanted, one kv head."""

from functools import partial
from typing import Any

import torch
import transformers

from ..errors import ConversionError
from .pooling import pool_heads

SAME = (
    "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "layer_norm_epsilon", "initializer_range", "scale_attn_weights", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "tie_word_embeddings",
)  # fmt: skip
Made = dict[str, tuple[tuple[str, ...], Any]]


def bigcode_config(config: Any, num_kv_heads: int) -> transformers.GPTBigCodeConfig:
    """Return the config of the same model as GPTBigCode. Raises ConversionError where that would compute something else."""
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if getattr(config, name):
            raise ConversionError(f"gpt2 with {name}=True: GPTBigCode cannot compute that")
    return transformers.GPTBigCodeConfig(
        **{name: getattr(config, name) for name in SAME},
        multi_query=num_kv_heads == 1,
        architectures=["GPTBigCodeForCausalLM"],
    )


def bigcode_tensors(config: Any, num_kv_heads: int, method: str) -> Made:
    """Return name in GPTBigCode -> (names in GPT-2, what makes it of them)."""
    tops = ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"]
    made: Made = {f"transformer.{name}": ((f"transformer.{name}",), None) for name in tops}
    made["lm_head.weight"] = (("lm_head.weight",), None)
    merge = partial(
        merge_rows, heads=config.n_head, merged=num_kv_heads != config.n_head, method=method
    )
    for i in range(config.n_layer):
        at = f"transformer.h.{i}."
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            made[at + name] = ((at + name,), None)
        for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            made[f"{at}{name}.weight"] = ((f"{at}{name}.weight",), turned)
            made[f"{at}{name}.bias"] = ((f"{at}{name}.bias",), None)
        name = f"{at}attn.c_attn"
        made[f"{name}.weight"] = ((f"{name}.weight",), lambda tensor: merge(tensor.t()))
        made[f"{name}.bias"] = ((f"{name}.bias",), merge)
    return made


def turned(weight: torch.Tensor) -> torch.Tensor:
    """Return [out, in] of [in, out]."""
    return weight.t().contiguous()


def merge_rows(rows: torch.Tensor, *, heads: int, merged: bool, method: str) -> torch.Tensor:
    """Return GPTBigCode's rows of GPT-2's [queries, keys, values].

    With one kv head: all queries, the key, the value. With all of them: query, key and value of a head together.
    """
    parts = rows.reshape(3, heads, -1, *rows.shape[1:])  # [3, heads, head_dim, ..]
    if not merged:
        return parts.transpose(0, 1).flatten(0, 2).contiguous()
    query, key, value = parts
    return torch.cat(
        [query.flatten(0, 1), pool_heads(key, 1, method)[0], pool_heads(value, 1, method)[0]]
    )
