"""Memory and bandwidth of well-known devices, as their makers' data sheets print them.

GB of a data sheet are read as 10**9 bytes. Drivers give programs a little more or less than that (an H100 of 80 GB
reports 79.6 GiB, an L4 of 24 GB 22.5 GiB): what your driver says is better than these figures.
"""

from dataclasses import dataclass

from ..checks import check_choice

GB = 10**9


@dataclass(frozen=True)
class Device:
    """A device.

    Attributes:
        memory: bytes, None where it is what one buys.
        bandwidth: of that memory, in bytes per second, as the data sheet has it: no program gets all of it.
        source: the data sheet.
    """

    name: str
    memory: int | None
    bandwidth: int
    source: str


_LIST = (
    Device("b200", 180 * GB, 8_000 * GB, "NVIDIA DGX B200 data sheet, an eighth of 1,440 GB and 64 TB/s"),
    Device("h200", 141 * GB, 4_800 * GB, "NVIDIA H200 data sheet, SXM"),
    Device("h100", 80 * GB, 3_350 * GB, "NVIDIA H100 data sheet, SXM"),
    Device("h100-nvl", 94 * GB, 3_900 * GB, "NVIDIA H100 data sheet, NVL"),
    Device("h100-pcie", 80 * GB, 2_000 * GB, "NVIDIA H100 PCIe product brief"),
    Device("a100-80gb", 80 * GB, 2_039 * GB, "NVIDIA A100 data sheet, 80GB SXM"),
    Device("a100-40gb", 40 * GB, 1_555 * GB, "NVIDIA A100 data sheet, 40GB SXM"),
    Device("l40s", 48 * GB, 864 * GB, "NVIDIA L40S data sheet"),
    Device("l4", 24 * GB, 300 * GB, "NVIDIA L4 data sheet"),
    Device("a10", 24 * GB, 600 * GB, "NVIDIA A10 data sheet"),
    Device("v100-32gb", 32 * GB, 900 * GB, "NVIDIA V100 data sheet, SXM2"),
    Device("t4", 16 * GB, 320 * GB, "NVIDIA T4 data sheet"),
    Device("rtx5090", 32 * GB, 1_792 * GB, "NVIDIA RTX Blackwell architecture paper, RTX 5090"),
    Device("rtx4090", 24 * GB, 1_008 * GB, "NVIDIA Ada architecture paper, RTX 4090"),
    Device("rtx3090", 24 * GB, 936 * GB, "NVIDIA Ampere GA102 architecture paper, RTX 3090"),
    Device("mi300x", 192 * GB, 5_300 * GB, "AMD Instinct MI300X data sheet"),
    Device("m4-max", 128 * GB, 546 * GB, "Apple, MacBook Pro technical specifications, M4 Max with 40 GPU cores"),
    Device("m3-max", 128 * GB, 400 * GB, "Apple, MacBook Pro technical specifications, M3 Max with 40 GPU cores"),
    Device("m2-ultra", 192 * GB, 800 * GB, "Apple, Mac Studio technical specifications, M2 Ultra"),
    Device("cpu-ddr5-2ch", None, 89_600_000_000, "JEDEC DDR5-5600: 2 channels x 8 bytes x 5,600 MT/s"),
    Device("cpu-ddr5-12ch", None, 460_800_000_000, "AMD EPYC 9004 data sheet: 12 channels of DDR5-4800"),
)  # fmt: skip
DEVICES = {device.name: device for device in _LIST}


def find_device(name: str) -> Device:
    """Return the device called `name`, in any case. Raises CacheOptionError for a name that is not in DEVICES."""
    known = name.lower() if isinstance(name, str) else name
    check_choice("device", known, DEVICES)
    return DEVICES[known]
