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
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, YoutuConfig
from transformers.models.youtu.modeling_youtu import YoutuForCausalLM

from kv_hf.cache.paged_cache import PagedCache
from kv_hf.evaluation.cache_kinds import CacheKind
from kv_hf.hf.latent import longest_absorbed
from kv_hf.texts import text_windows
from measure.grid.loaded import PackagedModel

LABEL = "real GQA weights in MLA form"
MIXINGS = ("random", "none", "principal", "whitened")
BASIS_TEXT, BASIS_TOKENS = "lincoln_1863", 1024  # that the principal axes are found on


def embed_in_mla(
    llama: LlamaForCausalLM,
    *,
    mixing: str | Sequence[torch.Tensor] = "random",
    rank: int | None = None,
    still_planes: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Return a Youtu model (MLA) that computes what `llama` computes with its slowest planes not turned.

    Args:
        llama: its weights are read in float64 and rounded once, to its own dtype.
        mixing: the basis of the latents. "random": a random orthogonal one, channels are like gaussians; "none": keys and
            values side by side, with the outlier channels of the keys; or an invertible [rank, rank] per layer, whose
            rows are the axes (`principal_bases`, `whitened_bases`).
        rank: kv_lora_rank; zeros are added to latents before they are mixed. None: no zeros.
        still_planes: planes of each kv head that lose their RoPE; None: a quarter of them.
        seed: of the random bases.
    Raises: ValueError for a model that cannot be rewritten so, for a rank that is too small, and for bad bases.
    """
    config: Any = llama.config
    reason = _why_not(llama)
    if reason:
        raise ValueError(f"{type(llama).__name__} cannot be rewritten as MLA: {reason}")
    head_dim, kv_heads = config.head_dim, config.num_key_value_heads
    planes = head_dim // 2
    still = planes // 4 if still_planes is None else still_planes
    if not 0 <= still < planes:
        raise ValueError(f"still_planes must be 0 to {planes - 1}, got {still}")
    needed = kv_heads * (2 * still + head_dim)
    rank = needed if rank is None else rank
    if rank < needed:
        raise ValueError(f"rank must be at least {needed}, got {rank}")
    bases = _bases(mixing, config.num_hidden_layers, rank, seed)
    turning = planes - still
    rope_dim = 2 * turning * kv_heads
    mla: Any = YoutuForCausalLM(
        YoutuConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_attention_heads,
            kv_lora_rank=rank,
            q_lora_rank=None,
            qk_rope_head_dim=rope_dim,
            qk_nope_head_dim=2 * still,
            v_head_dim=head_dim,
            hidden_act=config.hidden_act,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_parameters=dict(config.rope_parameters),
            rope_interleave=False,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
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


def _why_not(llama: Any) -> str | None:
    """Return why a model cannot be rewritten, or None."""
    if not isinstance(llama, LlamaForCausalLM):
        return "only LlamaForCausalLM is known here"
    rope: Any = llama.config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        return f"its RoPE is {rope['rope_type']!r}, not 'default'"
    biases = [n for n, _ in llama.named_parameters() if n.endswith("_proj.bias")]
    return f"it has biases ({biases[0]})" if biases else None


def _bases(
    mixing: str | Sequence[torch.Tensor], layers: int, rank: int, seed: int
) -> list[torch.Tensor]:
    """Return the basis of each layer's latents, float64 [rank, rank], invertible, an axis a row."""
    if isinstance(mixing, str):
        if mixing == "none":
            return [torch.eye(rank, dtype=torch.float64)] * layers
        if mixing != "random":
            raise ValueError(f"mixing must be 'random', 'none' or bases, got {mixing!r}")
        generator = torch.Generator().manual_seed(seed)
        wild = torch.randn(layers, rank, rank, generator=generator, dtype=torch.float64)
        return list(torch.linalg.qr(wild)[0])
    bases = list(mixing)
    if len(bases) != layers or any(basis.shape != (rank, rank) for basis in bases):
        shapes = [list(basis.shape) for basis in bases[:1]]
        raise ValueError(
            f"mixing must be {layers} bases of [{rank}, {rank}], got {len(bases)} of {shapes}"
        )
    return bases


@torch.no_grad()
def principal_bases(mla: PreTrainedModel, token_ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the principal axes of each layer's latents on a text, strongest first: float64 [rank, rank], an axis a row.

    Args:
        mla: a fixture whose latents are not mixed.
        token_ids: [tokens], on its device.
    """
    return [axes for _, axes in _energies(mla, token_ids)]


def whitened_bases(
    mla: PreTrainedModel, token_ids: torch.Tensor, seed: int = 0
) -> list[torch.Tensor]:
    """Return bases in which all channels have the same energy on a text, and none stands out: the axes are scaled, then
    turned at random.

    Axes with less than a thousandth of the mean energy are scaled as if they had that much.

    Args and shapes are those of `principal_bases`; `seed` is that of the random bases.
    """
    bases = []
    found = _energies(mla, token_ids)
    turns = _bases("random", len(found), found[0][0].numel(), seed)
    for (energy, axes), turn in zip(found, turns, strict=True):
        scale = energy.clamp(min=1e-3 * energy.mean().item()).rsqrt()
        bases.append(turn.to(axes.device) @ (scale[:, None] * axes))
    return bases


def _energies(
    mla: PreTrainedModel, token_ids: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (mean energy [rank], principal axes [rank, rank]) of each layer's latents on a text, strongest first."""
    cache = DynamicCache(config=mla.config)
    mla(token_ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    found = []
    for layer in cache.layers:
        latents = layer.keys[0, 0].double()  # type: ignore[index, union-attr]
        energy, axes = torch.linalg.eigh(latents.T @ latents / len(latents))
        found.append((energy.flip(0), axes.T.flip(0)))
    return found


class LatentFixture(PackagedModel):
    """A Llama of the evaluation, measured in MLA form.

    Args:
        name, dtype, device: as those of LoadedModel.
        mixing: one of MIXINGS; "principal" and "whitened" find the axes on other text than the evaluation's.
        rank, still_planes: as those of `embed_in_mla`.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        *,
        mixing: str = "random",
        rank: int | None = None,
        still_planes: int | None = None,
    ) -> None:
        if mixing not in MIXINGS:
            raise ValueError(f"mixing must be one of {', '.join(MIXINGS)}, got {mixing!r}")
        self.mixing, self.rank, self.still_planes = mixing, rank, still_planes
        super().__init__(name, dtype, device)

    def prepared(self, model: Any) -> Any:
        """Return the checkpoint's model in MLA form."""
        sizes: Any = {"rank": self.rank, "still_planes": self.still_planes}
        if self.mixing not in ("principal", "whitened"):
            return embed_in_mla(model, mixing=self.mixing, **sizes)
        (ids,) = text_windows(self.tokenizer, BASIS_TEXT, BASIS_TOKENS, 1)
        plain = embed_in_mla(model, mixing="none", **sizes)
        find = principal_bases if self.mixing == "principal" else whitened_bases
        bases = find(plain, torch.tensor(ids, device=self.device))
        return embed_in_mla(model, mixing=bases, **sizes)

    @property
    def facts(self) -> dict[str, Any]:
        """What rows say about the fixture."""
        config = self.model.config
        return {
            "fixture": LABEL,
            "mixing": self.mixing,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_rope_head_dim": config.qk_rope_head_dim,
        }

    def reads(self, kind: CacheKind) -> str:
        """Return how scored tokens read a cache: "absorbed" (attention over latents) or "expanded" (over keys and values).

        A chunk of teacher forcing is a page at most, and long chunks expand; both compute the same but for rounding.
        """
        cache = kind.make(self.model.config, 0)
        if not isinstance(cache, PagedCache) or cache.options.mla == "expand":
            return "expanded"
        longest = longest_absorbed(self.model.model.layers[0].self_attn)
        return "absorbed" if cache.options.page_size <= longest else "expanded"
