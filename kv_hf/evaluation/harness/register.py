"""Make the model class `kv_hf` known to lm-eval, which knows a closed list and looks for no entry points (0.4.13)."""

from pathlib import Path

from ...extras import extra

TARGET = "kv_hf.evaluation.harness.model:KVCacheLM"


def register() -> None:
    """Add the name `kv_hf` to lm-eval's registry; the class is loaded when it is asked for.

    Raises: ImportError with the remedy where lm-eval is not installed.
    """
    with extra("eval", "lm-eval's command line"):
        import lm_eval.models  # noqa: F401  (fills the registry, which must not be found half empty)
        from lm_eval.api.registry import model_registry
    if "kv_hf" not in model_registry:
        model_registry.register("kv_hf", target=TARGET)


def include_file() -> Path:
    """Return the task file that makes the command `lm_eval` itself know the class when it stands among --tasks."""
    return Path(__file__).with_name("kv_hf.yaml")
