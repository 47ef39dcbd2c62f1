"""Multi-head latent attention (MLA) over pages of latents: absorbed where it pays, expanded elsewhere.

transformers (from 5.15 on) caches latents and calls `module.expand_kv(latent, k_rope)` on all of them in every forward,
which multiplies the whole history by kv_b_proj. Here handles pass through `expand_kv` as they are, and a decode step
attends to the latents themselves: the key half of kv_b_proj is multiplied into the query, the value half into the
result (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). In a forward of continuous batching, which has no cache in front of
`expand_kv`, new latents pass through as well, and attention stores them. Read in transformers 5.17 to 5.24, where all
models share one `expand_kv`; attention is recognised by that method and the sizes beside it, not by the model's name. An
`expand_kv` of somebody else's is called as it is.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.modules import module as modules
from transformers import PreTrainedModel

from ..bridge.handles import view_of
from ..cache.layer_kinds import before_latents
from ..cache.model_shape import attention_config
from ..config import CacheConfig
from ..errors import UnsupportedModelError
from ..notices import warn_once
from .models import takes_handles, why_not_pages

_SIZES = ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_originals: dict[type, Callable[..., Any]] = {}
# whether new latents pass through `expand_kv` as handles do: in a forward of this thread whose attention stores them itself
_passing_new: ContextVar[bool] = ContextVar("kv_hf_passing_new_latents", default=False)


def is_latent_attention(module: torch.nn.Module) -> bool:
    """Say whether `module` is an attention layer that expands cached latents itself."""
    return callable(getattr(type(module), "expand_kv", None)) and all(
        isinstance(getattr(module, size, None), int) for size in _SIZES
    )


def watch_latents() -> None:
    """Change the classes of each model whose latents a cache begins to store."""
    before_latents[:] = [hand_latents_through]


def hand_latents_through(config: Any) -> None:
    """Let the attention classes of a config's family pass handles of latents through `expand_kv`; other tensors are expanded as before.

    A class is changed once, for all of its modules: copies and pickles of a model know nothing of it.
    """
    for kind in _expanding(type(config)):
        if kind not in _originals:  # of two threads, both patch the same function
            original = _originals.setdefault(kind, vars(kind)["expand_kv"])
            kind.expand_kv = _passing_handles(original)  # type: ignore[attr-defined]


def _expanding(config_class: type) -> tuple[type, ...]:
    """Return the classes of transformers that define `expand_kv` beside the models of a config's class."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    if not name.startswith("transformers.models.") or name not in sys.modules:
        return ()
    kinds = (kind for kind in vars(sys.modules[name]).values() if isinstance(kind, type))
    return tuple(kind for kind in kinds if "expand_kv" in vars(kind))


def _definer(module: torch.nn.Module) -> type:
    """Return the class that defines the `expand_kv` of `module`."""
    return next(one for one in type(module).__mro__ if "expand_kv" in vars(one))


def _why_expansion_is_foreign(module: torch.nn.Module) -> str | None:
    """Return why `expand_kv` may compute something else than transformers' own, or None."""
    if "expand_kv" in vars(module):
        return "its expand_kv was replaced"
    kind = _definer(module)
    if not vars(kind)["expand_kv"].__module__.startswith("transformers."):
        return f"its expand_kv is that of {kind.__name__}, not transformers' own"
    return None


def foreign_expansion(model: torch.nn.Module) -> str | None:
    """Return why some `expand_kv` of `model` may compute something else than transformers' own, or None."""
    found = filter(is_latent_attention, model.modules())
    return next(filter(None, map(_why_expansion_is_foreign, found)), None)


