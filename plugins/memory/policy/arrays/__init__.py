"""Which chunks of an array are fetched, and which leave local memory."""
