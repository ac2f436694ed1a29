"""No event loop in sight: submit, wait, look and cancel from ordinary code.

python examples/plain.py
"""

from taskyard import TaskCanceled, TaskFailed, Yard

yard = Yard("sqlite:///plain.db")


@yard.consumer
def divide(a: float, b: float) -> float:
    return a / b


if __name__ == "__main__":
    with yard.blocking() as sync:
        print("7 / 2 =", sync.result(sync.submit("divide", {"a": 7, "b": 2}), timeout_s=10))

        # What may go away is tried again, after 1, 2 and 4 seconds; the record shows how far it is.
        hopeless = sync.submit("divide", {"a": 1, "b": 0})
        try:
            sync.result(hopeless, timeout_s=0.5)
        except (TimeoutError, TaskFailed):
            record = sync.record(hopeless)
            print("1 / 0 is", record.state, "after:", record.error.message if record.error else None)

        sync.cancel(hopeless, reason="some things cannot be divided")
        try:
            sync.result(hopeless)
        except TaskCanceled as canceled:
            print(canceled.reason)
