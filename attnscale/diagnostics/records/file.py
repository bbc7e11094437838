"""Files of reports, written by `JsonlSink`: following a growing file, reading all or some of it, data frames.

A file has one line of JSON for the run, each report, each event and the end. Reports are decoded on demand, because a
long run has more of them than a view can show. In files of older versions each record and alert has a line of its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from attnscale._util.checks import read_int
from attnscale._util.optional import need
from attnscale.diagnostics.records.record import FORMAT, Event, Record, RunInfo, clean
from attnscale.diagnostics.records.report import FIELDS, Report
from attnscale.errors import reject

BUFFER = 1 << 22  # bytes; lines of large models have half a megabyte
LONGEST = 1 << 26  # bytes; a longer line is not a report and is not kept in memory
ACCEPTED = "a file of reports written by JsonlSink"
INVALID = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError)
_REPORT = re.compile(rb'\{"kind": ?"(report|record)", ?"step": ?(\d{1,18}),')
_HEADER = frozenset(field.name for field in fields(RunInfo))
_EVENT = frozenset(field.name for field in fields(Event))


class End(NamedTuple):
    """The last line of a closed run: time in seconds since the epoch, and number of dropped reports."""

    time: float
    dropped: int


class Region(NamedTuple):
    """The bytes of a report in a file: one line, or consecutive lines of an older version."""

    step: int
    start: int
    stop: int


class Tail:
    """Follows a growing file and returns new lines on each read.

    An incomplete line is read once it is complete. A truncated or replaced file is read from the beginning; `restarts`
    counts these cases. `skipped` counts lines that cannot be read, and `unknown` names fields of a newer version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.restarts = 0
        self._identity: tuple[int, int] | None = None
        self._restart()

    def _restart(self) -> None:
        self.offset = 0
        self.skipped = 0
        self.unknown: set[str] = set()
        self._newest = FORMAT
        self._incomplete = b""  # first byte of an incomplete last line
        self._overlong = False  # the offset is inside a line longer than LONGEST

    @property
    def foreign(self) -> bool:
        """Whether the file contains a line, or the start of a line, that cannot be read."""
        return self.skipped > 0 or self._incomplete not in (b"", b"{")

    def new(self) -> Iterator[RunInfo | Region | Event | End]:
        """Iterate over the items added since the last call, oldest first. Empty while the file does not exist.

        A report is returned as a region of the file, which `read` decodes.
        """
        try:
            file = self.path.open("rb", buffering=BUFFER)
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            before, self._identity = self._identity, (status.st_dev, status.st_ino)
            if before not in (None, self._identity) or status.st_size < self.offset:
                self._restart()
                self.restarts += 1
            self._incomplete = b""
            file.seek(self.offset)
            open_region: Region | None = None  # of an older version; the next line may belong to it
            while line := file.readline(LONGEST):
                complete = line.endswith(b"\n")
                if not complete and len(line) < LONGEST:
                    self._incomplete = line[:1]
                    break
                start, self.offset = self.offset, self.offset + len(line)
                overlong, self._overlong = self._overlong, not complete
                if overlong or not complete:
                    self.skipped += complete
                    continue
                try:
                    item, whole = self._parse(line, start)
                except INVALID:
                    self.skipped += 1
                    continue
                if open_region is not None and isinstance(item, Region) and not whole and item.step == open_region.step:
                    open_region = open_region._replace(stop=item.stop)
                    continue
                if open_region is not None:
                    yield open_region
                    open_region = None
                if isinstance(item, Region) and not whole:
                    open_region = item
                elif item is not None:
                    yield item
            if open_region is not None:
                yield open_region

    def read(self, region: Region, names: Collection[str] | None = None) -> Report | None:
        """Decode a report, or only the quantities `names`; None if it cannot be read.

        Lines that cannot be read are counted in `skipped`.
        """
        records: list[Record] = []
        with self.path.open("rb") as file:
            file.seek(region.start)
            content = file.read(region.stop - region.start)
        # Splitting copies a line, which takes time for a report of half a megabyte.
        for line in [content] if content.count(b"\n") == 1 else content.splitlines():
            try:
                found = json.loads(line)
                if found["kind"] == "report":
                    self._note("report", found.keys() - FIELDS)
                    return Report.from_dict(found, names)
                records.append(_read_record(found))
            except INVALID:
                self.skipped += 1
        return Report.of(records, region.step) if records else None

    def _parse(self, line: bytes, start: int) -> tuple[RunInfo | Region | Event | End | None, bool]:
        """Return the item of a line, None if its kind is new, and whether it is complete in itself."""
        stop = start + len(line)
        if found := _REPORT.match(line):
            if not line.endswith(b"}\n"):
                raise ValueError("damaged")
            return Region(int(found[2]), start, stop), found[1] == b"report"
        content = json.loads(line)
        kind = content["kind"]
        if kind in ("report", "record"):
            return Region(_read_step(content), start, stop), kind == "report"
        content = _cleaned(content)
        if kind == "run":
            run = RunInfo.from_dict(content)
            self._newest = max(self._newest, int(run.format))
            self._note("run", content.keys() - _HEADER - {"kind"})
            return run, True
        if kind == "event":
            self._note("event", content["event"].keys() - _EVENT)
            return _checked(Event.from_dict(content["event"])), True
        if kind == "alert":
            return _checked(Event.from_alert(content["alert"])), True
        if kind == "end":
            return End(float(content["time"]), int(content["dropped"])), True
        if self._newest == FORMAT:
            raise ValueError("unknown kind")
        self._note("line", [str(kind)])
        return None, True

    def _note(self, kind: str, names: Collection[str]) -> None:
        self.unknown |= {f"{kind}/{clean(name)}" for name in names}


