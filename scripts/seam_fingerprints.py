"""Write the fingerprints of the installed transformers' seams into kv_hf/doctor/fingerprints.py.

Run it under each version of `kv_hf.doctor.seam_list.TESTED`, once the whole test suite has passed with it:

    python scripts/seam_fingerprints.py
"""

import argparse
from pathlib import Path

import transformers

from kv_hf.doctor import fingerprints
from kv_hf.doctor.seam_list import TESTED
from kv_hf.doctor.seams import known_of_installed

HEAD = '''"""Fingerprints of the seams in the tested versions; scripts/seam_fingerprints.py writes this file."""

KNOWN: dict[str, dict[str, str]] = {
'''


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    version = transformers.__version__
    if version not in TESTED:
        raise SystemExit(f"transformers {version} is not among the tested versions {TESTED}")
    lines = []
    for place, own in known_of_installed().items():
        if own is None:
            raise SystemExit(f"{place} has no source here")
        known = {**fingerprints.KNOWN.get(place, {}), version: own}
        lines.append(f'    "{place}": {{\n')
        lines += [f'        "{name}": "{known[name]}",\n' for name in TESTED if name in known]
        lines.append("    },\n")
    Path(fingerprints.__file__).write_text(HEAD + "".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
