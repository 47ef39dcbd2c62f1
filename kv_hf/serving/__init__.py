"""Serving many requests: continuous batching on the pages of caches, and transformers' server with them."""

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
