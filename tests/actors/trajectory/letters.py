"""Conversations written with one token per letter."""

from __future__ import annotations

import numpy as np

from stillhouse.actors.trajectory.graph import Call, TokenGraph
from stillhouse.engines.base import Int32s
from stillhouse.protocol.messages import VersionSpan, WeightVersion

V1 = WeightVersion(1, 1)


def ids(text: str) -> Int32s:
    """One token per letter."""
    return np.array([ord(letter) for letter in text], np.int32)


def answer(graph: TokenGraph, prompt: str, response: str, **options: bool) -> Call:
    call = graph.begin(ids(prompt))
    write(graph, call, response)
    graph.end(call, **options)
    return call


def write(graph: TokenGraph, call: Call, response: str) -> None:
    n = len(response)
    graph.extend(call, ids(response), np.full(n, -1.0, np.float32), [VersionSpan(V1, 0, n)] if n else [])
