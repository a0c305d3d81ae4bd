"""What is looked at in a simulated rack, and over its code: invariants, custody of pages, leaks, handlers never entered."""
