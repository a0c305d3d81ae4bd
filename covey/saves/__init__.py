"""Saving models that are updated where gradients are added, without stopping ranks."""
