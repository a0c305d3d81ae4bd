"""Rounds of tensors that aggregators add, on this host or others."""
