"""Finds the places of stops, by a service that takes its time."""

import asyncio
from collections.abc import AsyncIterator

from fleet.located_stops import Document, EndpointConfig, IDerivation, ReadFromStops, Request

CONCURRENCY = 4


class SlowGeocoder:
    """Stands for a client of a web service that refuses more than four questions at a time."""

    def __init__(self, cell_km: float) -> None:
        self._cell_km = cell_km
        self._asked = 0

    async def place(self, cell: str) -> tuple[float, float] | None:
        if self._asked == CONCURRENCY:
            raise RuntimeError("too many questions at a time")
        self._asked += 1
        try:
            column, row = ord(cell[0]) - ord("A"), cell[1:]
            await asyncio.sleep(0.001 * column)
            return (column * self._cell_km, (int(row) - 1) * self._cell_km)
        except ValueError:
            return None
        finally:
            self._asked -= 1


class Derivation(IDerivation):
    concurrency = CONCURRENCY

    def __init__(self, opened: Request.Open, config: EndpointConfig) -> None:
        super().__init__(opened, config)
        self._geocoder = SlowGeocoder(config.cellKm)

    async def from_stops(self, read: ReadFromStops) -> AsyncIterator[Document]:
        place = await self._geocoder.place(read.doc.cell)
        if place is None:
            yield Document(stop=read.doc.stop, found=False)
        else:
            yield Document(stop=read.doc.stop, found=True, x=place[0], y=place[1])
