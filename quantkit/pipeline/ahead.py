"""What the nodes of a cluster can do before there is a plan; it imports little, as time counts here."""

from __future__ import annotations

from quantkit.cluster import WIDTH, connect_ahead


def start_workers(address: str, threads: int | None, *, cards: bool = False) -> None:
    """Connect, have the workers of ``ray_tasks.RayTasks`` start, and load what any job needs; return at once.

    cards: those of nodes that have some may be used. Raises ResourceError if nothing answers.
    """
    connect_ahead(address, lambda c: c.prepare("quantkit.pipeline.ray_tasks:load", threads, WIDTH, cards=cards))
