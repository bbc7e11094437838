"""Executor of PTX, as generated for sm_80; sm_86, sm_89 and sm_120 get the same instructions."""
