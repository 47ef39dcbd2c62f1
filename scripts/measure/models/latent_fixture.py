"""Real weights in MLA form: a Llama with shared kv heads, rewritten as a model with multi-head latent attention.

No small checkpoint with multi-head latent attention (MLA) can be had offline. This one computes what a trained Llama
computes, so that its text is real and its figures mean something; but its latents were never trained as latents, nor are
they RMS-normalised. What it shows is "real GQA weights in MLA form", not the quality of DeepSeek's models.

Of each kv head the planes of lowest frequency lose their RoPE (they hardly turn) and join the values in the latent:

    latent  = mix @ [K without RoPE of all kv heads | V of all kv heads]       rank = kv_heads * (2 * still + head_dim)
    RoPE key = [turning planes of kv head 0 | of kv head 1 | ..]                shared by all query heads

A query head is zero in the RoPE channels of other kv heads, and kv_b_proj picks its kv head out of the latent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, YoutuConfig
from transformers.models.youtu.modeling_youtu import YoutuForCausalLM

from kv_hf.cache.paged_cache import PagedCache
from kv_hf.config import CacheConfig
from kv_hf.evaluation.caches import CacheKind, cache_kind
from kv_hf.evaluation.models import LoadedModel
from kv_hf.formats import Scheme, value_scheme
from kv_hf.hf.latent import longest_absorbed
from kv_hf.texts import text_windows
from measure.models.packaged import packaged_model

LABEL = "real GQA weights in MLA form"
MIXINGS = ("random", "none", "principal", "whitened")
BASIS_TEXT, BASIS_TOKENS = "lincoln_1863", 1024  # that the principal axes are found on
# what the config of the rewritten model has of the Llama's
SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"),
)
ALONG = " along the rank"


def embed_in_mla(
    llama: LlamaForCausalLM,
    rank: int,
    bases: Sequence[torch.Tensor] | None = None,
    still_planes: int | None = None,
) -> PreTrainedModel:
    """Return a Youtu model (MLA) that computes what `llama` computes with its slowest planes not turned.

    Args:
        llama: its weights are read in float64 and rounded once, to its own dtype.
        rank: kv_lora_rank; zeros are added to latents before they are mixed.
        bases: of each layer's latents, invertible [rank, rank], an axis a row (`random_bases`, `found_bases`). None: keys
            and values side by side, with the outlier channels of the keys.
        still_planes: planes of each kv head that lose their RoPE; None: a quarter of them.
    Raises: ValueError for a model that cannot be rewritten so, and for a rank that is too small.
    """
    config: Any = llama.config
    rope = config.rope_parameters.get("rope_type", "default")
    biases = any(name.endswith("_proj.bias") for name, _ in llama.named_parameters())
    if not isinstance(llama, LlamaForCausalLM) or rope != "default" or biases:
        raise ValueError(
            "llama must be a LlamaForCausalLM with RoPE of type 'default' and without biases, got "
            f"{type(llama).__name__}, {rope!r}, biases: {biases}"
        )
    head_dim, kv_heads = config.head_dim, config.num_key_value_heads
    planes = head_dim // 2
    still = planes // 4 if still_planes is None else still_planes
    needed = kv_heads * (2 * still + head_dim)
    if rank < needed:
        raise ValueError(f"rank must be at least {needed}, got {rank}")
    bases = bases or [torch.eye(rank, dtype=torch.float64)] * config.num_hidden_layers
    turning = planes - still
    mla: Any = YoutuForCausalLM(
        YoutuConfig(
            **{name: getattr(config, name) for name in SAME},
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
        _embed_attention(layer.self_attn, source.self_attn, basis)
    if mla.config.tie_word_embeddings:
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
        getattr(gqa, name).weight.double().view(-1, head_dim, gqa.q_proj.in_features)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    kv_heads, hidden = k.shape[0], k.shape[2]
    needed = kv_heads * (2 * still + head_dim)
    basis = basis.double().to(k.device)
    back = torch.linalg.inv(basis)[:needed]  # the channels beyond are zeros
    latent = basis[:, :needed] @ torch.cat([k[:, slow].flatten(0, 1), v.flatten(0, 1)])
    # all first halves of planes, then all second halves
    halves = [(0, turning), (planes, planes + turning)]
    rope = torch.cat([k[:, low:high].flatten(0, 1) for low, high in halves])
    mla.kv_a_proj_with_mqa.weight.copy_(torch.cat([latent, rope]))
    mla.kv_a_layernorm = nn.Identity()

    pick = torch.zeros(heads, 2 * still + head_dim, needed, dtype=torch.float64, device=k.device)
    query = torch.zeros(heads, mla.qk_head_dim, hidden, dtype=torch.float64, device=k.device)
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


def random_bases(layers: int, rank: int) -> list[torch.Tensor]:
    """Return a random orthogonal basis per layer, float64 [rank, rank] each."""
    generator = torch.Generator().manual_seed(0)
    wild = torch.randn(layers, rank, rank, generator=generator, dtype=torch.float64)
    return list(torch.linalg.qr(wild)[0])


@torch.no_grad()
def found_bases(
    mla: PreTrainedModel, token_ids: torch.Tensor, whitened: bool = False
) -> list[torch.Tensor]:
    """Return a basis of each layer's latents that is found on a text: float64 [rank, rank], an axis a row.

    Args:
        mla: a fixture whose latents are not mixed.
        token_ids: [tokens], on its device.
        whitened: False: the principal axes, strongest first. True: these axes scaled to equal energy, then turned at
            random, so that no channel stands out. Axes with less than a thousandth of the mean energy are scaled as if
            they had that much.
    """
    cache = DynamicCache(config=mla.config)
    mla(token_ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    bases = []
    turns = random_bases(len(cache.layers), mla.config.kv_lora_rank)
    for layer, turn in zip(cache.layers, turns, strict=True):
        latents = layer.keys[0, 0].double()  # type: ignore[index, union-attr]
        energy, axes = torch.linalg.eigh(latents.T @ latents / len(latents))
        energy, axes = energy.flip(0), axes.T.flip(0)
        if whitened:
            scale = energy.clamp(min=1e-3 * energy.mean().item()).rsqrt()
            axes = turn.to(axes.device) @ (scale[:, None] * axes)
        bases.append(axes)
    return bases


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
        mixing: one of MIXINGS; "principal" and "whitened" find the axes on BASIS_TEXT.
        rank: as that of `embed_in_mla`.
    """
    if mixing not in MIXINGS:
        raise ValueError(f"mixing must be one of {', '.join(MIXINGS)}, got {mixing!r}")
    loaded = packaged_model(name, dtype, device)
    llama, bases = loaded.model, None
    if mixing == "random":
        bases = random_bases(llama.config.num_hidden_layers, rank)
    elif mixing != "none":
        (ids,) = text_windows(loaded.tokenizer, BASIS_TEXT, BASIS_TOKENS, 1)
        text = torch.tensor(ids, device=device)
        bases = found_bases(embed_in_mla(llama, rank), text, mixing == "whitened")
    loaded.model = embed_in_mla(llama, rank, bases)
    return loaded


