"""What `from_pretrained` takes: a hub id or a folder. Loads nothing."""

from ..hub import why_not_model


def check_model_name(name: str) -> str:
    """Return a hub id or a folder as it is given.

    Raises: ValueError for a folder that is not there or has no model, and for a name that the hub does not have.
    """
    reason = why_not_model(name)
    if reason is not None:
        raise ValueError(f"model {name!r}: {reason}")
    return name
