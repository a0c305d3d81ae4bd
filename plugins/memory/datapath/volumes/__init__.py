"""A volume: its slabs, wherever they are, read and written as one range of bytes."""
