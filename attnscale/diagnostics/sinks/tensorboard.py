"""Sink for TensorBoard: curves, histograms over heads, and heat maps."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from attnscale._util import state
from attnscale._util.checks import read_int
from attnscale._util.optional import need
from attnscale.diagnostics.records.record import Event, Record, layers_of
from attnscale.diagnostics.views.display import Grid, Quantity, colour, main_grids
from attnscale.diagnostics.views.flatten import SPREAD
from attnscale.errors import reject, reject_type

BINS = 20
BACKGROUND = (255, 255, 255)
INK = (40, 40, 40)
MARGIN = 8
LINE = 16  # height of a line of text
LARGEST = 1024  # pixels; the cells of a large model shrink to fit


class TensorBoardSink:
    """Writes TensorBoard event files, with one group of tags per main quantity.

    Tags: `attn.<quantity>/<layer>/<mark>` is the mean over heads, `attn.<quantity>.heads/<layer>/h<head>` one head,
    `attn.<quantity>/heads` a histogram over all heads, `attn.<quantity>/map` a heat map of layer × head, and
    `attn.events/<cause>` the events as text.

    The file is created at the first report. Each report is on disk when `log` returns (tensorboard's own writer buffers
    up to two minutes), so a killed run loses no logged report. Needs the extra `log`.

    Args:
        folder: log folder.
        heads: whether to write a curve per head.
        images: number of reports between two heat maps. None writes no heat maps.

    Raises:
        ArgumentError: `folder` is a file, or `images` is less than 1.
        ArgumentTypeError: `folder` is not a path, or `images` is not an int.
        MissingDependencyError: tensorboard or a package it needs is not installed.

    Example:
        >>> import tempfile
        >>> from attnscale.diagnostics import Record
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = TensorBoardSink(folder, images=None)
        ...     sink.log([Record(0, "layers.0", 0, scalars={"gain": 0.5})], step=0)
        ...     sink.close()
        ...     len(list(Path(folder).iterdir()))
        1
    """

    def __init__(self, folder: str | Path, *, heads: bool = True, images: int | None = 10) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            reject_type("folder", folder, "a path")
        if Path(folder).exists() and not Path(folder).is_dir():
            reject("folder", str(folder), "a folder, not a file")
        if images is not None:
            images = read_int("images", images, "an int >= 1 or None", least=1)
        what = "TensorBoardSink"
        self._numpy = need("numpy", what, "log")
        self._records = need("tensorboard.summary.writer.record_writer", what, "log")
        self._events = need("tensorboard.compat.proto.event_pb2", what, "log")
        self._summaries = need("tensorboard.compat.proto.summary_pb2", what, "log")
        self._summary = need("torch.utils.tensorboard.summary", what, "log")
        self.folder = Path(folder)
        self.heads = heads
        self.images = images
        self._reports = 0
        self._file: _WholeWrites | None = None
        self._closed = False

    def log(self, records: Sequence[Record], step: int) -> None:
        """Write the records of a step. Raises ValueError if the sink is closed."""
        with_images = self.images is not None and self._reports % self.images == 0
        self._reports += 1
        values: list[Any] = []
        for grid in main_grids(records):
            values += self._scalars(records, grid.quantity)
            values += self._histogram(grid)
            if with_images:
                picture = draw(grid)
                values += self._summary.image(f"attn.{grid.quantity.name}/map", picture, dataformats="HWC").value
        self._write(values, step)

    def event(self, events: Sequence[Event], step: int) -> None:
        """Write the events of a step as text. Raises ValueError if the sink is closed."""
        values: list[Any] = []
        for event in events:
            text = f"**{event.status}**: {event.message}\n\n{event.advice}".strip()
            values += self._summary.text(f"attn.events/{event.cause}", text).value
        self._write(values, step)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._closed = True
        if self._file is not None:
            self._file.close()

    def _scalars(self, records: Sequence[Record], quantity: Quantity) -> Iterator[Any]:
        tag = f"attn.{quantity.name}"
        for layer in layers_of(records):
            heads = [record for record in records if record.layer == layer]
            for mark in SPREAD if quantity.phase else ("mean",):
                found = [x for record in heads if (x := quantity.of(record, mark)) is not None]
                if found:
                    yield from self._summary.scalar(f"{tag}/{layer}/{mark}", sum(found) / len(found)).value
            for record in heads if self.heads else ():
                if (x := quantity.of(record)) is not None:
                    yield from self._summary.scalar(f"{tag}.heads/{layer}/h{record.head}", x).value

    def _histogram(self, grid: Grid) -> Iterator[Any]:
        finite = [x for row in grid.values for x in row if math.isfinite(x)]
        if not finite:
            return
        low, high = min(finite), max(finite)
        # Bins need a positive width, even if all heads are equal up to rounding.
        pad = max(abs(low), abs(high), 1e-30) * 1e-6 if high - low <= 1e-6 * max(abs(low), abs(high)) else 0.0
        edges = self._numpy.linspace(low - pad, high + pad, BINS + 1)
        tag = f"attn.{grid.quantity.name}/heads"
        yield from self._summary.histogram(tag, self._numpy.asarray(finite), bins=edges).value

    def _write(self, values: list[Any], step: int) -> None:
        if self._closed:
            raise ValueError("the sink is closed")
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = _WholeWrites(self.folder / _file_name(), "ab")
            self._add(file_version="brain.Event:2")
        self._add(step=step, summary=self._summaries.Summary(value=values))

    def _add(self, **content: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **content)
        self._records.RecordWriter(self._file).write(event.SerializeToString())


def _file_name() -> str:
    """Return a file name in TensorBoard's format, with a counter that separates files of the same second."""
    parts = (f"{int(time.time()):010d}", socket.gethostname(), os.getpid(), next(state.FILE_NUMBERS), "attnscale")
    return ".".join(map(str, ("events.out.tfevents", *parts)))


