"""Real weights in MLA form: a Llama with shared kv heads, rewritten as a model with multi-head latent attention.

No small checkpoint with multi-head latent attention (MLA) can be had offline. This one computes what a trained Llama
computes, so that its text is real and its figures mean something; but its latents were never trained as latents, nor are
they RMS-normalised. What it shows is "real GQA weights in MLA form", not the quality of DeepSeek's models.

Of each kv head the planes of lowest frequency lose their RoPE (they hardly turn) and join the values in the latent:

    latent  = basis @ [K without RoPE of all kv heads | V of all kv heads]     rank = kv_heads * (2 * still + head_dim)
    RoPE key = [turning planes of kv head 0 | of kv head 1 | ..]                shared by all query heads

A query head is zero in the RoPE channels of other kv heads, and kv_b_proj picks its kv head out of the latent.
"""

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, YoutuConfig
from transformers.models.youtu.modeling_youtu import YoutuForCausalLM

from kv_hf.evaluation.models import LoadedModel
from kv_hf.formats import ATTENTION_NAME
from kv_hf.texts import text_windows
from measure.models.packaged import packaged_model

LABEL = "real GQA weights in MLA form"
MIXINGS = ("random", "whitened")
BASIS_TEXT, BASIS_TOKENS = "lincoln_1863", 1024  # that the principal axes are found on
# what the config of the rewritten model has of the Llama's
SAME = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act max_position_embeddings "
    "rms_norm_eps tie_word_embeddings rope_parameters bos_token_id eos_token_id pad_token_id"
)


def embed_in_mla(
    llama: LlamaForCausalLM, bases: torch.Tensor, still: int | None = None
) -> PreTrainedModel:
    """Return a Youtu model (MLA) that computes what `llama` computes with its slowest planes not turned.

    Args:
        llama: plain RoPE, no biases; its weights are read in float64 and rounded once, to its own dtype.
        bases: [layers, rank, rank], invertible: of each layer's latents, an axis a row. Zeros are added to latents of
            fewer than `rank` numbers.
        still: planes of each kv head that lose their RoPE; None: a quarter of them.
    Raises: ValueError for a rank that is too small.
    """
    config: Any = llama.config
    head_dim, kv_heads, rank = config.head_dim, config.num_key_value_heads, bases.shape[-1]
    still = head_dim // 8 if still is None else still
    turning = head_dim // 2 - still
    needed = kv_heads * (2 * still + head_dim)
    if rank < needed:
        raise ValueError(f"rank must be at least {needed}, got {rank}")
    mla: Any = YoutuForCausalLM(
        YoutuConfig(
            **{name: getattr(config, name) for name in SAME.split()},
            num_key_value_heads=config.num_attention_heads,
            kv_lora_rank=rank,
            q_lora_rank=None,
            qk_rope_head_dim=2 * turning * kv_heads,
            qk_nope_head_dim=2 * still,
            v_head_dim=head_dim,
            rope_interleave=False,
        )
    )
    mla = mla.to(device=llama.device, dtype=llama.dtype)
    rotary = mla.model.rotary_emb
    rotary.inv_freq = llama.model.rotary_emb.inv_freq[:turning].repeat(kv_heads)
    rotary.original_inv_freq = rotary.inv_freq.clone()
    kept = {k: v for k, v in llama.state_dict().items() if ".self_attn." not in k or "o_proj" in k}
    mla.load_state_dict(kept, strict=False)
    for layer, source, basis in zip(mla.model.layers, llama.model.layers, bases, strict=True):
        _embed_attention(layer.self_attn, source.self_attn, basis.double())
    if config.tie_word_embeddings:
        mla.tie_weights()
    mla.generation_config = llama.generation_config
    return mla.eval()


