"""`taskyard demo`: real work on a real store, shown live to somebody who has never seen a yard."""
