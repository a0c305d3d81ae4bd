"""`covey-sim tuner`: workers and servers of one job."""
