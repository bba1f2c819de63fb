"""Python's collector of cycles, kept away from work that makes many objects and no cycles.

It looks through everything there is whenever there is a quarter more of it. To whoever decodes ten
thousand journals, or documents by the thousand, that is a third of the time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collection within the block, or the function that this decorates.

    Counts for the whole process, so the block must be short: what others leave behind meanwhile is
    collected afterwards. Blocks may overlap, and the one that began first ends it for all.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
