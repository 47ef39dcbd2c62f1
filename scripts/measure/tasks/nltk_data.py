"""NLTK's "punkt_tab" data, by which lm-eval's RULER generators split sentences, out of a package that carries it.

The package llama-index-core (0.14.25) holds the data; it is found and read, never imported.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


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
