"""Consumers: what the nodes of a store have published about them."""

from __future__ import annotations

from taskyard.application.calls import YardContext
from taskyard.application.consumer_documents import ConsumerDocument
from taskyard.model.catalogue import CatalogueEntry


class LocalConsumers:
    """`ConsumerCalls` on a yard."""

    def __init__(self, context: YardContext) -> None:
        self._context = context

    async def list(self) -> tuple[ConsumerDocument, ...]:
        return tuple(consumer_document(entry) for entry in await self._context.yard.catalogue())


def consumer_document(entry: CatalogueEntry) -> ConsumerDocument:
    spec = entry.spec
    return ConsumerDocument(
        name=spec.name,
        queue=spec.queue,
        executor=spec.executor,
        version=spec.version,
        timeout_s=spec.timeout_s,
        has_produce=spec.has_produce,
        served=entry.is_served,
        nodes=entry.nodes,
        seen_at=entry.seen_at,
        args_schema=spec.args,
        result_schema=spec.result,
    )
