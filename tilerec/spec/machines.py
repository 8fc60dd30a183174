"""GPUs that a topology can be made of by name: memory, and links of one GPU, one way.

From the makers' data sheets, not measured; what kernels reach of it is in `planner/cost/default_speeds.py`.

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
    """One GPU: bytes, and bytes per second.

    Args:
        memory: of the GPU. memory_bw: reads and writes of it.
        link_bw: to other GPUs of its host, one way. network_bw: of its own network card, one way.
        host_bw: to and from host memory (PCIe, one way).
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
