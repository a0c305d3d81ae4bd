"""The machine for arrays of which only a part is in local memory."""
