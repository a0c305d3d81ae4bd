"""The vocabulary of all of Covey: ids, events, errors, units. It imports nothing else of `covey`."""
