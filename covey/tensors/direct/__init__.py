"""Ranks that own tables of their job: they add what other ranks send them, in their own process, without an `aggd`."""
