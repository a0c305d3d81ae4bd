"""The books: what is kept, and told, of jobs after they have ended."""
