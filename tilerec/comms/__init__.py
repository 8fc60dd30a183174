"""How ranks talk: groups, traffic, wire codecs."""

from tilerec.comms.group import Group, Handle, Pending
from tilerec.comms.traffic import Sent, Traffic

__all__ = ["Group", "Handle", "Pending", "Sent", "Traffic"]
