"""The audit record: what people asked for."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

from taskyard.application.audit_documents import AuditDocument, AuditPage
from taskyard.application.calls import YardContext, check_limit
from taskyard.application.refs import resolve_task
from taskyard.errors import UnknownTask
from taskyard.model.audit import AuditEntry


class LocalAudit:
    """`AuditCalls` on a yard."""

    def __init__(self, context: YardContext) -> None:
        self._context = context

    async def list(
        self,
        *,
        by: str | None = None,
        command: str | None = None,
        task: str | None = None,
        queue: str | None = None,
        device: str | None = None,
        since: datetime | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> AuditPage:
        check_limit(limit)
        yard = self._context.yard
        if task is not None:
            with suppress(UnknownTask):  # the record outlives the task: then the whole id is needed
                task = await resolve_task(yard, task)
        found = await yard.audit(
            by=by,
            command=command,
            task=task,
            queue=queue,
            device=device,
            since=since,
            before_id=before,
            limit=limit + 1,
        )
        page = found[:limit]
        return AuditPage(
            entries=tuple(audit_document(entry) for entry in page),
            next=page[-1].id if len(found) > limit else None,
        )


def audit_document(entry: AuditEntry) -> AuditDocument:
    return AuditDocument(
        number=entry.id,
        at=entry.at,
        actor=entry.actor,
        via=entry.via,
        command=entry.command,
        kind=entry.kind,
        target=entry.target,
        reason=entry.reason,
        details=entry.details,
        matched=entry.matched,
        changed=entry.changed,
        finished=entry.is_finished,
    )
