"""Arrays that are in local memory in part."""
