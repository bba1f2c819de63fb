"""gRPC, with two settings that it reads from the environment when it is imported.

Everything here that needs gRPC imports it from this module.

- *Fork support off.* Its handlers run in every forked child, also in one that only wants to exec a
  program as another user, and crash there now and then. Children of ours do not use the channels
  of their parent.
- *Quiet.* It would report every connection that ends on stderr, in a format of its own; what
  matters of it comes back as an error, and is logged as ours.

Whoever sets these variables has a reason, and is left alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc
from grpc import aio

__all__ = ["aio", "grpc"]
