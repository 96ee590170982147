"""How often a cache of another size, or of another policy, would have held the experts that were asked for.

A route is asked for as a session asks: forward by forward, layer by layer, each distinct expert of a layer once, in ascending id.
The cache starts empty. Nothing is timed, so the figures are the same on every machine.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Requests:
    """What was asked for, in order.

    Attributes
        experts: one number for each layer and expert, layer * num_experts + expert.
        counted: how many of the last requests count for a hit rate; those before only fill the cache.
    """

    experts: list[int]
    counted: int

    @classmethod
    def of(cls, expert_ids: NDArray[np.integer], forward_tokens: Sequence[int], uncounted: int) -> Requests:
        """The requests of some tokens.

        Parameters
            expert_ids: integers [tokens, layers, top_k], at least 0.
            forward_tokens: how many tokens each forward fed, each at least 1; their sum is tokens.
            uncounted: forwards at the beginning that do not count, such as those of the prompt.
        """
        tokens, layers, _ = expert_ids.shape
        num_experts = int(expert_ids.max(initial=0)) + 1
        forward = np.repeat(np.arange(len(forward_tokens)), forward_tokens)
        row = forward[:, None] * layers + np.arange(layers)  # [tokens, layers]
        asked = np.unique(row[:, :, None] * num_experts + expert_ids)  # ascending: by forward, layer, expert
        counted = np.count_nonzero(asked >= uncounted * layers * num_experts)
        return cls((asked % (layers * num_experts)).tolist(), int(counted))


def lru(requests: Requests, slots: int) -> float | None:
    """Hit rate of a cache of `slots` experts that gives up the least recently used; None when nothing counts."""
    cache: OrderedDict[int, None] = OrderedDict()
    begin = len(requests.experts) - requests.counted
    hits = 0
    for position, expert in enumerate(requests.experts):
        if expert in cache:
            hits += position >= begin
            cache.move_to_end(expert)
        else:
            cache[expert] = None
            if len(cache) > slots:
                cache.popitem(last=False)
    return hits / requests.counted if requests.counted else None


def belady(requests: Requests, slots: int) -> float | None:
    """Hit rate of the optimum: the expert whose next use is furthest off goes first, or is not kept in the first place.

    Belady 1966 (A study of replacement algorithms for a virtual-storage computer), with bypass. No policy can do better. None when
    nothing counts.
    """
    experts = requests.experts
    begin, never = len(experts) - requests.counted, len(experts)
    next_use = [never] * len(experts)
    following: dict[int, int] = {}
    for position in range(len(experts) - 1, -1, -1):
        next_use[position] = following.get(experts[position], never)
        following[experts[position]] = position
    cache: dict[int, int] = {}  # when each is used next
    furthest: list[tuple[int, int]] = []  # heap by -next use; entries of experts that moved on are stale
    hits = 0
    for position, expert in enumerate(experts):
        if cache.pop(expert, None) is not None:
            hits += position >= begin
        if next_use[position] == never:
            continue
        cache[expert] = next_use[position]
        heapq.heappush(furthest, (-next_use[position], expert))
        while len(cache) > slots:
            use, victim = heapq.heappop(furthest)
            if cache.get(victim) == -use:
                del cache[victim]
    return hits / requests.counted if requests.counted else None
