"""With what: how much CPU and memory this process may use, who says so, and how many workers that makes."""
