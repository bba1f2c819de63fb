"""Sessions: the stream that carries nearly everything.

A unary call costs a Python server some 300 µs, whatever it carries. So each client process opens
one stream and sends in one message what has gathered since its last one; the answers are gathered
the same way, by whoever finds the pen free while the others are still at work. Where one operation
is under way at a time, a message carries one and nothing waits; where there are many, messages
grow and their cost is shared.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from penstock.consensus.committer import wire
from penstock.consensus.committer.auth import Access, Principal
from penstock.consensus.committer.committer import Caller, PersistCommitter
from penstock.consensus.committer.grpcio import aio
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.store import (
    CasResult,
    ConsensusError,
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
    cause_chain,
)

log = logging.getLogger("penstock.consensus.committer")

Context = aio.ServicerContext[Any, Any]


class ServedSession:
    """One client's stream: batches in, answers out, each as soon as it is known.

    A session is about one store, the one that `caller` knows, from its opening to its end.
    """

    def __init__(
        self, committer: PersistCommitter, context: Context, who: Principal, caller: Caller
    ) -> None:
        self._committer = committer
        self._context = context
        self._who = who
        self._caller = caller
        self._may = None if who.access is Access.ADMIN else self._check_write
        self._answers = pb.SessionResponse()
        self._pending = False
        self._writing = False

    async def run(self) -> None:
        window = self._committer.options.limits.client_inflight_max
        await self._context.write(pb.SessionResponse(window=window, incarnation=self._caller.knows))
        async with asyncio.TaskGroup() as running:
            while (request := await self._context.read()) is not aio.EOF:
                if request.cas_key:
                    running.create_task(self._cas(request))
                first = request.first + len(request.cas_key)
                if request.head_key:
                    running.create_task(self._heads(first, request))

    async def _cas(self, request: pb.SessionRequest) -> None:
        batch = [
            (key, VersionedData(seqno, data))
            for key, seqno, data in zip(
                request.cas_key, request.cas_seqno, request.cas_data, strict=False
            )
        ]
        missing = len(request.cas_key) - len(batch)
        outcomes: list[CasResult | ConsensusError]
        try:
            outcomes = await self._committer.compare_and_set_each(
                batch, caller=self._caller, may=self._may
            )
        except ConsensusError as error:
            outcomes = [error] * len(batch)
        except Exception as error:
            outcomes = [unexpected(error)] * len(batch)
        outcomes += [
            Determinate(ErrorKind.INVALID_ARGUMENT, "the batch has columns of unequal length")
        ] * missing
        answers = self._answers
        for number, outcome in enumerate(outcomes, request.first):
            if outcome is CasResult.COMMITTED:
                answers.committed.append(number)
            elif outcome is CasResult.EXPECTATION_MISMATCH:
                answers.mismatched.append(number)
            else:
                self._failed(number, outcome)
        await self._flush()

    async def _heads(self, first: int, request: pb.SessionRequest) -> None:
        fresh = list(request.head_fresh) + [False] * len(request.head_key)
        asked = [self._head(first + i, key, fresh[i]) for i, key in enumerate(request.head_key)]
        if len(asked) == 1:
            await asked[0]
        else:
            await asyncio.gather(*asked)
        await self._flush()

    async def _head(self, number: int, key: str, fresh: bool) -> None:
        try:
            self._who.check(Access.READ, key)
            found = await self._committer.head(key, fresh=fresh, caller=self._caller)
        except ConsensusError as error:
            self._failed(number, error)
        except Exception as error:
            self._failed(number, unexpected(error))
        else:
            if found is None:
                self._answers.absent.append(number)
            else:
                self._answers.found.append(number)
                self._answers.heads.append(wire.to_versioned(found))

    def _failed(self, number: int, error: ConsensusError) -> None:
        self._answers.failed.append(number)
        self._answers.errors.append(wire.to_error(error))

    def _check_write(self, key: str) -> None:
        self._who.check(Access.WRITE, key)

    async def _flush(self) -> None:
        """Send what has been gathered; what others add meanwhile goes in the next message."""
        self._pending = True
        if self._writing:
            return
        self._writing = True
        try:
            while self._pending:
                answers, self._answers = self._answers, pb.SessionResponse()
                self._pending = False
                await self._context.write(answers)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # The client went away. To it, what it had under way is unknown, which is the truth.
            log.debug("answers not delivered", exc_info=error)
        finally:
            self._writing = False


def unexpected(error: Exception) -> Indeterminate:
    """Something of ours broke; whether it did so before or after the commit is not known."""
    log.error("operation failed unexpectedly", exc_info=error)
    unknown = Indeterminate(ErrorKind.INTERNAL, f"{type(error).__name__}: {cause_chain(error)}")
    unknown.__cause__ = error
    return unknown
