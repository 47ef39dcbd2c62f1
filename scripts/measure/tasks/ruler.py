"""lm-eval's own RULER generators without a network, and at lengths below their 4096 tokens."""

from pathlib import Path
from typing import Any

from measure.tasks.yaml_files import Function

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
