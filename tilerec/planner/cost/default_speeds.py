"""Default speeds of a machine without measurements, computed from a topology's bandwidths.

    seconds per row = bytes / (memory bandwidth x efficiency at that width)

Random rows reach a part of the bandwidth of large copies, and narrow rows a smaller part; the efficiencies below are
round numbers. On a CPU, the memory bandwidth is that of one rank, and links are copies between processes.
`tilerec calibrate` replaces all these numbers.

On a GPU, parts of tables are segments of one kernel, and replicas and column blocks cost kernel launches. A step has no
constant of its own there.
"""

from __future__ import annotations

from tilerec.spec.speeds import WIDTHS, Speeds
from tilerec.spec.topology import Topology

_EFFICIENCY = (0.25, 0.4, 0.6, 0.75, 0.85)  # part of the bandwidth that random rows of WIDTHS columns reach
_MIB = 2**20
_LAUNCH = 5e-6  # seconds to launch a kernel from Python; 3 to 10 µs were measured on the host of an H100


def default_speeds(topology: Topology) -> Speeds:
    """Return the speeds of `topology.compute_device`, from its bandwidths in bytes per millisecond."""
    cpu = topology.compute_device == "cpu"
    memory = 1000.0 * (topology.ddr_mem_bw if cpu else topology.hbm_mem_bw)
    if cpu:
        memory = memory / 8.0  # for one core; all cores share the memory
    cached = memory * (4.0 if cpu else 3.0)
    # Seconds per row, by width.
    far = tuple(4.0 * w / (memory * e) for w, e in zip(WIDTHS, _EFFICIENCY, strict=True))
    near = tuple(4.0 * w / (cached * e) for w, e in zip(WIDTHS, _EFFICIENCY, strict=True))
    stream = tuple(4.0 * w / memory for w in WIDTHS)
    link = 1.0 / (1000.0 * topology.intra_host_bw)
    network = 1.0 / (1000.0 * topology.inter_host_bw)
    per_id = 2e-8 if cpu else 2e-10
    if cpu:
        # Cores copy at both ends of a link.
        link = max(link, 1.0 / memory)
        network = max(network, 1.0 / memory)
    return Speeds(
        lookup_far=far,
        lookup_near=near,
        lookup_bag=stream,
        update_far=tuple(2.0 * s for s in far),
        update_near=tuple(2.0 * s for s in near),
        update_id=tuple(per_id + s for s in near),
        update_bag=stream,
        place=tuple(2.0 * s for s in stream),
        pick=tuple(2.0 * s for s in stream),
        route=per_id,
        copy=1.0 / memory,
        link_in=link,
        link_out=link,
        network_in=network,
        network_out=network,
        call=5e-4 if cpu else 3e-5,
        call_peer=2e-5 if cpu else 5e-7,
        step=1e-3 if cpu else 0.0,
        part=1e-5 if cpu else 1e-8,
        replica=1e-4 if cpu else 2 * _LAUNCH,
        row_sum=3e-4 if cpu else 2 * _LAUNCH,
        cache=(1 if cpu else 32) * _MIB,
        duplex=not cpu,
        origin=f"default for {topology.compute_device}, from bandwidths; not measured",
    )
