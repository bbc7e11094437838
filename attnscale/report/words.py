"""Numbers and terms as a reader sees them."""

from __future__ import annotations

MINUS = "\N{MINUS SIGN}"

# One plain sentence for each term, shown where it first appears.
TERMS = {
    "β": "β multiplies the logits of attention before the softmax; ordinary attention has β = 1.",
    "n": "n is the number of keys that a query may see, and a law is a formula β(n).",
    "trained length": "The trained length is the longest context that the model saw in training.",
    "bits per byte": "Bits per byte say how badly the model predicts prose: fewer is better.",
    "paired difference": (
        "A paired difference compares two policies on the same sequences, so that what is hard for both cancels out; "
        "its 95 % interval is by bootstrap."
    ),
    "w_max": "w_max is the largest attention weight of a row: 1 if one key has all of it.",
    "entropy": "Entropy tells over how many keys a row spreads its weight: e to the entropy is about their number.",
    "Λ": "Λ, the accumulation scale, is the largest ln N(t)/t, where N(t) keys score within t of the best: "
    "the more rivals the best key has, the larger it is.",
    "r": "r = β/Λ, the criticality, compares the temperature with those rivals: above 1 the best key keeps its weight "
    "however many there are, below 1 they drown it.",
}


def short(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, without an exponent where that is readable.

    >>> short(0.123456), short(-2.5), short(16384.0), short(0.0), short(1e-7)
    ('0.123', '−2.5', '16384', '0', '1e−07')
    """
    whole = 10**digits <= abs(value) < 1e7
    return (f"{value:.0f}" if whole else f"{value:.{digits}g}").replace("-", MINUS).replace("e+", "e")


def percent(share: float) -> str:
    """
    >>> percent(0.7), percent(0.004), percent(0.0)
    ('70 %', '0.4 %', '0 %')
    """
    return f"{points(share)} %"


def points(share: float) -> str:
    """A difference of shares in percentage points: whole ones, unless it is smaller than one.

    >>> points(0.482), points(-0.02), points(0.004)
    ('48', '−2', '0.4')
    """
    scaled = 100 * share
    text = f"{scaled:.0f}" if abs(scaled) >= 0.95 else f"{scaled:.1f}"
    return (text.removesuffix(".0").replace("-0", "0") if float(text) == 0 else text).replace("-", MINUS)


def bits(value: float) -> str:
    """Bits per byte with two digits, or with three if they are few.

    >>> bits(1.2), bits(-0.0001), bits(-0.0254)
    ('1.20', '0.00', '−0.025')
    """
    text = f"{value:.3f}" if 0.0005 <= abs(value) < 0.0995 else f"{value:.2f}"
    return (text.lstrip("-") if float(text) == 0 else text).replace("-", MINUS)
