"""lm-eval's own command line with the model class `kv_hf`: python -m kv_hf.evaluation.harness --model kv_hf ..."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run lm-eval's command line; it learns of the model class `kv_hf` before it reads its arguments.

    Args:
        argv: arguments of `lm_eval`, those of this process when None; "--include" alone prints the path of the task
            file that `lm_eval --tasks` takes to know the class.
    Raises: ImportError with the remedy where lm-eval is not installed.
    """
    from .nltk_data import use_packaged_nltk
    from .register import include_file, register

    given = list(sys.argv[1:] if argv is None else argv)
    if given == ["--include"]:
        print(include_file())
        return
    register()
    use_packaged_nltk()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *given]
    cli_evaluate()


if __name__ == "__main__":
    main()
