"""Puts the files of events of a run's processes (tracing.events) into one trace that https://ui.perfetto.dev opens.

The result is JSON in Chrome's trace-event format, one event per line, and compressed if its name ends in .gz. A process
of the run is a process there, named after its worker, and a track is a thread. The arrows

    segment sent -> teacher scores it -> step that trains it          broadcast of a version -> each engine's swap

are made here: the events only say which tokens of which rollout they were about.

Files are read one by one, twice: for the arrows and clocks, then for the events. So the memory that this takes is that
of one file and of the arrows."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import msgspec

from stillhouse.launch.errors import LaunchError
from stillhouse.tools.trace.clocks import Arrow, Offset, offsets
from stillhouse.tracing.events import FOLDER, TraceHeader

ROLES: Final = ("learner", "buffer", "teacher", "actor")
"""In the order in which they are shown."""
JOINED: Final = "joined"
"""Folder of the run folder that has a folder of each launcher that joined."""


class SlicePlace(NamedTuple):
    """A slice that an arrow begins or ends at."""

    process: int
    track: str
    began_ns: int
    ended_ns: int


class TokenRange(NamedTuple):
    """Tokens [start, end) of a rollout, and the slice that was about them."""

    start: int
    end: int
    place: SlicePlace


class TraceSource(NamedTuple):
    """One file of events."""

    path: Path
    header: TraceHeader
    ordinal: int
    """1 for a worker's first process, 2 for the one after a restart."""


class LostEvents(msgspec.Struct, kw_only=True):
    """What the trace lacks, over all files."""

    dropped: int = 0
    """Events that found no room in their file, or on the disk."""
    torn: int = 0
    """Lines that a killed process left unfinished."""
    damaged: int = 0
    """Other lines that cannot be read."""
    files: int = 0
    """Files without a header that can be read."""


class WrittenTrace(NamedTuple):
    """What was written."""

    path: Path
    events: int
    arrows: int
    lost: LostEvents
    clocks: tuple[str, ...]
    """About the clocks of other machines."""


def merge(run: Path, out: Path) -> WrittenTrace:
    """Write the trace of the run in folder `run`. Raises LaunchError when it has no events, and OSError."""
    lost = LostEvents()
    sources = find_sources(run, lost)
    if not sources:
        raise LaunchError(
            f"{run / FOLDER} has no events; start a run with --trace FILE (launch.trace) to have them written"
        )
    arrows = _Arrows()
    for process, source in enumerate(sources):
        arrows.read(process, _events(source.path, lost))
    links = list(arrows.links())
    moved = _offsets(sources, links)
    home_ns = min(source.header.monotonic_ns + moved[source.header.boot].ns for source in sources)
    draft = out.with_name(f".{out.name}.part")
    try:
        with _open(draft, packed=out.name.endswith(".gz")) as file:
            writer = _Writer(file, sources, {boot: one.ns - home_ns for boot, one in moved.items()})
            for process, source in enumerate(sources):
                writer.process(process, _events(source.path, LostEvents()))
            writer.links(links)
            home = sources[0].header.boot
            said = tuple(one.said(_host(sources, boot)) for boot, one in moved.items() if boot != home)
            writer.close({"lost": msgspec.to_builtins(lost), "clocks": said})
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    return WrittenTrace(out, writer.events, len(links), lost, said)


def find_sources(run: Path, lost: LostEvents) -> list[TraceSource]:
    """The files of a run, of all its processes and launches, and of those that joined it on a machine that sees the
    run folder."""
    paths = [*run.glob(f"{FOLDER}/*.jsonl"), *run.glob(f"{JOINED}/*/{FOLDER}/*.jsonl")]
    found: list[tuple[Path, TraceHeader]] = []
    for path in paths:
        with path.open("rb") as lines:
            try:
                found.append((path, msgspec.json.decode(lines.readline(), type=TraceHeader)))
            except msgspec.MsgspecError:
                lost.files += 1
    found.sort(key=lambda one: (_rank(one[1].role), len(one[1].worker), one[1].worker, one[1].unix_ns))
    seen: defaultdict[str, int] = defaultdict(int)
    sources: list[TraceSource] = []
    for path, header in found:
        seen[header.worker] += 1
        sources.append(TraceSource(path, header, seen[header.worker]))
    return sources


