"""Who is there: alive, suspect, gone, left."""
