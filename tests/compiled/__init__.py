"""Execution of compiled kernels without a GPU: PTX for sm_80 and machine code for gfx942, one instruction at a time."""