def _rank(role: str) -> int:
    return ROLES.index(role) if role in ROLES else len(ROLES)


def _host(sources: Iterable[TraceSource], boot: str) -> str:
    return next(source.header.host for source in sources if source.header.boot == boot)


def _events(path: Path, lost: LostEvents) -> Iterator[list[Any]]:
    """The events of a file. What cannot be read is counted in `lost`."""
    dropped = 0
    with path.open("rb") as lines:
        lines.readline()
        for line in lines:
            if not line.endswith(b"\n"):
                lost.torn += 1
                continue
            try:
                event = json.loads(line)
            except ValueError:
                lost.damaged += line != b"\n"  # an empty one follows a line that a full disk tore
                continue
            if event[0] == "dropped":
                dropped = event[1]
            else:
                yield event
    lost.dropped += dropped


def _offsets(sources: list[TraceSource], links: list[tuple[str, SlicePlace, SlicePlace]]) -> dict[str, Offset]:
    wall: dict[str, int] = {}
    for source in sources:
        wall.setdefault(source.header.boot, source.header.unix_ns - source.header.monotonic_ns)
    boots = [source.header.boot for source in sources]
    arrows = (Arrow(boots[a.process], a.began_ns, boots[b.process], b.began_ns) for _, a, b in links)
    return offsets(wall, boots[0], arrows)


class _Arrows:
    """Collects the ends of arrows."""

    def __init__(self) -> None:
        self._sent: defaultdict[str, list[TokenRange]] = defaultdict(list)
        self._scored: defaultdict[str, list[TokenRange]] = defaultdict(list)
        self._trained: defaultdict[str, list[TokenRange]] = defaultdict(list)
        self._broadcast: dict[str, SlicePlace] = {}
        self._swapped: list[tuple[str, SlicePlace]] = []

    def read(self, process: int, events: Iterable[list[Any]]) -> None:
        """Take what the events of one process say."""
        for event in events:
            if event[0] != "X":
                continue
            _, track, name, began_ns, ended_ns, figures = event
            place = SlicePlace(process, track, began_ns, ended_ns)
            match track, name:
                case "segments", "send":
                    self._sent[figures["rollout"]].append(TokenRange(figures["start"], figures["end"], place))
                case "scoring", "score":
                    for rollout, start, end in figures["items"]:
                        self._scored[rollout].append(TokenRange(start, end, place))
                case "learner", "train":
                    for rollout, start, end in figures["items"]:
                        self._trained[rollout].append(TokenRange(start, end, place))
                case "publication", "broadcast":
                    self._broadcast[figures["version"]] = place
                case "engine", "swap":
                    self._swapped.append((figures["version"], place))
                case _:
                    pass

    def links(self) -> Iterator[tuple[str, SlicePlace, SlicePlace]]:
        """All arrows: name, cause and effect."""
        for rollout, sent in self._sent.items():
            scored, trained = self._scored.get(rollout, []), self._trained.get(rollout, [])
            for piece in sent:
                reached = _overlapping(piece, scored)
                yield from (("scored", piece.place, one.place) for one in reached)
                if not reached:  # a run without teachers, or tokens that none could score
                    yield from (("trained", piece.place, one.place) for one in _overlapping(piece, trained))
            for piece in scored:
                yield from (("trained", piece.place, one.place) for one in _overlapping(piece, trained))
        for version, place in self._swapped:
            if version in self._broadcast:
                yield "weights", self._broadcast[version], place


def _overlapping(piece: TokenRange, others: Iterable[TokenRange]) -> list[TokenRange]:
    return [one for one in others if one.start < piece.end and piece.start < one.end]