class _WholeWrites(FileIO):
    """Unbuffered file. A failed write leaves no buffered bytes behind."""

    def write(self, content: Any) -> int:
        view = memoryview(content)
        while view:
            view = view[super().write(view) :]
        return len(content)


def cell_size(layers: int, heads: int) -> int:
    """Return the size of a cell in pixels, including a gap of one pixel if it fits."""
    return max(2, min(24, LARGEST // max(layers, heads, 1)))


def draw(grid: Grid) -> Any:
    """Draw a heat map as a uint8 RGB array [height, width, 3], with layer names on the left and the scale on top."""
    numpy, image, canvas, fonts = (
        need(module, "TensorBoardSink", "log") for module in ("numpy", "PIL.Image", "PIL.ImageDraw", "PIL.ImageFont")
    )
    font = fonts.load_default()
    size = cell_size(len(grid.layers), len(grid.values[0]))
    gap = 1 if size > 4 else 0
    step = 1 if size >= LINE - 4 else -(-LINE // size)  # skip names that would overlap
    low, high = grid.scale()
    head = f"{grid.quantity.title}   {low:.3g} .. {high:.3g}{'  (log)' if grid.quantity.log else ''}"
    names = {row: name for row, name in enumerate(grid.layers) if row % step == 0}
    left = MARGIN + max(math.ceil(font.getlength(name)) for name in names.values()) + MARGIN
    top = MARGIN + 2 * LINE + MARGIN
    body = size * len(grid.values[0])
    width = left + max(body, math.ceil(font.getlength(head))) + MARGIN
    bottom = top + size * len(grid.layers)
    picture = image.new("RGB", (width, bottom + LINE + MARGIN), BACKGROUND)
    pen = canvas.Draw(picture)
    bar = width - MARGIN - left
    for x in range(bar):
        pen.line((left + x, MARGIN + LINE, left + x, MARGIN + 2 * LINE - 5), fill=colour(x / max(bar - 1, 1)))
    for row, shares in enumerate(grid.shares()):
        for column, share in enumerate(shares):
            y, x = top + row * size, left + column * size
            pen.rectangle((x, y, x + size - gap - 1, y + size - gap - 1), fill=colour(share))
    pen.text((left, MARGIN), head, fill=INK, font=font)
    for row, name in names.items():
        pen.text((MARGIN, top + row * size + max(0, (size - LINE) // 2)), name, fill=INK, font=font)
    for column in range(0, len(grid.values[0]), step):
        pen.text((left + column * size + gap, bottom), str(column), fill=INK, font=font)
    return numpy.asarray(picture)
