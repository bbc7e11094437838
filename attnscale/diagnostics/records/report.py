"""A report, all records of a step, as columns of numbers, and its encoding as one line of a file.

    {"kind": "report", "step": 50, "time": 1.7e9, "loss": 2.5, "layers": [["layers.0", 32], …],
     "forward": {"w_max": [64, "eJwt…"], …}, "backward": {"w_max": [64, ""], …}, "scalars": {"gain": "eJwB…"}}

The values of a quantity, for the heads of all layers, are deflated fp32 numbers in base64, with bytes ordered by
significance. Summaries are preceded by their number of rows and rounded to 11 significant bits (3.3 decimal digits),
which keeps integers up to 2048 exact; scalars are exact. Backward statistics are stored as the difference to the
forward ones: empty text if they are equal.
"""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import math
import sys
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnscale.diagnostics.records.record import STATISTICS, Record, Summary, clean, to_json

ABSENT = -1  # number of rows of a quantity that a head does not have
DROPPED_BITS = 13  # of the 23 explicit bits of an fp32 mantissa
SUMMARY_BYTES = 3  # the last byte of a rounded fp32 number is zero
MISSING = 0x7FFFFFFF  # bits of a scalar that a head does not have: a NaN that no computation returns
MOST_NUMBERS = 1 << 28  # a line that claims to hold more is not decoded
OPTIONAL = ("time", "loss", "lr")
FIELDS = frozenset({"kind", "step", "dropped", "layers", "forward", "backward", "scalars", *OPTIONAL})


