"""Helpers without a domain: checks of numbers, files, memories, scratch buffers, and all module-level state (`state`).

Imports `attnscale.errors` only; every other folder may import from here.
"""
