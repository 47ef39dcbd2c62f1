"""The cache of the package turboquant (PyPI, 0.2.0), as it is: a byte per code and a decoded copy beside the codes.

It quantizes a token once 128 newer ones are there. The bytes of its rows are what it holds, so that `turboquant.py`, the same
scheme in packed codes, is what its loss should be compared by.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from transformers import Cache

INSTALL = "pip install turboquant==0.2.0 'numpy<2.4' (it calls numpy.trapz, which later ones lack)"


def package_cache(bits: int) -> Callable[[Any, Mapping[str, Any]], Cache]:
    """Return what makes the package's TurboQuantCache; it takes no options.

    Raises: ImportError that says what to install, when a cache is made.
    """

    def make(config: Any, options: Mapping[str, Any]) -> Cache:
        if options:
            raise ValueError(
                f"turboquant_package_int{bits} takes no options, got {sorted(options)}"
            )
        if not hasattr(np, "trapz"):
            raise ImportError(f"numpy is {np.__version__}: {INSTALL}")
        try:
            from turboquant.cache import TurboQuantCache
        except ImportError as error:
            raise ImportError(f"{error}: {INSTALL}") from error
        cache: Cache = TurboQuantCache(bits=bits)
        return cache

    return make


CACHES = {f"turboquant_package_int{bits}": package_cache(bits) for bits in (4, 2)}
