"""Python's collector of cycles, kept away from work that makes many objects and no cycles.

The collector looks through all objects whenever their number has grown by a quarter. When ten
thousand journals are decoded, or documents by the thousand, that takes a third of the time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause collection within the block, or the function that this decorates.

    It pauses for the whole process, so the block must be short and must not await: what others
    leave behind meanwhile is collected afterwards. Blocks may overlap, and the one that began first
    ends the pause for all.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