@dataclass(frozen=True, eq=False)
class Report:
    """All records of a step as tensors; the last axis runs over the heads of all layers.

    Args:
        step: training step.
        layers: path, head indices and mode of each layer.
        forward, backward, scalars: names of the quantities.
        summaries: the six statistics of each forward, then each backward quantity, fp32 [quantities, 6, heads].
        rows: number of rows of these quantities, int32 [quantities + scalars, heads]; 1 for a scalar, -1 if a head does
            not have the quantity.
        numbers: the scalars, fp32 [scalars, heads].
        time: time of the report in seconds since the epoch.
        loss: training loss.
        lr: learning rate.
        dropped: number of reports so far that were dropped because the sink was too slow.

    Example:
        >>> report = Report.of([Record(0, "layers.0", 3, scalars={"gain": 0.5})], 0)
        >>> report.plane("", "gain"), list(report.records()) == [Record(0, "layers.0", 3, scalars={"gain": 0.5})]
        (tensor([0.5000]), True)
    """

    step: int
    layers: tuple[tuple[str, tuple[int, ...], str], ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    scalars: tuple[str, ...]
    summaries: Tensor
    rows: Tensor
    numbers: Tensor
    time: float | None = None
    loss: float | None = None
    lr: float | None = None
    dropped: int = 0

    @classmethod
    def of(cls, records: Iterable[Record], step: int, **more: Any) -> Report:
        """Arrange the records of a step as columns. `more` are the optional fields."""
        layers: list[tuple[str, tuple[int, ...], str]] = []
        ordered: list[Record] = []
        for (layer, mode), run in itertools.groupby(records, lambda record: (record.layer, record.mode)):
            heads = list(run)
            layers.append((layer, tuple(record.head for record in heads), mode))
            ordered += heads
        forward, backward, scalars = (
            tuple(dict.fromkeys(name for record in ordered for name in getattr(record, phase)))
            for phase in ("forward", "backward", "scalars")
        )
        missing = Summary._make([*[math.nan] * len(STATISTICS), ABSENT])
        flat: list[float] = []
        for record in ordered:
            for name in forward:
                flat += record.forward.get(name, missing)
            for name in backward:
                flat += record.backward.get(name, missing)
        summaries = (
            _tensor(flat).view(len(ordered), len(forward) + len(backward), len(Summary._fields)).permute(1, 2, 0)
        )
        single = _tensor([record.scalars.get(name, math.nan) for name in scalars for record in ordered])
        has = _tensor([1 if name in record.scalars else ABSENT for name in scalars for record in ordered])
        rows = torch.cat([summaries[:, -1], has.view(len(scalars), len(ordered))])
        return cls(
            step,
            tuple(layers),
            forward,
            backward,
            scalars,
            summaries[:, :-1].float(),
            rows.int(),
            single.view(len(scalars), len(ordered)).float(),
            **more,
        )

    @functools.cached_property
    def places(self) -> list[tuple[str, int]]:
        """Layer and head of each column."""
        return [(layer, head) for layer, heads, _ in self.layers for head in heads]

    @functools.cached_property
    def keys(self) -> list[tuple[str, str, str]]:
        """Phase, name and statistic of each row of `table`. Scalars have the phase "" and the statistic ""."""
        pairs = [*(("forward", name) for name in self.forward), *(("backward", name) for name in self.backward)]
        return [(*pair, mark) for pair in pairs for mark in STATISTICS] + [("", name, "") for name in self.scalars]

    def table(self) -> Tensor:
        """Return all numbers, fp32 [keys, heads]; NaN where a head does not have the quantity."""
        return torch.cat([self.summaries.flatten(0, 1), self.numbers])

    def plane(self, phase: str, name: str, statistic: str = "mean") -> Tensor | None:
        """Return one number per head, fp32 [heads], or None if no head has it. The phase of a scalar is ""."""
        key = (phase, name, statistic if phase else "")
        if key not in self.keys:
            return None
        row = self.keys.index(key)
        single = row - self.summaries.shape[0] * self.summaries.shape[1]
        return self.numbers[single] if single >= 0 else self.summaries.flatten(0, 1)[row]

    def records(self) -> Iterable[Record]:
        """Iterate over the records, in the order of the columns."""
        summaries, numbers = self.summaries.permute(2, 0, 1).tolist(), self.numbers.t().tolist()
        rows = self.rows.t().tolist()
        column = 0
        split = len(self.forward)
        for layer, heads, mode in self.layers:
            for head in heads:
                found = [
                    Summary._make([*values, count])
                    for values, count in zip(summaries[column], rows[column], strict=False)
                ]
                scalars = zip(self.scalars, numbers[column], rows[column][len(found) :], strict=True)
                yield Record(
                    self.step,
                    layer,
                    head,
                    _present(self.forward, found[:split]),
                    _present(self.backward, found[split:]),
                    {name: value for name, value, count in scalars if count != ABSENT},
                    mode,
                )
                column += 1

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON, rounded as the module's docstring says."""
        words, split = _round(self.summaries), len(self.forward)
        scalars = self.numbers.contiguous().view(torch.int32)
        scalars = scalars.masked_fill(self.rows[split + len(self.backward) :] == ABSENT, MISSING)
        optional = {name: value for name in OPTIONAL if (value := getattr(self, name)) is not None}
        content: dict[str, Any] = {
            "step": self.step,
            **to_json(optional),
            **({"dropped": self.dropped} if self.dropped else {}),
            "layers": [_layer(*layer) for layer in self.layers],
            "forward": {},
            "backward": {},
            "scalars": {name: _pack(scalars[index]) for index, name in enumerate(self.scalars)},
        }
        for index, name in enumerate(self.forward):
            content["forward"][name] = [_pack_rows(self.rows[index]), _pack(words[index], SUMMARY_BYTES)]
        for index, name in enumerate(self.backward, start=split):
            own = words[index] ^ words[self.forward.index(name)] if name in self.forward else words[index]
            text = _pack(own, SUMMARY_BYTES) if name not in self.forward or own.any() else ""
            content["backward"][name] = [_pack_rows(self.rows[index]), text]
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], names: Collection[str] | None = None) -> Report:
        """Inverse of `as_dict`, except for rounding.

        Args:
            content: the dictionary.
            names: decode only these quantities, as `w_max` for both phases or `forward/w_max`. None means all.

        Returns:
            The report.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: the content is not a report.
        """
        layers = tuple(_read_layer(*layer) for layer in content["layers"])
        columns = sum(len(heads) for _, heads, _ in layers)
        phases = {phase: content[phase] for phase in ("forward", "backward", "scalars")}
        if sum(map(len, phases.values())) * len(STATISTICS) * columns > MOST_NUMBERS:
            raise ValueError("too many numbers")

        @functools.cache
        def unpack(phase: str, name: str) -> Tensor:
            text = phases[phase][name][1]
            twin = phase == "backward" and name in phases["forward"]
            if twin and not text:
                return unpack("forward", name)
            words = _unpack(text, (len(STATISTICS), columns), SUMMARY_BYTES)
            return words ^ unpack("forward", name) if twin else words

        chosen = {
            phase: [name for name in found if names is None or name in names or f"{phase}/{name}" in names]
            for phase, found in phases.items()
        }
        summaries = [unpack(phase, name) for phase in ("forward", "backward") for name in chosen[phase]]
        counts = [phases[phase][name][0] for phase in ("forward", "backward") for name in chosen[phase]]
        words = _stack([_unpack(phases["scalars"][name], (columns,)) for name in chosen["scalars"]], columns)
        rows = [*(_unpack_rows(count, columns) for count in counts), *(words != MISSING).int() * (1 - ABSENT) + ABSENT]
        forward, backward, scalars = (tuple(map(clean, found)) for found in chosen.values())
        return cls(
            _whole(content["step"]),
            layers,
            forward,
            backward,
            scalars,
            _stack(summaries, len(STATISTICS), columns).view(torch.float32),
            _stack(rows, columns),
            words.view(torch.float32),
            dropped=_whole(content.get("dropped", 0)),
            **{name: float(content[name]) for name in OPTIONAL if name in content},
        )


