"""What `from_pretrained` takes: a hub id or a folder. Loads nothing and asks nobody."""

from pathlib import Path


def check_model_name(name: str) -> str:
    """Return a hub id or a folder as it is given.

    Raises: ValueError for what looks like a folder and is none, or is one without a model.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {name!r} is a folder without a config.json")
    elif (
        folder.is_absolute()
        or name.startswith((".", "~"))
        or (name.count("/") != 1 and "/" in name)
    ):
        raise ValueError(f"model {name!r}: there is no such folder")
    return name
