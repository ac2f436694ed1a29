"""What the machine itself allows: the least code that does the same work, without a task system around it."""
