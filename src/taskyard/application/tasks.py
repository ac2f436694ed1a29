"""Tasks: lists, one task with all that is known of it, why it waits, what has failed; and waiting for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from taskyard.application.calls import YardContext, check_limit, explain_no_match
from taskyard.application.documents import sum_states
from taskyard.application.errors import WaitTimeout
from taskyard.application.explaining import explain_all
from taskyard.application.queue_order_documents import WaitSummary
from taskyard.application.refs import resolve_task
from taskyard.application.task_commands import LocalTaskCommands
from taskyard.application.task_documents import (
    ArtifactContent,
    ChainLink,
    FailureDocument,
    FailurePage,
    LogDocument,
    TaskDetail,
    TaskDocument,
    TaskPage,
    artifact_documents,
    attempt_document,
    failure_document,
    line_documents,
    task_document,
    task_fields,
    waiting_task,
    why_document,
)
from taskyard.errors import TaskEnded
from taskyard.model.failures import FailureGroup
from taskyard.model.redaction import Redactor
from taskyard.model.task import Attempt
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.ports.device import DeviceStore

SHOWN_LINES = 10
"""Log lines that come with a task: a longer log is asked for by itself."""

MAX_ERROR_NAMES = 10
"""Error classes named when no failed task matches."""


class LocalTasks(LocalTaskCommands):
    """`TaskCalls` on a yard."""

    def __init__(self, context: YardContext) -> None:
        super().__init__(context)
        self._yard = context.yard

    async def list(self, where: TaskFilter = ALL_TASKS, *, before: str | None = None, limit: int = 20) -> TaskPage:
        check_limit(limit)
        yard = self._yard
        before_id = None
        if before is not None:
            before_id = (await yard.handle(await resolve_task(yard, before)).record()).id
        # One more than the page shows whether there is a next page.
        found = await yard.store.list_tasks(where, before_id=before_id, limit=limit + 1)
        all_counts = await yard.store.count()
        counts = sum_states(all_counts, None if where.queue is None else [where.queue])
        shown = found[:limit]
        whys = await yard.why_many(shown)
        return TaskPage(
            tasks=tuple(waiting_task(record, why) for record, why in zip(shown, whys, strict=True)),
            counts=counts,
            store_counts={} if counts else sum_states(all_counts),
            next_before=shown[-1].uuid if len(found) > limit else None,
            no_match="" if found else await explain_no_match(self._context, where),
        )

    async def get(self, ref: str, *, reveal: bool = False) -> TaskDetail:
        yard = self._yard
        record = await yard.handle(await resolve_task(yard, ref)).record()
        attempts = await yard.attempts(record.uuid)
        lines = await yard.log_lines(record.uuid, limit=SHOWN_LINES)
        artifacts = await yard.artifacts(record.uuid)
        names = {status.node.incarnation: status.node.name for status in await yard.store.nodes()}
        numbers = await self._find_numbers(attempts)
        (why,) = await yard.why_many([record])
        redactor = Redactor(record, reveal=reveal)
        return TaskDetail(
            **task_fields(record, redactor),
            why=why_document(why, redactor),
            waits_for_key=record.is_parked,
            attempts=tuple(attempt_document(one, redactor, names, numbers) for one in attempts),
            lines=line_documents(lines, attempts, redactor),
            artifacts=artifact_documents(artifacts, attempts),
            node_name="" if record.node is None else names.get(record.node, ""),
        )

    async def _find_numbers(self, attempts: Sequence[Attempt]) -> dict[str, int]:
        """The numbers of the devices by name, if one of these attempts ran on a device."""
        store = self._yard.store
        if not isinstance(store, DeviceStore) or not any(attempt.device for attempt in attempts):
            return {}
        return {status.name: status.spec.number for status in await store.list_devices()}

    async def get_many(self, ids: Sequence[str]) -> tuple[TaskDocument, ...]:
        found = [await self._yard.store.find(uuid) for uuid in ids]
        return tuple(task_document(record) for record in found if record is not None)

    async def resolve(self, refs: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([await resolve_task(self._yard, ref) for ref in refs]))

    async def count(self, where: TaskFilter = ALL_TASKS) -> int:
        return await self._yard.matching(where).count()

    async def get_log(
        self, ref: str, *, attempt: int | None = None, limit: int = 100, reveal: bool = False
    ) -> LogDocument:
        check_limit(limit)
        yard = self._yard
        record = await yard.handle(await resolve_task(yard, ref)).record()
        attempts = await yard.attempts(record.uuid)
        lines = await yard.log_lines(record.uuid, attempt, limit=limit)
        return LogDocument(task=record.uuid, lines=line_documents(lines, attempts, Redactor(record, reveal=reveal)))

    async def read_artifact(self, ref: str, name: str, *, attempt: int | None = None) -> ArtifactContent:
        uuid = await resolve_task(self._yard, ref)
        return ArtifactContent(task=uuid, name=name, data=await self._yard.read_artifact(uuid, name, attempt))

    async def explain(self, ref: str, *, max_chain: int = 10) -> tuple[ChainLink, ...]:
        check_limit(max_chain, field="max_chain")
        yard = self._yard
        chain: dict[str, ChainLink] = {}
        next_uuid: str | None = await resolve_task(yard, ref)
        while next_uuid is not None and len(chain) < max_chain and next_uuid not in chain:
            record = await yard.store.find(next_uuid)
            if record is None:
                break  # it was forgotten in the meantime
            (why,) = await yard.why_many([record])
            chain[next_uuid] = ChainLink(
                uuid=record.uuid,
                consumer=record.consumer,
                queue=record.queue,
                state=record.state,
                why=why_document(why, Redactor(record)),
            )
            next_uuid = None if why is None else why.blocker
        return tuple(chain.values())

    async def explain_all(self, where: TaskFilter = ALL_TASKS, *, limit: int = 20) -> WaitSummary:
        return await explain_all(self._context, where, limit=check_limit(limit))

    async def failures(self, where: TaskFilter = ALL_TASKS, *, limit: int = 20) -> FailurePage:
        groups = [await self._failure(group) for group in await self._yard.failures(where, limit=check_limit(limit))]
        if groups:
            return FailurePage(groups=tuple(groups))
        errors = Counter[str]()
        for other in await self._yard.failures():
            errors[other.error] += other.count
        no_match = await explain_no_match(self._context, where)
        return FailurePage(groups=(), other_errors=dict(errors.most_common(MAX_ERROR_NAMES + 1)), no_match=no_match)

    async def _failure(self, group: FailureGroup) -> FailureDocument:
        record = await self._yard.store.find(group.uuid)
        return failure_document(group, "" if record is None else Redactor(record).text(group.message))

    async def wait(self, ref: str, *, timeout_s: float | None = None, reveal: bool = False) -> TaskDocument:
        uuid = await resolve_task(self._yard, ref)
        handle = self._yard.handle(uuid)
        try:
            await handle.result(timeout_s=timeout_s)
        except TaskEnded as ended:
            record = await self._yard.store.find(uuid)
            raise ended if record is None else Redactor(record).error(ended) from None
        except TimeoutError as late:
            raise WaitTimeout(uuid, str(late)) from None
        return task_document(await handle.record(), reveal=reveal)
