"""Attention in tiles, in pure torch, with memory linear in length.

`softmax` adds tiles up row by row, `backend` runs forward and backward over all of them.
"""
