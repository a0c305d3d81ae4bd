"""What agents say of starts, beside what becomes of it."""
