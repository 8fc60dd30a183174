"""Communication between ranks: groups, traffic counters, wire codecs."""

from tilerec.comms.agreement import agree
from tilerec.comms.codec import CODECS, Codec, codec, register_codec
from tilerec.comms.group import Group, Handle, Pending
from tilerec.comms.mesh import group_of, within_host
from tilerec.comms.process import ProcessGroupComms
from tilerec.comms.threads import ThreadGroup, ThreadWorld
from tilerec.comms.traffic import Sent, Traffic

__all__ = [
    "CODECS",
    "Codec",
    "Group",
    "Handle",
    "Pending",
    "ProcessGroupComms",
    "Sent",
    "ThreadGroup",
    "ThreadWorld",
    "Traffic",
    "agree",
    "codec",
    "group_of",
    "register_codec",
    "within_host",
]
