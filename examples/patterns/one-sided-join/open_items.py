"""Invoices, and the payments that were made on them."""

from collections.abc import Iterator

from bank.open_items import Document, IDerivation, ReadFromInvoices, ReadFromPayments


class Derivation(IDerivation):
    """Keeps, for each invoice, either that it is there or what was paid before it came."""

    def from_invoices(self, read: ReadFromInvoices) -> Iterator[Document]:
        early = self.keyed.get(read.doc.invoice) or {"payments": 0, "cents": 0}
        if "seen" in early:
            return
        self.keyed[read.doc.invoice] = {"seen": True}
        yield Document(
            invoice=read.doc.invoice,
            customer=read.doc.customer,
            payments=early["payments"],
            due=read.doc.cents - early["cents"],
        )

    def from_payments(self, read: ReadFromPayments) -> Iterator[Document]:
        known = self.keyed.setdefault(read.doc.invoice, {"payments": 0, "cents": 0})
        if "seen" in known:
            yield Document(invoice=read.doc.invoice, payments=1, due=-read.doc.cents)
        else:
            known["payments"] += 1
            known["cents"] += read.doc.cents
