"""How the scheduler decides: order (2DAS), admission (quota), placement, and the words for it. Pure functions."""
