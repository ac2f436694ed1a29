"""Consumers of each form, in workers whose imports are watched."""

import pickle

from pydantic import BaseModel

from taskyard import (
    Algorithm,
    AlgorithmContext,
    AlgorithmSpec,
    BaseTaskConsumer,
    ExecutionHints,
    RetryPolicy,
    Task,
    Yard,
)
from tests.execution import imports

NO_RETRY = RetryPolicy(max_retries=0)


def look(text: str) -> list[str]:
    """What was imported by runs so far, this one included: one module for certain, which nobody else needs."""
    import colorsys  # noqa: F401

    return imports.during_runs


yard = Yard("memory://")


@yard.consumer(executor="process", retry=NO_RETRY)
def function_process(text: str) -> list[str]:
    return look(text)


@yard.consumer(executor="isolated", retry=NO_RETRY)
def function_isolated(text: str) -> list[str]:
    return look(text)


@yard.consumer(executor="process", timeout_s=0.2, retry=NO_RETRY)
def quick_process(text: str) -> str:
    return text


@yard.consumer(executor="isolated", timeout_s=0.2, retry=NO_RETRY)
def quick_isolated(text: str) -> str:
    return text


class ClassForm(BaseTaskConsumer):
    name = "class_process"
    executor = "process"
    retry = NO_RETRY

    def consume(self, task: Task) -> list[str]:  # type: ignore[override]
        return look(task.args["text"])


class Given(BaseModel):
    text: str


class AlgorithmForm(Algorithm):
    spec = AlgorithmSpec("algorithm_isolated", execution=ExecutionHints(isolated_pool=True))
    Input, Output = Given, list[str]

    def run(self, given: Given, context: AlgorithmContext) -> list[str]:
        return look(given.text)


yard.register(ClassForm())
yard.install(AlgorithmForm, retry=NO_RETRY)
WATCH = pickle.dumps((imports.watch_imports, ()))
for pool in (None, "function_isolated", "algorithm_isolated"):
    yard.define_pool(pool, max_workers=1, spare=False, setup=WATCH)
