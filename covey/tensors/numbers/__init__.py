"""Types, pieces and sums of tensors, and the frames that carry them: no sockets, no threads."""