def _present(names: Sequence[str], found: Sequence[Summary]) -> dict[str, Summary]:
    return {name: summary for name, summary in zip(names, found, strict=True) if summary.rows != ABSENT}


def _tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError("not an int")
    return value


def _layer(name: str, heads: tuple[int, ...], mode: str) -> list[Any]:
    """[name, number of heads or list of heads], and the mode if it is not "training"."""
    listed: int | list[int] = len(heads) if heads == tuple(range(len(heads))) else list(heads)
    return [name, listed] if mode == "training" else [name, listed, mode]


def _read_layer(name: str, heads: int | list[int], mode: str = "training") -> tuple[str, tuple[int, ...], str]:
    if isinstance(heads, int) and not 0 <= heads <= MOST_NUMBERS // len(STATISTICS):
        raise ValueError("too many heads")
    return clean(name), tuple(range(heads) if isinstance(heads, int) else map(_whole, heads)), clean(mode)


def _round(values: Tensor) -> Tensor:
    """Return the bits of fp32 numbers, rounded to 11 significant bits, as int32."""
    bits = values.contiguous().view(torch.int32)
    rounded = ((bits + (1 << (DROPPED_BITS - 1))) >> DROPPED_BITS) << DROPPED_BITS
    special = torch.full_like(values, math.nan).where(values.isnan(), values).view(torch.int32)
    return rounded.where(values.isfinite(), special)


def _stack(parts: list[Tensor], *shape: int) -> Tensor:
    return torch.stack(parts) if parts else torch.zeros(0, *shape, dtype=torch.int32, device="cpu")


def _pack_rows(rows: Tensor) -> int | str:
    """Return the numbers of rows: one int if all heads have the same."""
    first = int(rows[0]) if len(rows) else 0
    return first if bool((rows == first).all()) else _pack(rows)


def _unpack_rows(content: int | str, columns: int) -> Tensor:
    """Inverse of `_pack_rows`."""
    if isinstance(content, str):
        return _unpack(content, (columns,))
    return torch.full((columns,), _whole(content), dtype=torch.int32, device="cpu")


def _pack(words: Tensor, number: int = 4) -> str:
    """Encode the first `number` bytes of 32-bit words: all first bytes, then all second bytes, and so on."""
    parts = [((words >> (24 - 8 * index)) & 0xFF).to(torch.uint8).flatten() for index in range(number)]
    raw = bytearray(number * words.numel())
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(torch.cat(parts))  # numpy may not be installed
    return base64.b64encode(zlib.compress(raw)).decode("ascii")


def _unpack(text: str, shape: tuple[int, ...], number: int = 4) -> Tensor:
    """Inverse of `_pack`: int32 words of this shape. Raises ValueError if the text holds anything else."""
    size = number * math.prod(shape)
    try:
        raw = bytearray(zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1))
    except (binascii.Error, zlib.error) as error:
        raise ValueError("not compressed numbers") from error
    if len(raw) != size:
        raise ValueError("the number of values is wrong")
    if not raw:
        return torch.zeros(shape, dtype=torch.int32, device="cpu")
    words, count = bytearray(4 * size // number), size // number
    for index in range(number):
        place = 3 - index if sys.byteorder == "little" else index
        words[place::4] = raw[index * count : (index + 1) * count]
    return torch.frombuffer(words, dtype=torch.int32).view(shape)
