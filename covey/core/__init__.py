"""The vocabulary of all of Covey: ids, events, errors, units. Nothing of it imports the rest of `covey`."""
