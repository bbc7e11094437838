"""The C cores of the executors, built with the system's compiler when they are first needed."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

# Results must not depend on the compiler: no contraction to fused operations, and integers wrap.
FLAGS = (
    "-O2", "-ftree-vectorize", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off", "-fwrapv",
    "-fno-strict-aliasing", "-fno-math-errno",
)  # fmt: skip


def build(definitions: Iterable[tuple[str, int]], generated: str, *sources: str | Path) -> ctypes.CDLL | None:
    """Compile C code, as text or in files, behind `definitions` into a library; None if there is no C compiler.

    `generated` replaces the line `// GENERATED`.

    The library is kept in the folder for temporary files, under the hash of its source.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    constants = "".join(f"#define {name} {value}\n" for name, value in definitions)
    text = "\n".join([constants, *(x if isinstance(x, str) else x.read_text() for x in sources)])
    return _load(compiler, text.replace("// GENERATED", generated))


@functools.cache
def _load(compiler: str, text: str) -> ctypes.CDLL:
    key = hashlib.sha256("\n".join([compiler, *FLAGS, text]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"attnscale-executors-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, made = Path(work) / "core.c", Path(work) / "core.so"
            source.write_text(text)
            done = subprocess.run(
                [compiler, *FLAGS, str(source), "-o", str(made), "-lm"], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"the C core does not compile:\n{done.stderr}")
            made.replace(library)
    return ctypes.CDLL(str(library))
