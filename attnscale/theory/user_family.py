"""Gap counting for your own scores: N(t), Λ and its exponent, measured on a function that draws scores.

`attnscale theory gaps --family FILE` reads a Python file that defines

    def draw(n: int, generator: torch.Generator) -> Tensor: ...  # raw scores of n keys, [n] or [rows, n]

and, optionally, predictions to compare with the measurement:

    EXPONENT = 1.0  # p of Λ ~ (ln n)^p as n grows
    def accumulation(n: int) -> float: ...  # median Λ of a row of n keys
    ASYMPTOTIC = True  # accumulation(n) holds for n → ∞ only; default: False, at every n

Raw scores are scale·q·k before the temperature β, and must be finite. A file may import modules from its own folder
only if that folder is on `sys.path`.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnscale._util.checks import read_int, read_number
from attnscale.errors import reject
from attnscale.statistics.gaps import count_gaps
from attnscale.theory import families, gap_counting
from attnscale.theory.estimates import Estimate, mean, median, slope
from attnscale.theory.experiments import Comparison, Experiment, Kind, Picture, Progress, Rows, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 2**22
LENGTHS = tuple(2**power for power in range(6, 17, 2))
QUICK_LENGTHS = LENGTHS[:4]
FEWEST_ROWS, MOST_ROWS = 32, 4096
CONTACT_GAPS = (0.5, 1.0, 2.0, 4.0)  # the default t in units of the contact gap
CHUNK = 1 << 19  # scores held at once
# Exponent p of (ln n)^p, policy with that law, formula.
LAWS = (
    (0.0, "constant", "β"),
    (0.5, "sqrt_log", "γ·√(ln n)"),
    (1.0, "log", "γ·ln n"),
    (2.0, "log_squared", "γ·(ln n)²"),
)
DECISIVE = 9.0  # least difference of χ² that separates powers of ln n from powers of n
LEAST_ERROR = 1e-6  # of ln Λ in χ², for families without randomness


@dataclass(frozen=True)
class UserFamily:
    """A family of raw scores, given by a function that draws them.

    Args:
        name: name in tables and file names.
        draw: called as `draw(n, generator)` until there are enough rows; returns raw scores [n] or [rows, n].
        exponent: predicted p of Λ ~ (ln n)^p, or None.
        accumulation: predicted median Λ of a row of n keys, or None. May return an `Estimate`.
        asymptotic: whether `accumulation` holds for n → ∞ only.
        source: the file, quoted in errors.

    Example:
        >>> family = UserFamily("uniform", lambda n, generator: torch.rand(n, generator=generator))
        >>> family.sample(16, 3, torch.Generator().manual_seed(0)).shape
        torch.Size([3, 16])
    """

    name: str
    draw: Callable[[int, torch.Generator], Tensor]
    exponent: float | None = None
    accumulation: Callable[[int], float | Estimate] | None = None
    asymptotic: bool = False
    source: str = ""

    def sample(self, n: int, rows: int, generator: torch.Generator) -> Tensor:
        """Draw raw scores [rows, n], in fp64 on the CPU.

        Raises:
            ArgumentError: `draw` raises an exception, or returns anything but finite floating scores [n] or [rows, n].
        """
        parts: list[Tensor] = []
        missing, call = rows, f"draw(n={n}, generator)"
        while missing > 0:
            scores = self._call(call, lambda: self.draw(n, generator))
            found = type(scores).__name__
            if isinstance(scores, Tensor):
                found = f"a tensor of {scores.dtype} and shape {list(scores.shape)}"
            floating = isinstance(scores, Tensor) and scores.is_floating_point() and scores.numel() > 0
            if not floating or scores.dim() not in (1, 2) or scores.shape[-1] != n:
                self._reject(f"{call} to return a floating tensor of shape [{n}] or [rows, {n}], not {found}")
            if not scores.isfinite().all():
                self._reject(f"{call} to return finite scores, not {scores[~scores.isfinite()][0].item()}")
            parts.append(scores.detach().reshape(-1, n)[:missing].to("cpu", torch.float64))
            missing -= len(parts[-1])
        return torch.cat(parts)

    def predict(self, n: int) -> Estimate | None:
        """The predicted median Λ at n keys; None without a prediction.

        Raises:
            ArgumentError: `accumulation` raises an exception, or does not return a finite number > 0.
        """
        if self.accumulation is None:
            return None
        predict, call = self.accumulation, f"accumulation(n={n})"
        found = self._call(call, lambda: predict(n))
        value, error = found if isinstance(found, Estimate) else (found, 0.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self._reject(f"{call} to return a finite number > 0, not {found!r}")
        return Estimate(float(value), error)

    def _call(self, call: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            self._reject(f"{call} to run; {_describe(error, self.source)}")

    def _reject(self, accepted: str) -> Any:
        reject("family", self.source or self.name, accepted)


@dataclass(frozen=True)
class Settings:
    """Settings of `measure`.

    Args:
        n: keys per row; at least three different lengths from 2 to 2**22. Default: 64, 256, 1024, …, 65536; up to 4096
            with `quick`.
        t: gaps at which N(t) is counted, in units of the score after `sigma`. Default: 1/2, 1, 2 and 4 times the median
            contact gap at the shortest n.
        sigma: factor on the drawn scores; Λ is divided by it.
        quick: draw at most 2**20 scores per length instead of 2**24.

    Raises:
        ArgumentError: a value is out of range.
        ArgumentTypeError: a value is not a number.

    Example:
        >>> Settings(n=(256, 64, 128)).n
        (64, 128, 256)
    """

    n: Sequence[int] | None = None
    t: Sequence[float] | None = None
    sigma: float = 1.0
    quick: bool = False

    def __post_init__(self) -> None:
        accepted = f"at least three different whole numbers from 2 to {LONGEST}"
        given = (QUICK_LENGTHS if self.quick else LENGTHS) if self.n is None else self.n
        lengths = tuple(sorted({read_int("n", length, accepted, least=2, most=LONGEST) for length in given}))
        if len(lengths) < 3:
            reject("n", self.n, accepted)
        gaps = None if self.t is None else tuple(sorted({_positive("t", gap) for gap in self.t}))
        if gaps == ():
            reject("t", self.t, "at least one number > 0")
        for name, value in (("n", lengths), ("t", gaps), ("sigma", _positive("sigma", self.sigma))):
            object.__setattr__(self, name, value)

    def rows(self, n: int) -> int:
        """The number of rows drawn at n keys."""
        return max(FEWEST_ROWS, min(MOST_ROWS, (1 << (20 if self.quick else 24)) // n))


class FamilyGaps(NamedTuple):
    """The measurement of a family.

    Attributes:
        name: name of the family.
        scales: a row per n: median Λ with its standard error, quantiles, contact point, fit and prediction.
        counts: a row per n and t: mean N(t) with its standard error.
        exponent: fitted p of Λ ~ (ln n)^p.
        power: fitted q of Λ ~ n^q.
        policy: name of the length policy with the fitted law.
        summary: the fit and the suggested law for β as text.
        comparisons: predictions against measurements; empty if the family states none.
    """

    name: str
    scales: Rows
    counts: Rows
    exponent: Estimate
    power: Estimate
    policy: str
    summary: str
    comparisons: list[Comparison]


def find_family(family: str | Path) -> UserFamily:
    """Load a family from a Python file, or take one of `attnscale.theory.families` by name.

    Args:
        family: path of the file, or a key of `families.FAMILIES`. A file takes precedence over a name.

    Returns:
        The family, with the predictions that it states.

    Raises:
        ArgumentError: there is no such file, the file cannot be executed, or one of its names is missing or wrong.

    Example:
        >>> find_family("simplex").exponent
        1.0
    """
    path, text = Path(family), str(family)
    if not path.is_file():
        if text in families.FAMILIES:
            return _built_in(text)
        reject("family", text, f"an existing Python file, or {', '.join(families.FAMILIES)}")
    names = vars(_execute(path))
    if not callable(names.get("draw")):
        reject("family", text, f"a file with a function draw(n, generator); {_kind(names, 'draw')}")
    exponent, accumulation, asymptotic = (names.get(name) for name in ("EXPONENT", "accumulation", "ASYMPTOTIC"))
    if exponent is not None and (isinstance(exponent, bool) or not isinstance(exponent, (int, float))):
        reject("family", text, f"EXPONENT to be a number; {_kind(names, 'EXPONENT')}")
    if accumulation is not None and not callable(accumulation):
        reject("family", text, f"accumulation to be a function of n; {_kind(names, 'accumulation')}")
    if asymptotic not in (None, True, False):
        reject("family", text, f"ASYMPTOTIC to be True or False; {_kind(names, 'ASYMPTOTIC')}")
    return UserFamily(path.stem, names["draw"], exponent, accumulation, bool(asymptotic), text)


def measure(family: UserFamily, settings: Settings | None = None, progress: Progress | None = None) -> FamilyGaps:
    """Measure N(t) and Λ of a family, fit the growth of Λ, and compare with the predictions of the family.

    The Λ of one row can be heavy-tailed, so Λ is summarised by its median over rows, with a bootstrap standard error.
    The exponents are least-squares slopes of ln(median Λ). Their standard errors exclude corrections at finite n.

    Args:
        family: the family.
        settings: lengths n, gaps t, factor sigma and sample size.
        progress: called with the steps done, the total and the title of the current step.

    Returns:
        The measurement. `experiment` turns it into files.

    Raises:
        ArgumentError: the family draws unusable scores, or most rows tie at the top, so Λ is infinite.

    Example:
        >>> found = measure(find_family("simplex"), Settings(n=(16, 32, 64), quick=True))
        >>> round(found.exponent.value, 6), found.policy
        (1.0, 'log')
    """
    chosen = settings or Settings()
    lengths, gaps = tuple(chosen.n or ()), chosen.t
    scales, counts = Rows(), Rows()
    if gaps is None:
        pilot = family.sample(lengths[0], FEWEST_ROWS, torch.Generator().manual_seed(0)) * chosen.sigma
        contact = gap_counting.contact_point(pilot).gap.median().item()
        gaps = tuple(float(f"{factor * contact:.2g}") for factor in CONTACT_GAPS) if contact > 0 else (chosen.sigma,)
    for step, n in enumerate(lengths):
        if progress is not None:
            progress(step, len(lengths), f"{family.name}, n = {n}")
        accumulation, rank, gap, counted = _draw(family, n, chosen, tuple(gaps))
        if accumulation.median() == math.inf:
            accepted = f"scores with one best key; at n={n} most rows tie at the top, and Λ is infinite"
            reject("family", family.source or family.name, accepted)
        found, predicted = median(accumulation), family.predict(n)
        low, high = (accumulation.quantile(share, interpolation="nearest").item() for share in (0.1, 0.9))
        scales.append(
            {"family": family.name, "n": n, "rows": len(accumulation), "median": found.value}
            | {"median_error": found.error, "ln_error": median(accumulation.log()).error, "low": low, "high": high}
            | {"contact_rank": rank.double().median().item(), "contact_gap": gap.median().item()}
            | {"predicted": predicted and predicted.value / chosen.sigma}
            | {"predicted_error": predicted and predicted.error / chosen.sigma}
        )
        for t, column in zip(gaps, counted.double().T, strict=True):
            counts.append({"family": family.name, "n": n, "t": t, **mean(column).columns()})
    if progress is not None:
        progress(len(lengths), len(lengths), "fit")
    return _fit(family, scales, counts)


def experiment(found: FamilyGaps) -> Experiment:
    """The tables and figures of a measurement, for `experiments.write`."""
    figures = {
        "accumulation": Picture(draw_accumulation, {"accumulation": found.scales}),
        "counts": Picture(draw_counts, {"counts": found.counts}),
    }
    return Experiment(f"gaps_{found.name}", found.comparisons, {}, figures)


def draw_accumulation(rows: Rows) -> Figure:
    """Median Λ against n: measured, fitted and predicted."""
    figure, (axes,) = new_figure(size=(5.6, 4.2))
    rows.line(axes, "n", "fit", 1, label=rows[0]["fit_law"])
    if rows[0]["predicted"] is not None:
        rows.line(axes, "n", "predicted", 2, label="predicted")
    rows.error_bars(axes, "n", 0, "median", "median_error", label="measured ± 2 standard errors", capsize=2)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="keys n", ylabel="median accumulation scale Λ, 1/score")
    axes.set_title(f"{rows[0]['family']}: Λ")
    axes.legend(frameon=False)
    return figure


def draw_counts(rows: Rows) -> Figure:
    """Mean N(t) against n, one series per t."""
    figure, (axes,) = new_figure(size=(5.6, 4.2))
    for place, t, part in rows.series("t"):
        part.error_bars(axes, "n", place, label=f"t = {t:g}", linestyle="solid", linewidth=0.8, capsize=2)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="keys n", ylabel="mean N(t): keys within t of the best")
    axes.set_title(f"{rows[0]['family']}: gap count, ± 2 standard errors")
    axes.legend(frameon=False)
    return figure


def _draw(family: UserFamily, n: int, settings: Settings, gaps: tuple[float, ...]) -> list[Tensor]:
    """Λ, contact rank and contact gap [rows], and N(t) [rows, t], in chunks of bounded memory."""
    rows, generator = settings.rows(n), torch.Generator().manual_seed(n)
    chunk = max(1, CHUNK // n)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, rows, chunk):
        scores = family.sample(n, min(chunk, rows - start), generator) * settings.sigma
        contact = gap_counting.contact_point(scores)
        parts.append((contact.accumulation, contact.rank, contact.gap, count_gaps(scores, gaps)))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _fit(family: UserFamily, scales: Rows, counts: Rows) -> FamilyGaps:
    """Fit Λ ~ (ln n)^p and Λ ~ n^q, name the law for β, and compare with the predictions."""
    lengths = scales.column("n")
    y = [math.log(value) for value in scales.column("median")]
    errors = scales.column("ln_error")
    logs, powers = [math.log(math.log(n)) for n in lengths], [math.log(n) for n in lengths]
    p, q = slope(logs, y, errors), slope(powers, y, errors)
    advantage = _chi_squared(logs, y, errors, p) - _chi_squared(powers, y, errors, q)
    is_power = advantage > DECISIVE
    where = f"n = {lengths[0]}…{lengths[-1]}"
    if is_power:
        growth, policy = f"n^{_shown(q)}", "power"
        suggestion = f"Suggested law: β = γ·n^{q.value:.3g}, policy power, exponent={q.value:.3g}."
    else:
        growth = f"(ln n)^{_shown(p)}"
        nearest, policy, formula = min(LAWS, key=lambda known: abs(known[0] - p.value))
        law = f"β = {formula}, policy {policy}"
        suggestion = f"Suggested law: {law}."
        if abs(p.value - nearest) > max(0.25, 3 * p.error):
            suggestion = f"No length law has this exponent; policy gap_adaptive follows any Λ.\nNearest law: {law}."
    summary = f"Λ grows like {growth} for {where}.\n{suggestion}"
    if abs(advantage) <= DECISIVE:
        summary += f"\nThese lengths do not separate this growth from n^{_shown(q)}."
    fit, x = (q, powers) if is_power else (p, logs)
    for row, value in zip(scales, _line(x, y, fit), strict=True):
        row |= {"fit": math.exp(value), "fit_law": f"fit {growth}"}
    lines = []
    if family.exponent is not None:
        quantity, parameters = "p of Λ ~ (ln n)^p", where.replace(" ", "")
        lines.append(Comparison(quantity, parameters, float(family.exponent), p.value, p.random_error, "limit"))
    for row in scales:
        if row["predicted"] is not None:
            error = Estimate(row["median"], row["median_error"]).random_error
            values = (row["predicted"], row["median"], error)
            kind: Kind = "limit" if family.asymptotic else "exact"
            lines.append(Comparison("median Λ", f"n={row['n']}", *values, kind, row["predicted_error"]))
    return FamilyGaps(family.name, scales, counts, p, q, policy, summary, lines)


def _line(x: list[float], y: list[float], fit: Estimate) -> list[float]:
    """The least-squares line with a given slope, at each x."""
    return [math.fsum(y) / len(y) + fit.value * (value - math.fsum(x) / len(x)) for value in x]


def _chi_squared(x: list[float], y: list[float], errors: list[float], fit: Estimate) -> float:
    residuals = zip(y, _line(x, y, fit), errors, strict=True)
    return math.fsum(((value - line) / max(error, LEAST_ERROR)) ** 2 for value, line, error in residuals)


def _shown(found: Estimate) -> str:
    return f"({found.value:.3f} ± {found.error:.2g})" if found.random_error else f"{found.value:.3f}"


def _built_in(name: str) -> UserFamily:
    """A family of `families` with its law; the median of a random Λ includes its sampled limit ratio."""
    family = families.family(name)
    ratio = median(gap_counting.limit_ratio(family, 4000, torch.Generator().manual_seed(1)))
    return UserFamily(
        name,
        lambda n, generator: family.sample(n, FEWEST_ROWS, generator),
        family.exponent,
        lambda n: Estimate(family.accumulation(n) * ratio.value, family.accumulation(n) * ratio.error),
        not family.exact,
    )


def _execute(path: Path) -> Any:
    """The module of a file. It stays in `sys.modules`, where dataclasses and pickle look for it."""
    name = f"attnscale_user_family_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        reject("family", str(path), "a Python file with the suffix .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        reject("family", str(path), f"a Python file that can be executed; {_describe(error, str(path))}")
    return module


def _describe(error: BaseException, source: str) -> str:
    """Type and message of an exception, with the line of the user's file if there is one."""
    file = os.path.abspath(source) if source else None
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else next(reversed(frames), None)
    return f"{f'line {line}: ' if line else ''}{type(error).__name__}: {error}"


def _kind(names: dict[str, Any], name: str) -> str:
    return f"{name} is {names[name]!r}" if name in names else f"{name} is missing"


def _positive(argument: str, value: object) -> float:
    number = read_number(argument, value, "a finite number > 0")
    if not 0 < number < math.inf:
        reject(argument, value, "a finite number > 0")
    return number
