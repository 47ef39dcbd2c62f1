"""Packages that only some features need, and which extra of kv_hf brings them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, needs: str) -> Iterator[None]:
    """Say which extra to install where an import inside of the block finds a package missing.

        with extra("eval", "the report"):
            import matplotlib

    Args:
        name: the extra, as in `pip install -e '.[name]'`.
        needs: the feature that needs the package.
    Raises: ImportError naming feature, package and remedy.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "kv_hf").partition(".")[
            0
        ] == "kv_hf":  # a fault of ours, no missing package
            raise
        raise ImportError(
            f"{needs} needs {error.name}: pip install -e '.[{name}]' in the clone", name=error.name
        ) from error
