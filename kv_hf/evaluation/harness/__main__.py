"""lm-eval's own command line with the model class `kv_hf`: python -m kv_hf.evaluation.harness --model kv_hf ..."""

import sys
from collections.abc import Sequence

from ...printable import tell_error


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf lm-eval") -> int:
    """Run lm-eval's command line; it learns of the model class `kv_hf` before it reads its arguments.

    Args:
        argv: arguments of `lm_eval`, those of this process when None; "--include" alone prints the path of the task
            file that `lm_eval --tasks` takes to know the class.
    Returns: 0, or 2 for an error that says its reason: bad arguments, a task, data or a package that is not there.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        _run(given)
    except (ValueError, ImportError, OSError) as error:
        tell_error(prog, error)
        return 2
    return 0


def _run(given: list[str]) -> None:
    from .nltk_data import use_packaged_nltk
    from .register import include_file, register

    if given == ["--include"]:
        print(include_file())
        return
    register()
    use_packaged_nltk()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *given]
    cli_evaluate()


if __name__ == "__main__":
    sys.exit(main())
