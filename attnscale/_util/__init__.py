"""Domain-independent helpers: argument checks, files, caches, tracing state, and all module-level state (`state`).

Imports only `attnscale.errors`; every other folder may import from here.
"""
