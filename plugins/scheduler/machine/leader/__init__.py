"""What the elected leader decides: which jobs run, and which stop for them."""
