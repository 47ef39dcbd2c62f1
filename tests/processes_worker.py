"""What each of two processes does in test_distributed.py: `torchrun processes_worker.py <folder> <parallelism>`.

Reads the models that the test saved in <folder> and writes what came out into <folder>/<parallelism>_<rank>.pt. Any
warning of kv_hf (a dense path, for one) is an error here.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import left_padded, tokens
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import kv_hf

OPTIONS = {"do_sample": False, "return_dict_in_generate": True}


def load(folder: Path, parallelism: str = "none") -> Any:
    """Load the saved model, whole or a rank's part of it, by transformers' own means."""
    options: dict[str, Any] = {}
    if parallelism == "tensor" and "tp_plan" in DistributedConfig.__dataclass_fields__:
        options["distributed_config"] = DistributedConfig(tp_plan="auto")
    elif parallelism == "tensor":
        options["tp_plan"] = "auto"
    elif parallelism == "pipeline":
        options["distributed_config"] = DistributedConfig(pp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    model.generation_config.eos_token_id = None
    return model


def continued(model: Any, name: str, **options: Any) -> torch.Tensor:
    """Return what `model` makes of a padded batch: past two sealed pages in one row, past one in the other."""
    batch = left_padded([70, 30])
    options = {"max_new_tokens": 70, "cache_implementation": name, **OPTIONS, **options}
    return model.generate(**batch, **options).sequences


def tensor(folder: Path) -> dict[str, Any]:
    model = load(folder, "tensor")
    found = {name: continued(model, f"paged_{name}") for name in ("exact", "int4")}
    cache = kv_hf.PagedCache(model.config, keys="int4")
    model.generate(tokens(2, 70), past_key_values=cache, max_new_tokens=4, **OPTIONS)
    return {**found, "heads": [layer.spec.keys.num_kv_heads for layer in cache.paged_layers]}


def latent(folder: Path) -> dict[str, Any]:
    """A rank holds the heads of its part of kv_b_proj, and all latents."""
    found: dict[str, Any] = {}
    for family in ("deepseek_v2", "deepseek_v32"):
        model = load(folder / family, "tensor")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", kv_hf.KVCacheWarning)
            found[family] = continued(model, "paged_exact")
        found[f"{family} dynamic"] = continued(model, "dynamic")
        found[f"{family} said"] = [str(one.message) for one in caught]
        try:
            continued(model, "paged_exact", cache_config={"latent": {"decode": "absorb"}})
        except kv_hf.UnsupportedModelError as error:
            found[f"{family} error"] = str(error)
    return found


def pipeline(folder: Path) -> dict[str, Any]:
    model = load(folder, "pipeline")
    found = {name: continued(model, f"paged_{name}") for name in ("exact", "int4")}
    found["lookup"] = model.generate(
        tokens(1, 70), cache_implementation="paged_exact", prompt_lookup_num_tokens=3,
        max_new_tokens=70, **OPTIONS,
    ).sequences  # fmt: skip
    cache = kv_hf.PagedCache(model.config, keys="int4")
    model.generate(tokens(1, 80), past_key_values=cache, max_new_tokens=4, **OPTIONS)
    rows = [layer.residuals[0].tokens.shape[0] for layer in cache.layers]
    return {**found, "rows": rows, "lengths": [cache.get_seq_length(i) for i in range(len(rows))]}


def main() -> None:
    torch.set_num_threads(1)
    folder, name = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    warnings.simplefilter("error", kv_hf.KVCacheWarning)
    warnings.filterwarnings("ignore", "Paged attention runs as 'reference'")  # without C
    warnings.filterwarnings("ignore", "Keys and values of 2 bits", kv_hf.KVCacheWarning)
    found = globals()[name](folder)
    torch.save(found, folder / f"{name}_{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
