"""Models whose class knows no grouped kv heads, as another class that does and computes the same.

A route says of every tensor of the new class what it is made of; the new class, built without memory, says whether names
and shapes are right. What the new class would compute otherwise is refused.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConversionError
from .checkpoint import Checkpoint
from .gpt2_as_bigcode import bigcode_config, bigcode_tensors
from .heads import check_heads
from .names import Names, find_names
from .neox_as_phi import phi_config, phi_tensors
from .plan import Plan, Recipe, kept
from .structure import architecture, build, check_complete, shapes_of


@dataclass(frozen=True)
class Route:
    """The rules by which models of one class become models of another.

    Attributes:
        source, target: names of the classes.
        config: (old config, kv heads) -> new config.
        tensors: (old config, kv heads, method) -> name in the new class -> (names in the old one, what makes it).
        one: whether the new class knows all heads or one.
    """

    source: str
    target: str
    config: Callable[[Any, int], Any]
    tensors: Callable[[Any, int, str], dict[str, tuple[tuple[str, ...], Any]]]
    one: bool


CROSS_CLASS = {
    "gpt_neox": Route("GPTNeoXForCausalLM", "PhiForCausalLM", phi_config, phi_tensors, False),
    "gpt2": Route(
        "GPT2LMHeadModel", "GPTBigCodeForCausalLM", bigcode_config, bigcode_tensors, True
    ),
}


def plan_cross_class(
    checkpoint: Checkpoint, config: Any, num_kv_heads: int, method: str, dtype: torch.dtype | None
) -> Plan:
    """Return the plan of a conversion to another class; with as many kv heads as there are, nothing is merged.

    Raises: ConversionError where the other class would compute something else, with the reason.
    """
    route = CROSS_CLASS[config.model_type]
    own = architecture(config) or route.source
    if own != route.source:
        raise ConversionError(
            f"{own} has no grouped kv heads; of {config.model_type} models only {route.source} can be converted"
        )
    heads = config.num_attention_heads
    able = [n for n in range(1, heads + 1) if heads % n == 0]
    check_heads(
        heads,
        num_kv_heads,
        able=sorted({1, heads}) if route.one else able,
        why=f" ({route.target} with {heads} is the same model)",
    )
    new = route.config(config, num_kv_heads)
    shapes = shapes_of(build(new))
    old = build(config)
    names = find_names(old, checkpoint.tensors)
    check_complete(checkpoint, config, old, names)
    made = route.tensors(config, num_kv_heads, method)
    if config.tie_word_embeddings and "lm_head.weight" not in names.on_disk:
        made.pop("lm_head.weight")
        shapes.pop("lm_head.weight")
    if set(made) != set(shapes):
        raise AssertionError(f"{route.target}: {sorted(set(made) ^ set(shapes))}")
    check_all_used(checkpoint, names, made)
    recipes = {}
    for name, (sources, make) in made.items():
        on_disk = tuple(names.on_disk[source] for source in sources)
        first = checkpoint.tensors[on_disk[0]]
        recipes[name] = Recipe(first.file, shapes[name], kept(first.dtype, dtype), on_disk, make)
    per_head = 2 * 2 * config.num_hidden_layers * (config.hidden_size // heads)
    return Plan(
        {
            name: recipe
            for file in checkpoint.opened
            for name, recipe in recipes.items()
            if recipe.file == file
        },
        None,
        new_json(checkpoint, new),
        (heads, heads, num_kv_heads),
        (per_head * heads, per_head * num_kv_heads),
        route.target,
        num_kv_heads == heads,
        (class_note(route, num_kv_heads == heads),),
    )


def class_note(route: Route, exact: bool) -> str:
    """Return what to say about the class of the result."""
    if exact:
        return f"the result is a {route.target}, which computes the same as {route.source}"
    return f"the result is a {route.target}: {route.source} knows no grouped kv heads"


def check_all_used(checkpoint: Checkpoint, names: Names, made: dict[str, Any]) -> None:
    """Raise ConversionError unless the checkpoint has what is needed, and nothing that would be lost."""
    used = {source for sources, _ in made.values() for source in sources}
    missing = sorted(used - set(names.on_disk))
    if missing:
        raise ConversionError(f"{checkpoint.folder} lacks {missing[0]!r}")
    left = [name for own, name in names.on_disk.items() if own not in used]
    left += names.rebuilt + [name for name in names.unknown if name not in names.ignored]
    if left:
        raise ConversionError(f"{checkpoint.folder} holds {left[0]!r}, which would be lost")


def new_json(checkpoint: Checkpoint, config: Any) -> dict[str, Any]:
    """Return config.json of the new class, with the dtype and the tokenizer's class of the old one."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    for name in ("dtype", "torch_dtype", "tokenizer_class", "task_specific_params"):
        if name in checkpoint.config:
            found["dtype" if name == "torch_dtype" else name] = checkpoint.config[name]
    return found
