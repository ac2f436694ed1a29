"""`taskyard demo`: real work on a real store, shown live. The app and its web server are in `taskyard.demo`."""
