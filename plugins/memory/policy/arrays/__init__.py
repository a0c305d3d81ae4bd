"""Decisions about an array's chunks: which are fetched ahead, and which leave local memory."""
