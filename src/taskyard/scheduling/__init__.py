"""When: clocks and the due-time loop."""
