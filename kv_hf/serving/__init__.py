"""Serving many requests: continuous batching on the pages of caches, and transformers' server with them."""

from ..hf import install as generation
from .batch_manager import PATCHES

uninstall = generation.uninstall


def install() -> None:
    """Register the cache names and the attention; a second call changes nothing."""
    generation.install(PATCHES)
