"""What `taskyard demo` shows: an app like any other, and the web server that its downloads come from. Both use only the
public names of `taskyard`."""
