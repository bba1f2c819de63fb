"""gRPC, with two settings that it reads from the environment when it is imported.

Everything here that needs gRPC imports it from this module.

- *Fork support off.* Its handlers run in every forked child, even one that only execs a program as
  another user, and crash there now and then. Our children do not use the channels of their parent.
- *Quiet.* It would report every connection that ends on stderr, in a format of its own; what
  matters comes back as an error, and we log that.

If the environment already sets these variables, its values are kept.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc
from grpc import aio

Context = aio.ServicerContext[Any, Any]
"""A call, as the server sees it."""

__all__ = ["Context", "aio", "grpc"]
