"""What the parts promise each other. Each sentence of a port's docstring has a contract test in `taskyard.testing`."""
