"""Attention in tiles, in pure torch, with memory linear in length.

`tiles` cuts a call into tiles, `logits` computes the logits of one and their gradients, `softmax` adds tiles up row by
row, `backend` runs forward and backward over all of them. `backends.gaps` counts gaps over the same tiles.
"""
