"""Finds in the source of a program communication hooks of DDP that send only the largest gradients.

    def largest_only(state, bucket):
        where = bucket.buffer().abs().topk(count).indices
        dist.all_gather(all_where, where)
    model.register_comm_hook(state, largest_only)

Between the ranks of one node memory is faster than the choice.
"""

from __future__ import annotations

import ast

from gpulaunch.profiler.samplers.loops import calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import nodes_of


def lines_of_compression(tree: ast.Module) -> dict[int, int]:
    """Return the lines of such hooks, and the line on which each is registered.

    Args:
        tree: of a file.
    """
    hooks = {node.name: node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef)}
    found: dict[int, int] = {}
    for call in calls_in(tree):
        match call:
            case ast.Call(func=ast.Attribute(attr="register_comm_hook"), args=[_, ast.Name(id=name)]) if name in hooks:
                if _sends_the_largest(hooks[name]):
                    found.update(dict.fromkeys(lines_of(hooks[name]), call.lineno))
            case _:
                pass
    return found


def _sends_the_largest(hook: ast.FunctionDef) -> bool:
    """Whether a hook gathers what `topk` chooses, and reduces nothing: one that clips or votes is no compression."""
    names = {last_name(call).lower() for call in calls_in(hook)}
    return "topk" in names and any("all_gather" in name for name in names) and not any("reduce" in n for n in names)
