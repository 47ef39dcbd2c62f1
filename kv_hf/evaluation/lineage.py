"""What a row says of a model's kv heads: how many, and how the checkpoint came to have them."""

from typing import Any

from ..records import CONVERSION, UPTRAINING
from .cache_bytes import LayerShape


def lineage(config: Any, shapes: list[LayerShape]) -> dict[str, Any]:
    """Return the fields of a row.

    Returns: "kv_heads" where all layers with keys have as many; of a checkpoint that `convert_to_gqa` wrote "conversion" (its method) and
        "kv_heads_before", those of the model that all began with; of a trained one "uptrained_tokens".
    """
    found: dict[str, Any] = {}
    heads = {shape[0] for shape in shapes if shape is not None}
    if len(heads) == 1:
        found["kv_heads"] = heads.pop()
    record = getattr(config, CONVERSION, None)
    if record:
        found["conversion"] = record["method"]
        while record.get("before"):
            record = record["before"]
        found["kv_heads_before"] = record["num_key_value_heads"][0]
    trained = getattr(config, UPTRAINING, None)
    if trained:
        found["uptrained_tokens"] = trained["tokens"]
    return found
