"""What is looked at in a simulated rack, and over its code: invariants, pages in custody, leaks, unentered handlers."""
