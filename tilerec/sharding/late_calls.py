"""Order of calls in a graph: a call that waits runs right before its result is used.

begin, finish, view, dense 1, dense 2, cat      as traced
begin, dense 1, dense 2, finish, view, cat      after `run_late`: the messages travel while the dense part runs
"""

from __future__ import annotations

import operator

from torch.fx import Node


def run_late(call: Node) -> None:
    """Move a call, and views of its result, behind the work that needs neither, in its graph."""
    moved = {call: None}  # in the order of the graph
    at = call.next
    while at.op == "call_function":
        if any(used in moved for used in at.all_input_nodes):
            if not _is_view(at):
                break
            moved[at] = None
        at = at.next
    for node in moved:
        at.prepend(node)


def _is_view(node: Node) -> bool:
    target = node.target
    return target is operator.getitem or (bool(getattr(target, "is_view", False)))
