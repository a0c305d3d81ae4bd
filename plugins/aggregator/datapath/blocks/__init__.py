"""The copying of Blocks from one owner to the next."""
