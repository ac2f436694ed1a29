"""Which goes next: admission, the inbox, the dispatcher around `Store.turn`, and the watcher of outcomes."""
