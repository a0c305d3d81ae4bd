"""Lanes: processes of `aggd` that add, so that sums use several cores."""
