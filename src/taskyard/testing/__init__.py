"""What the tests of Taskyard stand on, shipped so that others can test their own stores and executors with it.

`contract` has the suites every store and every executor must pass, `samples` builds the values they speak of.
"""
