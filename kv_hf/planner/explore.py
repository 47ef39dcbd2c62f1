"""`kv-hf explore`: the plan of a model as a page in the browser, with a curve of bytes for each cache."""

import argparse
from collections.abc import Sequence
from typing import Any

from ..errors import KVCacheError
from ..printable import printable, tell_error
from .devices import DEVICES
from .memory_plan import plan
from .plan_table import Plan, plain_table
from .source import preset_names

HOST = "127.0.0.1"
CACHES = ["dynamic", "paged_exact", "paged_int8", "paged_int4", "paged_int2"]
FIRST_MODEL, FIRST_DEVICE = "llama-3.1-8b", "rtx4090"
LEAST_CONTEXT, MOST_CONTEXT = 10, 20  # powers of two
TABLE_WIDTH = 112  # characters
GIB = 2**30


def planned(
    model: str, caches: Sequence[str], batch: float, power: float, device: str, degree: float
) -> Plan:
    """Return the plan that the controls ask for; `power` is the context's binary logarithm."""
    load: Any = {"batch": int(batch), "context": 2 ** int(power), "tensor_parallel": int(degree)}
    return plan(model.strip(), caches=list(caches) or ["dynamic"], device=device or None, **load)


def curves(found: Plan) -> tuple[list[int], dict[str, list[float]]]:
    """Return contexts, and for each cache of a plan its GiB on the device at each of them."""
    contexts = [2**power for power in range(LEAST_CONTEXT, MOST_CONTEXT + 1, 2)]
    names = [row.cache for row in found.rows]
    same: Any = {"batch": found.batch, "tensor_parallel": found.tensor_parallel, "caches": names}
    rows = [plan(found.inventory, context=context, **same).rows for context in contexts]
    totals = {name: [row[i].total / GIB for row in rows] for i, name in enumerate(names)}
    return contexts, totals


def figure(found: Plan) -> Any:
    """Draw the caches' bytes against the context, and the memory that the weights leave."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 4.5), layout="constrained")
    axes = drawn.add_subplot()
    contexts, totals = curves(found)
    for name, sizes in totals.items():
        axes.plot(contexts, sizes, label=name)
    if found.available is not None:
        left = f"{found.device}: left beside the weights"
        axes.axhline(found.available / GIB, color="black", linestyle="--", label=left)
    axes.axvline(found.context, color="grey", linewidth=0.8)
    axes.set(xlabel=f"tokens of each of {found.batch:,} rows", ylabel="GiB of cache")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn


def build(models: Sequence[str]) -> Any:
    """Return the Gradio app; `models` are offered first."""
    import gradio as gr

    def show(*given: Any) -> tuple[Any, str]:
        try:
            found = planned(*given)
            return figure(found), f"```\n{plain_table(found, TABLE_WIDTH)}\n```"
        except KVCacheError as error:
            raise gr.Error(printable(str(error))) from None

    names = [*models, *(name for name in preset_names() if name not in models)]
    first, own = (models or [FIRST_MODEL])[0], {"allow_custom_value": True}
    powers = (LEAST_CONTEXT, MOST_CONTEXT)
    with gr.Blocks(title="KV memory planner", analytics_enabled=False) as app:
        gr.Markdown(
            "# KV memory planner\nWhat caches take, what fits, how fast memory lets decode."
        )
        with gr.Row():
            with gr.Column(scale=1):
                controls = [
                    gr.Dropdown(names, value=first, label="Model: preset, hub id, folder", **own),
                    gr.Dropdown(CACHES, value=CACHES, multiselect=True, label="Caches", **own),
                    gr.Slider(1, 256, value=1, step=1, label="Batch (rows)"),
                    gr.Slider(*powers, value=13, step=1, label="Context (power of two)"),
                    gr.Dropdown(["", *DEVICES], value=FIRST_DEVICE, label="Device"),
                    gr.Slider(1, 8, value=1, step=1, label="Tensor parallel devices"),
                ]
            with gr.Column(scale=3):
                outputs = [gr.Plot(show_label=False), gr.Markdown()]
        triggers = [app.load, *(control.change for control in controls)]
        gr.on(triggers, show, controls, outputs, trigger_mode="always_last")
    return app


def serve_page(args: argparse.Namespace, prog: str) -> int:
    """Serve the page; return the exit code: 0, or 2 where a package is missing or the port is taken.

    Args:
        args: of `kv-hf explore`, as kv_hf_cli.py reads them.
        prog: what errors begin with.
    """
    try:
        build(args.model).launch(server_name=HOST, server_port=args.port)
    except ModuleNotFoundError as error:
        tell_error(
            prog, ImportError(f"{error.name} is missing: pip install -e '.[ui]' in the clone")
        )
        return 2
    except OSError as error:  # the port is taken
        tell_error(prog, error)
        return 2
    return 0
