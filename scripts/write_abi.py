"""Write the C header of all that C and Python agree on: kv_hf's abi.py defines it. Rebuild the C kernel behind it."""

from pathlib import Path

from kv_hf.backends.cpu import abi

HEADER = Path(abi.__file__).parent / "native" / "abi.h"

if __name__ == "__main__":
    HEADER.write_text(abi.header(), encoding="utf-8")
    print(f"wrote {HEADER}")
