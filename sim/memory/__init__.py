"""`covey-sim memory`: a rack that borrows memory."""
