"""Reads a trace as ui.perfetto.dev does, and says everything that is wrong with it. Imports nothing of the project."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def load(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


def faults(trace: dict[str, Any]) -> list[str]:
    """Everything that a viewer would show wrongly, or not at all."""
    events: list[Event] = trace["traceEvents"]
    found: list[str] = []
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    flows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] not in ("X", "C", "M", "i", "s", "f"):
            found.append(f"an event of kind {event['ph']}")
        if event["pid"] not in processes:
            found.append(f"process {event['pid']} has no name")
        if event["ph"] != "M" and not (math.isfinite(event["ts"]) and event["ts"] >= 0):
            found.append(f"time {event['ts']}")
        if event["ph"] in "Xsf" and (event["pid"], event["tid"]) not in tracks:
            found.append(f"track {event['pid']}, {event['tid']} has no name")
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
        elif event["ph"] == "C" and not all(isinstance(value, (int, float)) for value in event["args"].values()):
            found.append(f"counter {event['name']}: {event['args']}")
    for track, own in slices.items():
        found += _not_nested(track, own)
    for number, ends in flows.items():
        found += _loose(number, ends, slices)
    return found


def _not_nested(track: tuple[int, int], slices: list[Event]) -> list[str]:
    """Slices of a track in file order must begin one after the other, and each must end inside of those around it."""
    found: list[str] = []
    around: list[float] = []
    before = -1.0
    for event in slices:
        begin, end = event["ts"], event["ts"] + event["dur"]
        if begin < before:
            found.append(f"{track}: {event['name']} at {begin} comes after {before}")
        if event["dur"] < 0:
            found.append(f"{track}: {event['name']} lasts {event['dur']}")
        before = begin
        while around and around[-1] <= begin:
            around.pop()
        if around and end > around[-1] + 0.002:  # times are rounded to a nanosecond
            found.append(f"{track}: {event['name']} [{begin}, {end}] overlaps one that ends at {around[-1]}")
        around.append(end)
    return found


def _loose(number: int, ends: list[Event], slices: dict[tuple[int, int], list[Event]]) -> list[str]:
    found: list[str] = []
    if [end["ph"] for end in ends] != ["s", "f"]:
        return [f"arrow {number} has {[end['ph'] for end in ends]}"]
    if ends[0]["ts"] > ends[1]["ts"]:
        found.append(f"arrow {number} ({ends[0]['name']}) goes back")
    for end in ends:
        own = slices.get((end["pid"], end["tid"]), [])
        if not any(one["ts"] - 0.002 <= end["ts"] <= one["ts"] + one["dur"] + 0.002 for one in own):
            found.append(f"arrow {number} ({end['name']}) is at no slice")
    return found
