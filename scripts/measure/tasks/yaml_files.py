"""Task files as lm-eval reads them: YAML with `!function` tags. Knows no task."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kv_hf.files.writing import replace_text


class Function(str):
    """A function that lm-eval shall import: "package.module.name"."""


class _Dumper(yaml.SafeDumper):
    pass


def _function(dumper: yaml.SafeDumper, name: Function) -> yaml.ScalarNode:
    return dumper.represent_scalar("!function", str(name))


_Dumper.add_representer(Function, _function)


def write_task_files(folder: Path, configs: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Write one file per config into `folder`, which is made if need be; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, config in configs.items():
        path = folder / f"{name}.yaml"
        text = yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        replace_text(path, text)
        paths.append(path)
    return paths
