"""Register kv_hf with transformers as a whole: generate() and continuous batching; and take it back."""

from ..hf import install as generation
from . import batch_manager


def install() -> None:
    """Register the cache names and the attention; a second call changes nothing."""
    generation.install()
    batch_manager.install()


def uninstall() -> None:
    """Take the names back, unpatch transformers and give switched models their attention back."""
    batch_manager.uninstall()
    generation.uninstall()
