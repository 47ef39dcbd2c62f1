"""lm-eval's own RULER generators without a network, and at lengths below their 4096 tokens.

They split text into sentences by NLTK's "punkt_tab" data, which the package llama-index-core carries.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .yaml_files import Function

NLTK_PACKAGE = "llama-index-core==0.14.25"
# at 512 tokens and less some of the generators do not end
# our name -> the shipped task file, tokens to generate; those that need neither the hub nor an essay
RULER = {
    "niah_single_1": ("niah_single_1.yaml", 32),
    "niah_multikey_2": ("niah_multikey_2.yaml", 32),
    "niah_multikey_3": ("niah_multikey_3.yaml", 64),
    "ruler_vt": ("vt.yaml", 30),
    "ruler_fwe": ("fwe.yaml", 50),
}
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def packaged_nltk() -> Path | None:
    """Return the folder of NLTK data inside llama-index-core, or None where that is not installed."""
    spec = find_spec("llama_index")
    for parent in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(parent) / "core" / "_static" / "nltk_cache"
        if (folder / "tokenizers" / "punkt_tab").is_dir():
            return folder
    return None


def use_packaged_nltk(folder: Path | None = None) -> bool:
    """Let NLTK find its data in `folder`, or in llama-index-core; say whether there is any. Not in place of NLTK_DATA."""
    found = packaged_nltk() if folder is None else folder
    if found is None:
        return "NLTK_DATA" in os.environ
    os.environ.setdefault("NLTK_DATA", str(found))
    nltk = sys.modules.get("nltk")
    if nltk is not None and str(found) not in nltk.data.path:
        nltk.data.path.append(str(found))
    return True


def ruler_configs(shipped: Path, tag: str) -> dict[str, dict[str, Any]]:
    """Return task configs with metrics for shorter lengths.

    Args:
        shipped: lm-eval's folder of tasks.
        tag: tag of all tasks.
    """
    configs = {}
    for name, (file, tokens) in RULER.items():
        configs[f"{name}_offline"] = {
            "include": str(shipped / "ruler" / file),
            "task": f"{name}_offline",
            "tag": [tag],
            "metric_list": [
                {
                    "metric": str(length),
                    "aggregation": Function("lm_eval.tasks.ruler.common_utils.aggregate_metrics"),
                    "higher_is_better": True,
                }
                for length in LENGTHS
            ],
            "generation_kwargs": {
                "do_sample": False,
                "temperature": 0.0,
                "max_gen_toks": tokens,
                "until": [],
            },
            # lengths of the prompts that are made; --metadata '{"max_seq_lengths": [2048, 4096]}' asks for others
            "metadata": {"version": 1.0, "max_seq_lengths": [1024]},
        }
    return configs