@dataclass(frozen=True)
class GroupedAlongTheRank(CacheConfig):
    """Options whose 4- and 2-bit latents have a scale and an offset per token and part of the rank, as values have.

    Not an option of kv_hf: it is measured beside what kv_hf stores, and only the reference reads it.
    """

    def latent_scheme(self, layer_idx: int, num_layers: int) -> Scheme:
        """Return the scheme of one layer's latents: groups of 64 numbers at 4 bits, of 32 at 2."""
        return value_scheme(self.keys, -64 if self.keys == "int4" else -32)


def latent_cache(name: str) -> CacheKind:
    """Return a cache by name; "int4 along the rank" and "int2 along the rank" beside those of `cache_kind`."""
    if not name.endswith(ALONG):
        return cache_kind(name)
    form = name.removesuffix(ALONG)
    options = GroupedAlongTheRank(keys=form, values=form, kernel="reference")
    return CacheKind(name, "sdpa", lambda config, _: PagedCache.from_options(config, options))


def reads(model: Any, kind: CacheKind) -> str:
    """Return how scored tokens read a cache: "absorbed" (attention over latents) or "expanded" (over keys and values).

    A chunk of teacher forcing is a page at most, and long chunks expand; both compute the same but for rounding.
    """
    cache = kind.make(model.config, 0)
    if not isinstance(cache, PagedCache) or cache.options.mla == "expand":
        return "expanded"
    longest = longest_absorbed(model.model.layers[0].self_attn)
    return "absorbed" if cache.options.page_size <= longest else "expanded"
