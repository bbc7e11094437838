"""The cases: every kernel family, dtype, width and feature, with ragged edges throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from flash_cases import DTYPES
from flash_cases import Case as Flash

from attnscale_kernels.launch import Resources, assuming
from compiled import calls, stock
from compiled.calls import Call

FP32, FP16, BF16 = DTYPES
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}

# Neither rows nor keys fill the last tile.
SHAPE: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 150, "keys": 203, "beta": "each"}
DECODED: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 1, "keys": 301, "beta": "each"}


class Case(NamedTuple):
    """A named call."""

    name: str
    family: str
    build: Callable[[], Call]

    def call(self, resources: Resources) -> Call:
        """Build the call with the tiles of a device."""
        with assuming(resources):
            return self.build()


def _flash(sees: str, dtype: Any, dim: int, **changes: Any) -> Flash:
    return Flash(sees=sees, dtype=dtype, dim=dim, **{**SHAPE, **changes})


def _forward() -> Iterator[Case]:
    def case(name: str, flash: Flash, **options: Any) -> Case:
        words = f"forward {NAMES[flash.dtype]} D{flash.dim} {name}"
        return Case(words, "forward", partial(calls.forward, flash, **options))

    for dtype in DTYPES:
        for dim in (64, 128):
            yield case("causal", _flash("causal", dtype, dim))
    for dim in (64, 128):
        yield case("causal, plain", _flash("causal", BF16, dim), entropy=False)
    for dim in (16, 24, 40, 80, 96, 256):
        yield case("causal", _flash("causal", BF16, dim))
    yield case("causal", _flash("causal", FP32, 256, queries=40, keys=70))
    yield case("everything, wide values", _flash("everything", FP16, 32, value_dim=64))
    yield case("window", _flash("window_of_20", BF16, 128))
    yield case("bounds", _flash("any_intervals", BF16, 64, batch=2))
    yield case("documents", _flash("documents", FP16, 128))
    yield case("padding, NaN in hidden keys", _flash("right_padding", BF16, 64, batch=2), nan=True)
    yield case("left padding", _flash("left_padding", FP32, 32, batch=2))
    yield case("mask", _flash("mask_per_head", BF16, 128))
    yield case("aligned mask", _flash("mask_per_head", BF16, 64, keys=208))
    yield case("aligned bias", _flash("bias_in_half", BF16, 64, keys=208))
    yield case("mask", _flash("mask_per_batch", FP32, 64, queries=70))
    yield case("listed mask", _flash("mask_per_batch_and_head", BF16, 64, batch=2), listed=True)
    yield case("bias", _flash("bias_in_half", FP16, 128))
    yield case("bias", _flash("bias_in_half", BF16, 64))
    yield case("bias that hides", _flash("bias_that_hides", BF16, 64))
    yield case("softcap", _flash("causal", BF16, 128, softcap=3.0))
    yield case("sinks", _flash("causal", BF16, 128, sinks=True))
    yield case("dropout", _flash("causal", BF16, 64, dropout_p=0.3))
    yield case(
        "bias, softcap, sinks, dropout", _flash("bias_per_head", BF16, 64, softcap=3.0, sinks=True, dropout_p=0.2)
    )
    yield case("winner, any sign of β", _flash("causal", BF16, 64, beta="any_sign"), winner=True)
    yield case("winner, mask", _flash("mask_per_head", FP16, 64), winner=True)
    yield case("heads inside of rows", _flash("causal", BF16, 64, heads=4, kv_heads=2), inside=True)
    yield case("nothing visible", _flash("nothing", FP16, 64, keys=70))


def _backward() -> Iterator[Case]:
    def case(name: str, flash: Flash, **options: Any) -> Case:
        words = f"backward {NAMES[flash.dtype]} D{flash.dim} {name}"
        return Case(words, "backward", partial(calls.backward, flash, **options))

    for dtype in DTYPES:
        for dim in (64, 128):
            yield case("causal", _flash("causal", dtype, dim, queries=100, keys=140))
    yield case("causal, without dβ", _flash("causal", BF16, 64), dbeta=False)
    for dim in (16, 40, 80, 256):
        yield case("causal", _flash("causal", BF16, dim))
    yield case("everything, wide values", _flash("everything", FP16, 32, value_dim=64))
    yield case("window", _flash("window_of_20", BF16, 128))
    yield case("bounds", _flash("any_intervals", BF16, 64, batch=2))
    yield case("padding, NaN in hidden keys", _flash("right_padding", BF16, 64, batch=2), nan=True)
    yield case("mask", _flash("mask_per_head", BF16, 128))
    yield case("listed mask", _flash("mask_per_batch_and_head", BF16, 64, batch=2), listed=True)
    yield case("bias", _flash("bias_in_half", FP16, 128))
    yield case("bias, softcap, dropout", _flash("bias_per_head", BF16, 64, softcap=3.0, dropout_p=0.2))
    yield case("dropout", _flash("causal", BF16, 128, dropout_p=0.3))
    yield case("heads inside of rows", _flash("causal", BF16, 64, heads=4, kv_heads=2), inside=True)


def _decode() -> Iterator[Case]:
    def case(name: str, flash: Flash, splits: int, **options: Any) -> Case:
        words = f"decode {NAMES[flash.dtype]} D{flash.dim} {name}, {splits} splits"
        return Case(words, "decode", partial(calls.decode, flash, splits, **options))

    def flash(sees: str, dtype: Any, dim: int, **changes: Any) -> Flash:
        return Flash(sees=sees, dtype=dtype, dim=dim, **{**DECODED, **changes})

    yield case("causal", flash("causal", BF16, 64), 3)
    yield case("causal, plain", flash("causal", BF16, 128), 3, entropy=False)
    yield case("causal", flash("causal", FP16, 128), 1)
    yield case("causal", flash("causal", BF16, 256), 3)
    yield case("causal", flash("causal", FP32, 64), 3)
    yield case("window, many rows", flash("window_of_100", BF16, 64, queries=21), 3)
    yield case("padding, sinks, winner", flash("left_padding", BF16, 64, queries=3, sinks=True), 3, winner=True)
    yield case("NaN in hidden keys", flash("right_padding", FP16, 64), 3, nan=True)
    yield case("bounds", flash("any_intervals", FP16, 40, queries=5), 3)
    yield case("mask, softcap", flash("mask_per_batch", BF16, 64, queries=5, softcap=3.0), 3)
    yield case("bias, winner", flash("bias_that_hides", BF16, 64, queries=5), 1, winner=True)


def _gaps() -> Iterator[Case]:
    def case(name: str, flash: Flash) -> Case:
        return Case(f"gaps {NAMES[flash.dtype]} D{flash.dim} {name}", "gaps", partial(calls.gaps, flash))

    yield case("causal", _flash("causal", FP16, 64))
    yield case("window", _flash("window_of_20", FP32, 32))
    yield case("documents", _flash("documents", FP16, 128))
    yield case("padding", _flash("left_padding", FP16, 40, batch=2))
    yield case("bias", _flash("bias_that_hides", FP16, 64))
    yield case("softcap", _flash("causal", FP16, 64, softcap=3.0))


def _softmax() -> Iterator[Case]:
    def case(dtype: Any, keys: int, *extras: str, **options: Any) -> Case:
        name = ", ".join((f"softmax {NAMES[dtype]} n = {keys}", *extras))
        return Case(name, "softmax", partial(calls.row_softmax, dtype, keys, *extras, **options))

    for dtype in DTYPES:
        yield case(dtype, 129)
    yield case(BF16, 1024, "mask", "bias", "counts")
    yield case(FP16, 200, "mask")
    yield case(FP32, 37, "bias", "counts", "transposed")
    yield case(BF16, 9001, "mask", "bias", "counts", rows=(1, 2, 2))


# Counted instructions per score, beside the static table: a head of n causal queries and keys.
LENGTHS = (256, 1024)


def _counted() -> Iterator[Case]:
    for build in (calls.forward, calls.backward):
        for dim in (64, 128):
            for n in LENGTHS:
                flash = Flash(sees="causal", dtype=BF16, dim=dim, queries=n, keys=n, heads=1)
                yield Case(f"counted {build.__name__} bf16 D{dim} n = {n}", "counted", partial(build, flash))


# Cases whose texts are mutated, and other inputs for the same texts. They fill rows and keys that are padding in the
# first, have temperatures of any sign, or NaN where it reaches a part of the lanes only.
OTHER_INPUTS: dict[str, tuple[str, ...]] = {}


def _others() -> Iterator[Case]:
    def other(name: str, word: str, build: Callable[..., Call], *args: Any, **options: Any) -> Case:
        OTHER_INPUTS[name] = (*OTHER_INPUTS.get(name, ()), f"{name}: {word}")
        return Case(f"{name}: {word}", "other", partial(build, *args, **options))

    # The last tiles of rows and keys are nearly full. With more tiles, all stages of a pipeline are used.
    full: dict[str, Any] = {"queries": 190, "keys": 379}
    more: dict[str, Any] = {"queries": 318, "keys": 955}
    nan = {"nan": True, "columns": slice(7, 8)}
    for build, dim in ((calls.forward, 64), (calls.forward, 128), (calls.backward, 64)):
        name = f"{build.__name__} bf16 D{dim} causal"
        yield other(name, "full tiles", build, _flash("causal", BF16, dim, **full, beta="any_sign"))
        yield other(name, "NaN", build, _flash("causal_far_into_the_cache", BF16, dim), **nan)
        yield other(name, "more tiles", build, _flash("causal", BF16, dim, **more, beta="any_sign"))
    for build in (calls.forward, calls.backward):  # neighbouring rows with temperatures that differ more
        varied = Flash(sees="causal", dtype=BF16, dim=64, queries=1024, keys=1024, heads=1, beta="any_sign")
        yield other(f"counted {build.__name__} bf16 D64 n = 1024", "any sign of β", build, varied)
    name = "decode bf16 D64 causal, 3 splits"
    decoded: dict[str, Any] = {**DECODED, "dtype": BF16, "dim": 64, "heads": 28, "beta": "any_sign"}

    def decode(word: str, keys: int, splits: int) -> Case:
        return other(name, word, calls.decode, Flash(sees="causal", **{**decoded, "keys": keys}), splits)

    yield decode("full tiles", 381, 3)
    hidden = Flash(sees="causal_far_into_the_cache", **{**decoded, "keys": 45})
    yield other(name, "NaN", calls.decode, hidden, 3, **nan)
    yield decode("more tiles", 1101, 3)
    yield decode("more splits", 1149, 13)
    name = "softmax bf16 n = 1024, mask, bias, counts"
    yield other(name, "fewer keys", calls.row_softmax, BF16, 1008, "mask", "bias", "counts", rows=(2, 2, 7))
    name = "gaps fp16 D64 causal"
    between = (0.5, 0.75, 1.5, 2.0, 2.5, 4.0)
    yield other(name, "full tiles", calls.gaps, _flash("causal", FP16, 64, **full), thresholds=between)
    yield other(name, "NaN", calls.gaps, _flash("causal", FP16, 64), broken=127)


CASES = {
    case.name: case for make in (_forward, _backward, _decode, _gaps, _softmax, _counted, _others) for case in make()
}
CASES |= {f"stock {name}": Case(f"stock {name}", "stock", build) for name, build in stock.CALLS.items()}
