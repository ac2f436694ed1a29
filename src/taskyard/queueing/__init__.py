"""Which goes next: admission, the dispatcher around `Store.turn`, and the watcher of outcomes."""
