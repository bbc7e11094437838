"""Explanations of terms for readers who do not know the papers: sentences of both pages."""

from __future__ import annotations

TERMS = {
    "β": "β multiplies the attention logits before the softmax; standard attention has β = 1.",
    "n": "n is the number of keys visible to a query; a policy computes β, usually from n.",
    "trained length": "The trained length is the longest context seen in training.",
    "bits per byte": "Bits per byte measure how well the model predicts text; lower is better.",
    "paired difference": (
        "A paired difference compares two policies on the same sequences, which removes the variation between "
        "sequences; its 95 % interval is a bootstrap interval."
    ),
    "w_max": "w_max is the largest attention weight of a row; it is 1 if one key has all the weight.",
    "entropy": "Entropy measures the spread of a row's weights; exp(entropy) is roughly the number of attended keys.",
    "Λ": "Λ, the accumulation scale, is the maximum of ln N(t)/t, where N(t) is the number of keys with a score within "
    "t of the best; it grows with the number of keys that compete with the best one.",
    "r": "r = β/Λ, the criticality, relates β to this competition: with r > 1 the best key keeps its weight for any "
    "number of keys, with r < 1 its competitors take the weight.",
    "row": "A row is one query: the attention weights that one token gives to the keys it sees.",
    "logit": "A logit is the scaled product of a query and a key, times β; the softmax turns logits into weights.",
    "relative entropy": "Entropy / ln n is the entropy relative to its maximum: 1 if all visible keys get the same "
    "weight, 0 if one key gets everything.",
    "max_logit": "Logits that keep growing saturate the softmax, and training often diverges afterwards.",
    "sink": "An attention sink is a head that puts most of its weight on the first keys, whatever the query. Sinks are "
    "common in healthy models: the head adds almost nothing. Its w_max and its r tell how clearly the first key wins, "
    "not whether a relevant key is found, so a large r is neither good nor bad.",
    "score gain": "Score gain is the gradient that reaches queries and keys, relative to the gradient of the head's "
    "output. At 0 the head cannot learn where to attend.",
    "token angle": "Token angle is the mean of 1 − cosine between the value vectors of a sequence. At 0 all tokens "
    "point in the same direction, and attention has nothing to choose from (rank collapse).",
    "gain": "Gain is the gradient at the inputs of an attention head relative to the gradient at its output.",
    "band": "A line follows one head over the training steps; the band covers 10–90 % of its rows.",
}
# The terms that explain a quantity.
OF_QUANTITY = {
    "w_max": ("w_max",),
    "relative_entropy": ("relative entropy",),
    "entropy": ("entropy",),
    "max_logit": ("logit", "max_logit"),
    "criticality": ("r", "Λ"),
    "accumulation": ("Λ",),
    "first_share": ("sink",),
    "score_gain": ("score gain",),
    "token_angle": ("token angle",),
    "gain": ("gain",),
    "beta": ("β",),
    "visible": ("n",),
}
# The legend of the page of a run.
LEGEND = (
    *("row", "band", "n", "logit", "β", "w_max", "entropy", "relative entropy", "max_logit", "Λ", "r", "sink"),
    *("score gain", "gain", "token angle"),
)


def explanation(quantity: str) -> str:
    """Return the sentences that explain a quantity; empty if there are none.

    >>> explanation("beta")
    'β multiplies the attention logits before the softmax; standard attention has β = 1.'
    """
    return " ".join(TERMS[term] for term in OF_QUANTITY.get(quantity, ()))