class Scan(NamedTuple):
    """The content of a file, with reports that are not yet decoded."""

    tail: Tail
    runs: list[RunInfo]
    events: list[Event]
    regions: list[Region]  # by ascending step

    def decode(self, most: int | None = None, names: Collection[str] | None = None) -> Iterator[Report]:
        """Decode all reports, or `most` evenly spaced ones, first and last included; only the quantities `names`."""
        regions = self.regions
        if most is not None and len(regions) > most:
            last = len(regions) - 1
            regions = [regions[round(index * last / max(1, most - 1))] for index in range(most)]
        for region in regions:
            report = self.tail.read(region, names)
            if report is not None:
                yield report


def scan(path: str | Path) -> Scan:
    """Find the reports of a file without decoding them.

    If a resumed run goes back to an earlier step, the reports and events it repeats are left out.

    Raises:
        ArgumentError: the file does not exist or has no reports.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        reject("path", str(path), f"{ACCEPTED}, not a folder")
    if not path.exists():
        reject("path", str(path), "an existing file of reports")
    found = Scan(Tail(path), [], [], [])
    for item in found.tail.new():
        if isinstance(item, RunInfo):
            found.runs.append(item)
        elif isinstance(item, Event):
            found.events.append(item)
        elif isinstance(item, Region):
            if found.regions and found.regions[-1].step >= item.step:
                while found.regions and found.regions[-1].step >= item.step:
                    found.regions.pop()
                found.events[:] = [event for event in found.events if event.step < item.step]
            found.regions.append(item)
    if not found.regions:
        reject("path", str(path), f"{ACCEPTED} that contains at least one report")
    return found


def read_jsonl(path: str | Path) -> Iterator[Record | Event]:
    """Read the records and events of a file written by `JsonlSink`.

    Args:
        path: the JSONL file.

    Returns:
        An iterator over records and events, in file order. Damaged lines and an incomplete last line are skipped.

    Raises:
        OSError: the file cannot be opened.

    Example:
        >>> import tempfile
        >>> from attnscale.diagnostics import JsonlSink
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = JsonlSink(f"{folder}/attn.jsonl")
        ...     sink.log([Record(0, "layers.0", 3)], step=0)
        ...     sink.close()
        ...     [item.layer for item in read_jsonl(sink.path)]
        ['layers.0']
    """
    Path(path).open("rb").close()
    tail = Tail(path)
    for item in tail.new():
        if isinstance(item, Event):
            yield item
        elif isinstance(item, Region) and (report := tail.read(item)) is not None:
            yield from report.records()


def read(path: str | Path, *, names: Sequence[str] | None = None, most: int | None = None) -> Any:
    """Read a file written by `JsonlSink` into a pandas data frame with one row per step, layer and head.

    Columns: `step`, `layer`, `head`, `mode`, `loss`, `lr`, and the quantities in fp32, such as `forward/w_max/mean` or
    `gain`; NaN where nothing was recorded. Entries of `frame.attrs`: `runs`, a list of `RunInfo`, one for each start of
    the run; `events`, a list of `Event`; `skipped`, the number of lines that cannot be read; `unknown`, fields of a
    newer version. If a resumed run repeated steps, its reports replace the earlier ones.

    Args:
        path: the JSONL file.
        names: quantities to read, as `w_max` for both phases or `forward/w_max`. None means all.
        most: read only so many evenly spaced reports. None means all.

    Returns:
        A `pandas.DataFrame`.

    Raises:
        ArgumentError: the file does not exist or has no reports, or `most` is less than 1.
        MissingDependencyError: pandas is not installed.
        OSError: the file cannot be read.

    Example:
        >>> import tempfile
        >>> from attnscale.diagnostics import JsonlSink
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = JsonlSink(f"{folder}/attn.jsonl")
        ...     sink.log([Record(50, "layers.0", 3, scalars={"gain": 0.5})], step=50)
        ...     sink.close()
        ...     frame = read(sink.path)
        >>> frame[["step", "layer", "head", "gain"]].values.tolist()
        [[50, 'layers.0', 3, 0.5]]
    """
    pandas, numpy = need("pandas", "read", "report"), need("numpy", "read", "report")
    if most is not None:
        most = read_int("most", most, "an int >= 1 or None", least=1)
    found = scan(path)
    left = len(found.regions) if most is None else min(most, len(found.regions))
    blocks: list[_Block] = []
    for report in found.decode(most, names):
        if not blocks or not blocks[-1].fits(report):
            blocks.append(_Block(report, left, names, numpy))
        blocks[-1].add(report)
        left -= 1
    if not blocks:
        reject("path", str(path), f"{ACCEPTED} with at least one report that can be read")
    frames = [block.frame(pandas, numpy) for block in blocks]
    frame = frames[0] if len(frames) == 1 else pandas.concat(frames, ignore_index=True)
    for name in ("layer", "mode"):
        frame[name] = frame[name].astype("category")
    frame.attrs |= {
        "runs": found.runs,
        "events": found.events,
        "skipped": found.tail.skipped,
        "unknown": sorted(found.tail.unknown),
    }
    return frame


class _Block:
    """Rows of reports with the same columns and heads, in memory that is allocated once."""

    def __init__(self, report: Report, reports: int, names: Sequence[str] | None, numpy: Any) -> None:
        self._report = report
        self._about: list[tuple[int, float | None, float | None]] = []  # step, loss and learning rate
        wanted = [names is None or name in names or f"{phase}/{name}" in names for phase, name, _ in report.keys]
        self._rows = numpy.flatnonzero(wanted)
        self._all = all(wanted)
        self._values = numpy.empty((len(self._rows), reports * len(report.places)), numpy.float32)

    def fits(self, report: Report) -> bool:
        first = self._report
        return (report.layers, report.forward, report.backward, report.scalars) == (
            first.layers,
            first.forward,
            first.backward,
            first.scalars,
        )

    def add(self, report: Report) -> None:
        width = len(report.places)
        start = width * len(self._about)
        table = report.table().numpy()
        self._values[:, start : start + width] = table if self._all else table[self._rows]
        self._about.append((report.step, report.loss, report.lr))

    def frame(self, pandas: Any, numpy: Any) -> Any:
        layers, places, number = self._report.layers, self._report.places, len(self._about)
        columns = ["/".join(filter(None, self._report.keys[row])) for row in self._rows]
        modes = [mode for _, heads, mode in layers for _ in heads]
        steps, losses, rates = zip(*self._about, strict=True)
        about = {
            "step": numpy.repeat(numpy.array(steps), len(places)),
            "layer": _tiled([layer for layer, _ in places], number, pandas, numpy),
            "head": numpy.tile(numpy.array([head for _, head in places]), number),
            "mode": _tiled(modes, number, pandas, numpy),
            "loss": numpy.repeat(numpy.array(losses, dtype=float), len(places)),
            "lr": numpy.repeat(numpy.array(rates, dtype=float), len(places)),
        }
        frame = pandas.DataFrame(self._values[:, : number * len(places)].T, columns=columns, copy=False)
        for place, (name, column) in enumerate(about.items()):
            frame.insert(place, name, column)
        return frame


def _tiled(texts: list[str], number: int, pandas: Any, numpy: Any) -> Any:
    """Return a categorical that repeats the texts, with categories in order of first appearance."""
    names = list(dict.fromkeys(texts))
    codes = numpy.tile(numpy.array([names.index(text) for text in texts]), number)
    return pandas.Categorical.from_codes(codes, names)


def _cleaned(content: Any) -> Any:
    """Return JSON data with cleaned text."""
    if isinstance(content, str):
        return clean(content)
    if isinstance(content, dict):
        return {clean(name): _cleaned(value) for name, value in content.items()}
    return [_cleaned(value) for value in content] if isinstance(content, list) else content


def _read_step(content: dict[str, Any]) -> int:
    if type(content["step"]) is not int:
        raise TypeError("step is not an int")
    return int(content["step"])


def _read_record(content: dict[str, Any]) -> Record:
    """Read a record of an older version. Raises one of `INVALID` for other content."""
    record = Record.from_dict(_cleaned(content))
    numbers = [*record.scalars.values(), *(value for *_, summary in record.summaries() for value in summary)]
    whole = [record.step, record.head, *(summary.rows for *_, summary in record.summaries())]
    for kind, values in ((str, [record.layer, record.mode]), (int, whole), ((int, float), numbers)):
        if not all(isinstance(value, kind) for value in values):
            raise TypeError("a field has the wrong type")
    for number in numbers:
        float(number)  # JSON allows integers of any size
    return record


def _checked(event: Event) -> Event:
    """Return an event. Raises TypeError or OverflowError for a field with an invalid type or an overlong integer."""
    texts = [event.cause, event.status, event.severity, event.message, event.advice, event.quantity]
    texts += [layer for layer, _ in event.places]
    whole = [event.number, event.start, event.step, *(head for _, heads in event.places for head in heads)]
    numbers = [value for value in (event.value, event.usual) if value is not None]
    for kind, values in ((str, texts), (int, whole), ((int, float), numbers)):
        if not all(isinstance(value, kind) for value in values):
            raise TypeError("a field has the wrong type")
    for number in numbers:
        float(number)
    return event
