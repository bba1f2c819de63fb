"""gRPC reads its environment when it is imported: our settings have to come first."""

from penstock.consensus.committer import grpcio  # noqa: F401
