"""Rounds of named tensors: their numbers, and the ways in which they are added."""
