"""GPU presets of `Topology.preset`: memory and one-way link bandwidth of one GPU.

The figures are from data sheets, not measured. `planner/cost/default_speeds.py` has the fractions that kernels reach.

    a100   NVIDIA A100 80 GB SXM data sheet (2,039 GB/s; NVLink 600 GB/s both ways); DGX A100: 8 cards of 200 Gb/s
    h100   NVIDIA H100 SXM data sheet (3.35 TB/s; NVLink 900 GB/s both ways); DGX H100: 8 cards of 400 Gb/s
    h200   NVIDIA H200 SXM data sheet (141 GB, 4.8 TB/s; NVLink 900 GB/s both ways); DGX H200: 8 cards of 400 Gb/s
    b200   NVIDIA DGX B200 data sheet (1,440 GB and 64 TB/s of 8; NVLink 14.4 TB/s of 8, both ways; 8 cards of 400 Gb/s)
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True)
class Machine:
    """Data-sheet figures of one GPU.

    Args:
        memory: bytes of GPU memory.
        memory_bw: bytes per second of reads and writes of GPU memory.
        link_bw: bytes per second to other GPUs of the host, one way.
        network_bw: bytes per second of the GPU's own network card, one way.
        host_bw: bytes per second to and from host memory (PCIe), one way.
    """

    memory: int
    memory_bw: float
    link_bw: float
    network_bw: float
    host_bw: float


MACHINES = {
    "a100": Machine(80 * GB, 2_039 * GB, 300 * GB, 25 * GB, 32 * GB),
    "h100": Machine(80 * GB, 3_350 * GB, 450 * GB, 50 * GB, 64 * GB),
    "h200": Machine(141 * GB, 4_800 * GB, 450 * GB, 50 * GB, 64 * GB),
    "b200": Machine(180 * GB, 8_000 * GB, 900 * GB, 50 * GB, 64 * GB),
}
