"""A conversion in a process of its own: python gqa_worker.py SOURCE DESTINATION KV_HEADS [bytes of data it may use]."""

import resource
import sys

import torch

import kv_hf
from kv_hf.gqa import convert, cross_class  # noqa: F401  (imports count before the limit)


def now() -> tuple[int, int]:
    """Return (bytes of data, peak of bytes resident) of this process."""
    with open("/proc/self/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return tuple(int(found[name].split()[0]) * 1024 for name in ("VmData", "VmHWM"))


def main() -> None:
    source, destination, kv_heads, *limit = sys.argv[1:]
    kv_hf.convert_to_gqa(
        source, destination, int(kv_heads), dry_run=True
    )  # allocators and modules are there
    data, peak = now()
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (data + int(limit[0]),) * 2)
    kv_hf.convert_to_gqa(source, destination, int(kv_heads))
    growth = now()[1] - peak
    try:
        torch.ones(int(limit[0]) if limit else 0, dtype=torch.uint8)
    except RuntimeError:
        print("no memory for as much again")
    print(growth)


if __name__ == "__main__":
    main()