@torch.no_grad()
def _embed_attention(mla: Any, gqa: Any, basis: torch.Tensor) -> None:
    """Write the weights of one GQA attention into one MLA attention."""
    head_dim, still = mla.v_head_dim, mla.qk_nope_head_dim // 2
    planes, heads = head_dim // 2, mla.num_heads
    turning = planes - still
    # rotate_half: plane p is channels p and p + planes; frequencies fall with p
    slow = [*range(turning, planes), *range(planes + turning, head_dim)]
    q, k, v = (
        proj.weight.double().unflatten(0, (-1, head_dim))
        for proj in (gqa.q_proj, gqa.k_proj, gqa.v_proj)
    )
    kv_heads, hidden = k.shape[0], k.shape[2]
    needed = kv_heads * (2 * still + head_dim)
    basis = basis.to(k.device)
    back = torch.linalg.inv(basis)[:needed]  # the channels beyond are zeros
    latent = basis[:, :needed] @ torch.cat([k[:, slow].flatten(0, 1), v.flatten(0, 1)])
    # all first halves of planes, then all second halves
    halves = [(0, turning), (planes, planes + turning)]
    rope = torch.cat([k[:, low:high].flatten(0, 1) for low, high in halves])
    mla.kv_a_proj_with_mqa.weight.copy_(torch.cat([latent, rope]))
    mla.kv_a_layernorm = nn.Identity()

    pick = torch.zeros(heads, 2 * still + head_dim, needed).to(k)
    query = torch.zeros(heads, mla.qk_head_dim, hidden).to(k)
    for head in range(heads):
        kv = head * kv_heads // heads
        key_at, value_at = kv * 2 * still, kv_heads * 2 * still + kv * head_dim
        pick[head, : 2 * still, key_at : key_at + 2 * still].fill_diagonal_(1.0)
        pick[head, 2 * still :, value_at : value_at + head_dim].fill_diagonal_(1.0)
        query[head, : 2 * still] = q[head, slow]
        for half, (low, high) in enumerate(halves):
            at = 2 * still + (half * kv_heads + kv) * turning
            query[head, at : at + turning] = q[head, low:high]
    query *= gqa.scaling / mla.scaling
    mla.q_proj.weight.copy_(query.flatten(0, 1))
    mla.kv_b_proj.weight.copy_(pick.flatten(0, 1) @ back)


def random_bases(layers: int, rank: int) -> torch.Tensor:
    """Return a random orthogonal basis per layer, float64 [layers, rank, rank]."""
    generator = torch.Generator().manual_seed(0)
    wild = torch.randn(layers, rank, rank, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(wild)[0]


@torch.no_grad()
def whitened_bases(mla: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Return bases in which the latents of a text have equal energy along every axis: float64 [layers, rank, rank].

    The principal axes are scaled, then turned at random, so that no channel stands out. Axes with less than a thousandth
    of the mean energy are scaled as if they had that much.

    Args:
        mla: a fixture whose latents are not mixed.
        token_ids: [tokens], on its device.
    """
    cache = DynamicCache(config=mla.config)
    mla(token_ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    latents = torch.stack([layer.keys[0, 0].double() for layer in cache.layers])  # type: ignore[index, union-attr]
    energy, axes = torch.linalg.eigh(latents.mT @ latents / latents.shape[1])
    scale = energy.clamp(min=1e-3 * energy.mean(-1, keepdim=True)).rsqrt()
    return random_bases(*energy.shape).to(axes) @ (scale[..., None] * axes.mT)


def latent_model(
    name: str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    mixing: str,
    rank: int,
) -> LoadedModel:
    """Return a Llama in MLA form, ready to be measured.

    Args:
        mixing: one of MIXINGS, the basis of the latents; "whitened" finds the axes on BASIS_TEXT.
        rank: kv_lora_rank.
    """
    if mixing not in MIXINGS:
        raise ValueError(f"mixing must be one of {', '.join(MIXINGS)}, got {mixing!r}")
    loaded = packaged_model(name, dtype, device)
    llama = loaded.model
    bases = random_bases(llama.config.num_hidden_layers, rank)
    if mixing == "whitened":
        (ids,) = text_windows(loaded.tokenizer, BASIS_TEXT, BASIS_TOKENS, 1)
        plain = embed_in_mla(llama, torch.eye(rank).expand_as(bases))
        bases = whitened_bases(plain, torch.tensor(ids, device=device))
    loaded.model = embed_in_mla(llama, bases)
    loaded.model.set_attn_implementation(ATTENTION_NAME)
    return loaded
