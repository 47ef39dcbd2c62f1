"""Write the measured tables of README.md from the newest rows of results/."""

import re
from pathlib import Path
from typing import Any

from kv_hf.evaluation.rows import read_rows
from kv_hf.formats import IMPLEMENTATIONS

# what the README says of its table
PROTOCOL = {"options": {}, "text": "lincoln_1862", "prompt": 512, "dtype": "float32"}
ROOT = Path(__file__).parent.parent
MODELS = {"smollm2-135m": "SmolLM2-135M", "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B"}


def newest(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """Return the last row whose fields have these values."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    return found[-1] if found else None


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    """Return mean KL and top-1 agreement per cache and model, with the default options."""
    head = ["cache", "bits (head_dim 64 / 128)"]
    for title in MODELS.values():
        head += [f"{title}: KL", "same top token"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name in IMPLEMENTATIONS:
        found = [newest(rows, model=model, cache=name, **PROTOCOL) for model in MODELS]
        if name == "paged_exact" or None in found:
            continue
        bits = " / ".join(f"{row['bits_per_element']:.2f}" for row in found if row)
        line = [f"`{name}`", bits]
        for row in found:
            assert row is not None
            line += [f"{row['kl_mean']:.5f}", f"{100 * row['top1']:.1f} %"]
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def demo_table(rows: list[dict[str, Any]]) -> str:
    """Return the memory and speed of the last recorded demo on the CPU."""
    head = ["cache", "KV MiB", "of DynamicCache", "prefill tokens/s", "decode tokens/s"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name in ("dynamic", *IMPLEMENTATIONS):
        row = newest(rows, cache=name, model="smollm2-135m", device="cpu")
        if row is not None:
            lines.append(
                [
                    f"`{name}`",
                    f"{row['kv_bytes'] / 2**20:.1f}",
                    f"{100 * row['kv_ratio']:.1f} %",
                    f"{row['prefill_tokens_per_s']:.0f}",
                    f"{row['decode_tokens_per_s']:.1f}",
                ]
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace_block(text: str, name: str, block: str) -> str:
    """Put `block` between the markers `<!-- name -->` and `<!-- /name -->`."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    return re.sub(pattern, lambda m: m[1] + block + "\n" + m[2], text, flags=re.DOTALL)


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text("utf-8")
    text = replace_block(
        text, "accuracy", accuracy_table(read_rows(ROOT / "results" / "accuracy.jsonl"))
    )
    text = replace_block(text, "demo", demo_table(read_rows(ROOT / "results" / "demo.jsonl")))
    readme.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
