"""How one run is carried out, bounded and reported: the runner and its executors."""
