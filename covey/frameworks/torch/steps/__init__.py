"""Steps of several optimizers, and what a rank keeps of them."""
