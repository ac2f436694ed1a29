"""`taskyard doctor`: what is wrong with a store, and what to do about it. It looks, and changes nothing."""
