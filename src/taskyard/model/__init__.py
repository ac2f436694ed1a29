"""Values and pure rules: no await, no I/O, no clock read. Everything here can be tested with plain asserts."""