def _passing_handles(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def expand_kv(
        self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        view = view_of(kv_nope, k_rot)
        if (
            (_passes_new() if view is None else view.kv.spec.is_latent)
            and takes_handles(self.config._attn_implementation, type(self))
            and not _why_expansion_is_foreign(self)  # an override that calls this one
        ):
            return kv_nope, k_rot
        return original(self, kv_nope, k_rot, *args, **kwargs)

    return expand_kv


def _passes_new() -> bool:
    """Say whether new latents shall pass; never in a compiled forward, which would keep the answer."""
    return not torch.compiler.is_dynamo_compiling() and _passing_new.get()


@contextmanager
def passing_new_latents(passing: bool = True) -> Iterator[None]:
    """Return a context in which `expand_kv` hands latents through that are no handles (continuous batching), or expands them."""
    before = _passing_new.set(passing)
    try:
        yield
    finally:
        _passing_new.reset(before)


def expanded(
    module: Any, latents: torch.Tensor, rope_keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of all heads of `module`, as the model computes them.

    Args:
        latents: [batch, 1, tokens, kv_lora_rank]; rope_keys: [batch, 1, tokens, rope channels].
    """
    with passing_new_latents(False):
        keys, values = module.expand_kv(latents, rope_keys)
    return keys, values


def restore_expansion() -> None:
    """Give all classes their own `expand_kv` back, and change no others."""
    before_latents.clear()
    for kind, original in _originals.items():
        kind.expand_kv = original  # type: ignore[attr-defined]
    _originals.clear()


def why_not_absorbed(module: torch.nn.Module) -> str | None:
    """Return why the weights of `module` cannot be multiplied into queries and results, or None when they can."""
    foreign = _why_expansion_is_foreign(module)
    if foreign:
        return foreign
    projection: Any = getattr(module, "kv_b_proj", None)
    name = type(projection).__name__
    if hasattr(projection, "base_layer"):
        return f"kv_b_proj is wrapped by an adapter ({name}); merge it into the weights"
    weight: Any = getattr(projection, "weight", None)
    heads = module.qk_nope_head_dim + module.v_head_dim  # type: ignore[operator]
    plain = (
        type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.dtype in _FLOATS
        and weight.shape[1:] == (module.kv_lora_rank,)
        and not weight.shape[0] % heads
        and type(projection).forward is torch.nn.Linear.forward
        and projection.bias is None
    )
    if not plain:
        kept = f" of {weight.dtype}" if isinstance(weight, torch.Tensor) else ""
        return f"kv_b_proj ({name}{kept}) is no torch.nn.Linear of whole heads without a bias: it may be quantized, or sharded"
    if weight.is_meta:
        return "the weight of kv_b_proj is offloaded"
    if projection._forward_hooks or projection._forward_pre_hooks:
        return "kv_b_proj has forward hooks"
    if modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return "there are forward hooks of all modules"
    if "forward" in vars(projection):
        # accelerate's hooks of models on several devices move the inputs and nothing else
        hook = getattr(projection, "_hf_hook", None)
        hooks = getattr(hook, "hooks", [hook])
        if any(type(one).__name__ != "AlignDevicesHook" for one in hooks):
            return "the forward of kv_b_proj was replaced"
    return None


def prepare_latents(model: PreTrainedModel, options: CacheConfig) -> None:
    """Prepare the latent attention of `model`.

    Raises: UnsupportedModelError where the option latent={"decode": "absorb"} asks for what cannot be done.
    """
    found = {name: module for name, module in model.named_modules() if is_latent_attention(module)}
    if options.latent_decode == "absorb":
        reason = why_not_pages(model)
        if reason is None and not found:
            reason = "its attention has no expand_kv in this version of transformers"
        if reason:
            raise UnsupportedModelError(
                f"latent['decode']='absorb': {type(model).__name__} cannot read pages of latents: {reason}"
            )
        for name, module in found.items():
            reason = why_not_absorbed(module)
            if reason:
                raise UnsupportedModelError(
                    f"latent['decode']='absorb': {name} cannot be absorbed: {reason}"
                )
    hand_latents_through(attention_config(model.config))


def longest_absorbed(module: Any) -> int:
    """Return the queries up to which attending to latents takes fewer multiplications than expanding them.

    Per cached token and head, expansion takes r * (dn + dv) and attention S * (dn + dv) for S queries; absorbed attention
    takes S * 2r. RoPE keys cost the same on both sides.
    """
    rank, expanded_dims = module.kv_lora_rank, module.qk_nope_head_dim + module.v_head_dim
    saved = 2 * rank - expanded_dims
    return int(rank * expanded_dims // saved) if saved > 0 else 1 << 30


def absorbs(module: torch.nn.Module, decode: str, query: torch.Tensor) -> bool:
    """Decide whether this forward attends to latents; say once why not where its length is no reason.

    Args:
        decode: CacheConfig.latent_decode.
        query: [batch, num_heads, q_len, channels].
    Raises: UnsupportedModelError where it is "absorb" and the module does not allow it.
    """
    if decode == "expand":
        return False
    reason = why_not_absorbed(module)
    weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    if reason is None and weight is not None:
        heads = weight.shape[0] // (module.qk_nope_head_dim + module.v_head_dim)  # type: ignore[operator]
        if heads != query.shape[1]:
            reason = f"kv_b_proj has {heads} heads and the queries {query.shape[1]}"
        elif weight.device != query.device:
            reason = f"the weight of kv_b_proj is on {weight.device}, the queries on {query.device}"
    if reason is None:
        return query.shape[2] <= longest_absorbed(module)
    if decode == "absorb":
        raise UnsupportedModelError(
            f"latent['decode']='absorb': {type(module).__name__} cannot be absorbed: {reason}"
        )
    warn_once(
        f"absorb {type(module).__name__} {reason}",
        f"{type(module).__name__} cannot attend to latents: {reason}. Each step computes the keys and values of all cached "
        "tokens, as transformers does",
    )
    return False


def shrink_of(query: torch.Tensor) -> float:
    """Return the factor of an absorbed query [.., channels]: it keeps products with weights within the range of float16."""
    return 2.0**-8 if query.dtype == torch.float16 else 1.0


def absorbed_query(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Multiply the key half of kv_b_proj into a query.

    Args:
        query: [batch, num_heads, q_len, qk_nope_head_dim + rope channels].
    Returns: [batch, num_heads, q_len, kv_lora_rank + rope channels], in query's dtype, times `shrink_of`.
    """
    shrink = shrink_of(query)
    query = query if shrink == 1 else query * shrink
    nope = module.qk_nope_head_dim
    keys, _ = _halves(module, query)
    latent = torch.einsum("bhsd,hdr->bhsr", query[..., :nope], keys)
    return torch.cat([latent.to(query.dtype), query[..., nope:]], -1)


def from_latent(module: Any, out: torch.Tensor) -> torch.Tensor:
    """Multiply the value half of kv_b_proj into attended latents.

    Args:
        out: [batch, num_heads, q_len, kv_lora_rank].
    Returns: [batch, q_len, num_heads, v_head_dim], in out's dtype.
    """
    _, values = _halves(module, out)
    # the weights stand first as they lie in memory: for 16-bit numbers on a CPU torch copies them in any other order
    rows, heads, q_len, rank = out.shape
    columns = out.transpose(0, 1).reshape(heads, rows * q_len, rank).transpose(1, 2)
    product = torch.bmm(values, columns).to(out.dtype)  # [heads, v_head_dim, rows * q_len]
    return product.unflatten(2, (rows, q_len)).permute(2, 3, 0, 1).contiguous()


def _halves(module: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return kv_b_proj as [heads, qk_nope_head_dim, rank] for keys and [heads, v_head_dim, rank] for values: views."""
    nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
    weight = module.kv_b_proj.weight.to(like.dtype).view(-1, nope + module.v_head_dim, rank)
    return weight[:, :nope], weight[:, nope:]