class _Writer:
    """Writes Chrome's trace-event format. Processes and tracks have numbers from 1."""

    def __init__(self, file: TextIO, sources: list[TraceSource], offset_ns: dict[str, int]) -> None:
        self._file, self._sources, self._offset_ns = file, sources, offset_ns
        self._tracks: list[dict[str, int]] = [{} for _ in sources]
        self.events = 0
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')

    def process(self, process: int, events: Iterable[list[Any]]) -> None:
        """Write all events of one process, in the order of time; an outer slice comes before an inner one."""
        source = self._sources[process]
        again = f" (process {source.ordinal})" if source.ordinal > 1 else ""
        self._name(process, 0, "process_name", source.header.worker + again)
        self._put({"ph": "M", "pid": process + 1, "name": "process_sort_index", "args": {"sort_index": process}})
        ordered = sorted(events, key=_when)
        for event in ordered:
            match event:
                case ["X", track, name, began_ns, ended_ns, figures]:
                    where = {"pid": process + 1, "tid": self._track(process, track)}
                    times = {"ts": self._us(process, began_ns), "dur": (ended_ns - began_ns) / 1e3}
                    self._put({"ph": "X", "name": name, "cat": track, **where, **times, "args": figures})
                case ["C", name, at_ns, figures]:
                    self._put(
                        {"ph": "C", "name": name, "pid": process + 1, "ts": self._us(process, at_ns), "args": figures}
                    )
                case ["I", name, at_ns]:
                    self._instant(process, name, at_ns)
                case ["end", at_ns]:
                    self._instant(process, "end", at_ns)
                case _:
                    pass  # an event of a later version

    def links(self, links: Iterable[tuple[str, SlicePlace, SlicePlace]]) -> None:
        """Write the arrows. Each begins in the middle of its first slice, or before it if the second one begins before
        that, and ends where the second one begins."""
        for number, (name, cause, effect) in enumerate(links, start=1):
            common = {"name": name, "cat": "flow", "id": number}
            ends_us = self._us(effect.process, effect.began_ns)
            begins_us = min(self._us(cause.process, (cause.began_ns + cause.ended_ns) // 2), ends_us)
            for phase, place, at_us in (("s", cause, begins_us), ("f", effect, ends_us)):
                where = {"pid": place.process + 1, "tid": self._track(place.process, place.track)}
                self._put({"ph": phase, "bp": "e", **common, **where, "ts": at_us})

    def close(self, about: dict[str, Any]) -> None:
        self._file.write(f'\n],"otherData":{json.dumps(about)}}}\n')

    def _instant(self, process: int, name: str, at_ns: int) -> None:
        self._put({"ph": "i", "s": "p", "name": name, "pid": process + 1, "tid": 0, "ts": self._us(process, at_ns)})

    def _track(self, process: int, track: str) -> int:
        tracks = self._tracks[process]
        if track not in tracks:
            tracks[track] = len(tracks) + 1
            self._name(process, tracks[track], "thread_name", track)
        return tracks[track]

    def _name(self, process: int, track: int, kind: str, name: str) -> None:
        self._put({"ph": "M", "pid": process + 1, "tid": track, "name": kind, "args": {"name": name}})

    def _us(self, process: int, at_ns: int) -> float:
        return (at_ns + self._offset_ns[self._sources[process].header.boot]) / 1e3

    def _put(self, event: dict[str, Any]) -> None:
        self._file.write((",\n" if self.events else "") + json.dumps(event, separators=(",", ":")))
        self.events += 1


def _when(event: list[Any]) -> tuple[int, int]:
    """Sorts by time, and slices that begin together by their length, the longest first."""
    match event:
        case ["X", _, _, began_ns, ended_ns, _]:
            return began_ns, -ended_ns
        case ["C", _, at_ns, _] | ["I", _, at_ns] | ["end", at_ns]:
            return at_ns, 0
        case _:
            return 0, 0


def _open(path: Path, *, packed: bool) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return gzip.open(path, "wt", compresslevel=5, encoding="utf-8") if packed else path.open("w", encoding="utf-8")
