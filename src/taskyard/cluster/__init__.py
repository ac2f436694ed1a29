"""Other nodes on the same store: noticing that one died, and taking its tasks back."""
