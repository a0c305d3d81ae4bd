"""`covey-sim aggregators`: tensors of many jobs on few processors."""
